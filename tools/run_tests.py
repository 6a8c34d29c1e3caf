"""Run every suite in a process of its own, two at a time, and add up the results.

A process per framework: importing TensorFlow and then Triton aborts the interpreter,
Keras has one backend per process, and a broken framework fails its suite alone.

    python tools/run_tests.py            all suites
    python tools/run_tests.py core jax   some of them
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parent.parent
AT_A_TIME = 2


class Suite(NamedTuple):
    """Tests that share a process."""

    paths: tuple[str, ...]
    environment: dict[str, str]


def keras(backend: str) -> Suite:
    paths = "tests/compat/test_keras.py", "tests/adapters/keras"
    return Suite(paths, {"KERAS_BACKEND": backend})


def keras_faults(backend: str) -> Suite:
    return Suite(("tests/faults/test_keras_faults.py",), {"KERAS_BACKEND": backend})


def tensorflow(*names: str) -> Suite:
    return Suite(tuple(f"tests/adapters/tensorflow/test_{x}.py" for x in names), {})


# The longest first by processor time, so that the last to finish is a short one and
# both cores stay busy. None is longer than a third of all.
SUITES = {
    "jax": Suite(("tests/adapters/jax",), {}),
    "command": Suite(("tests/cli", "tests/packaging", "tests/demo"), {}),
    "torch": Suite(("tests/compat/test_torch.py", "tests/adapters/torch"), {}),
    "tensorflow": tensorflow(
        *("conformance", "modes", "gradients", "headroom", "checkpoints"),
        *("optimizer", "optimizer_gradients", "optimizer_refusals"),
        *("results", "tf_keras", "tensorflow_1", "saver_names", "example"),
        *("recording", "inject", "data_policies"),
    ),
    "torch-packages": Suite(("tests/ecosystem",), {}),
    "optax": Suite(("tests/adapters/optax",), {}),
    "keras-tensorflow": keras("tensorflow"),
    "tensorflow-traces": tensorflow(
        *("scale_traces", "replica_traces", "optimizer_traces", "input_traces")
    ),
    "torch-ranks": Suite(("tests/distributed",), {}),
    "kernels-interpreted": Suite(
        (
            "tests/kernels/test_rule_interpreted.py",
            "tests/kernels/test_gradient_kernels_interpreted.py",
            "tests/kernels/test_scaler_interpreted.py",
            "tests/kernels/test_statistics_interpreted.py",
            "tests/kernels/test_optim_interpreted.py",
            "tests/kernels/test_norms_interpreted.py",
            "tests/kernels/test_policies_interpreted.py",
        ),
        {"TRITON_INTERPRET": "1"},
    ),
    "jax-faults": Suite(("tests/faults/test_jax_faults.py",), {}),
    "keras-jax": keras("jax"),
    "diagnostics": Suite(
        (
            "tests/diagnostics",
            # Skipped where the tracker is missing, or Playwright, or chromium.
            "tests/loggers",
            "tests/browser",
            "tests/adapters/test_numpy.py",
        ),
        {},
    ),
    "tensorflow-originals": tensorflow("against_tensorflow"),
    # Every code block of the README and the pages, every example in a docstring.
    "documents": Suite(("README.md", "PACKAGE.md", "docs", "src"), {}),
    "tensorflow-replicas": tensorflow("strategies", "multi_worker"),
    "core": Suite(("tests/core",), {}),
    "keras-torch": keras("torch"),
    "tensorflow-faults": Suite(("tests/faults/test_tensorflow_faults.py",), {}),
    "keras-faults-tensorflow": keras_faults("tensorflow"),
    "keras-faults-jax": keras_faults("jax"),
    "keras-faults-torch": keras_faults("torch"),
    "tensorflow-preset": Suite(("tests/compat/test_tensorflow.py",), {}),
    # Apart: the adapter's tests hold the whole process to strict promotion.
    "jax-presets": Suite(("tests/compat/test_jax.py",), {}),
    "kernels": Suite(
        (
            "tests/kernels/test_rule_in_triton.py",
            "tests/kernels/test_kernels_compile.py",
            "tests/kernels/test_optim_compile.py",
            "tests/kernels/test_norms_compile.py",
            "tests/kernels/test_native.py",
        ),
        {},
    ),
    "torch-faults": Suite(("tests/faults/test_torch_faults.py",), {}),
}
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # Two suites run on two cores: more threads would wait for each other in a loop.
    "OMP_NUM_THREADS": "1",
}


class Result(NamedTuple):
    """What became of a suite."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    output: str


def run(name: str) -> Result:
    """Run one suite; a process that dies without a report counts as a failure."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        start = time.monotonic()
        process = subprocess.run(  # noqa: S603  # our own interpreter and paths
            [*command, *suite.paths],
            cwd=ROOT,
            env=os.environ | QUIET | suite.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - start
        passed = failed = skipped = 0
        if report.exists():
            (counts,) = ET.parse(report).getroot().iter("testsuite")  # noqa: S314
            skipped = int(counts.get("skipped", 0))
            failed = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
            passed = int(counts.get("tests", 0)) - failed - skipped
        # A process that died without a report, or a suite that ran nothing, failed.
        if not failed and (process.returncode or not passed):
            failed = 1
    return Result(name, passed, failed, skipped, seconds, process.stdout)


def left_out() -> list[str]:
    """Return the test files that are in no suite: they would never run."""
    listed = [ROOT / path for suite in SUITES.values() for path in suite.paths]
    return [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if not any(file.is_relative_to(path) for path in listed)
    ]


def main(names: list[str]) -> int:
    if left_out():
        print(f"These tests are in no suite of {Path(__file__).name}: {left_out()}")
        return 2
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"There is no suite {unknown}; there are {', '.join(SUITES)}.")
        return 2
    results = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for result in pool.map(run, names or list(SUITES)):
            print(
                f"{result.name:20} {result.passed:5} passed {result.failed:3} failed "
                f"{result.skipped:3} skipped {result.seconds:6.1f} s",
                flush=True,
            )
            if result.failed:
                print(result.output, flush=True)
            else:
                for line in result.output.splitlines():
                    if line.startswith("SKIPPED"):
                        print(f"    {line}", flush=True)
            results.append(result)
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results)
        for name in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
