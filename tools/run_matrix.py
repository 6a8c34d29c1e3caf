"""Run the tests of TensorFlow and Keras with the oldest versions that we declare.

    python tools/run_matrix.py FOLDER          makes FOLDER/oldest, and runs its suites
    python tools/run_matrix.py FOLDER --only tensorflow

The newest versions are those of `constraints.txt`, with which `make test` runs.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
OLDEST = ("tensorflow-cpu==2.18.0", "keras==3.14.0", "pytest", "hypothesis", "sybil")
# It asks for the tensorflow with CUDA; tensorflow-cpu is the same module.
WITHOUT_DEPENDENCIES = ("tf-keras==2.18.0",)
SUITES = {
    "tensorflow": (
        "tests/adapters/tensorflow/test_tf_keras.py",
        "tests/adapters/tensorflow/test_optimizer.py",
        "tests/adapters/tensorflow/test_optimizer_gradients.py",
        "tests/adapters/tensorflow/test_optimizer_refusals.py",
        "tests/adapters/tensorflow/test_checkpoints.py",
        "tests/adapters/tensorflow/test_saver_names.py",
        "tests/adapters/tensorflow/test_results.py",
        "tests/adapters/tensorflow/test_headroom.py",
    ),
    "keras": ("tests/adapters/keras",),
}


def make(folder: Path) -> Path:
    """Return the interpreter of an environment with the oldest versions."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *OLDEST], check=True)  # noqa: S603
        subprocess.run(  # noqa: S603
            [*install, "--no-deps", *WITHOUT_DEPENDENCIES], check=True
        )
    return python


def run(python: Path, paths: tuple[str, ...]) -> int:
    """Run tests, with the package as it is in the repository."""
    environment = {
        "PYTHONPATH": str(ROOT / "src"),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return subprocess.run(  # noqa: S603
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SUITES)
    arguments = parser.parse_args()
    python = make(arguments.folder / "oldest")
    chosen = [arguments.only] if arguments.only else list(SUITES)
    return max(run(python, SUITES[name]) for name in chosen)


if __name__ == "__main__":
    sys.exit(main())
