"""Run the originals' own test files against our classes, with the imports changed.

    python tools/run_original_tests.py FOLDER            ours
    python tools/run_original_tests.py FOLDER --theirs   what is installed of theirs

FOLDER holds files that you have fetched, anywhere below it, by their own names:

    loss_scale_manager_test.py     tensorflow/contrib/mixed_precision/python, r1.15
    loss_scale_optimizer_test.py   the same; tensorflow/python/training/experimental and
                                   tensorflow/python/keras/mixed_precision/experimental,
                                   r1.15 to r2.3; tf_keras/mixed_precision in tf-keras;
                                   keras/src/optimizers in keras
    loss_scale_test.py             tensorflow/python/training/experimental

Nothing of a file is changed but its import lines, which name modules that are ours or
that have moved since. A test that fails by a written rule is listed below with its row
on the compatibility page; any other failure makes this script fail.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

OURS = {
    r"from tensorflow\.contrib\.mixed_precision\.python import \w+ as (\w+)": (
        r"import lossscale.tensorflow as \1"
    ),
    r"from tensorflow\.python\.training\.experimental import \w+ as (\w+)": (
        r"import lossscale.tensorflow as \1"
    ),
    r"from tensorflow\.python\.training\.experimental import (\w+)$": (
        r"import lossscale.tensorflow as \1"
    ),
    r"from tensorflow\.python\.keras\.mixed_precision(\.experimental)? import "
    r"loss_scale_optimizer$": "import lossscale.tensorflow as loss_scale_optimizer",
    r"from tf_keras\.mixed_precision import loss_scale_optimizer$": (
        "from lossscale.tensorflow import tf_keras as loss_scale_optimizer"
    ),
    r"from keras\.src\.optimizers\.loss_scale_optimizer import LossScaleOptimizer$": (
        "from lossscale.keras import LossScaleOptimizer"
    ),
}
"""Import lines that name a class under test, and their replacements."""

MOVED = {
    r"from tensorflow\.python\.data\.ops import dataset_ops$": (
        "from tensorflow.compat.v1 import data as dataset_ops"
    ),
    r"from tensorflow\.python\.distribute import distribution_strategy_context$": (
        "from tensorflow.python.distribute import distribute_lib as "
        "distribution_strategy_context"
    ),
    r"from tensorflow\.python\.ops import control_flow_ops$": (
        "from tensorflow.python.ops import cond as control_flow_ops"
    ),
    r"from tensorflow\.python\.ops import variable_scope$": (
        "import types; import tensorflow as _tf; "
        "variable_scope = types.SimpleNamespace("
        "get_variable=_tf.compat.v1.get_variable, variable=_tf.compat.v1.Variable)"
    ),
    r"from tensorflow\.python\.framework import ops$": (
        "import tensorflow.compat.v1 as ops"
    ),
    r"from tensorflow\.python\.training\.tracking import util as (\w+)$": (
        r"from tensorflow import train as \1"
    ),
    r"from tensorflow\.python\.keras\.mixed_precision\.experimental import test_util": (
        "from tf_keras.src.mixed_precision import test_util"
    ),
    r"from tensorflow\.python\.keras\.optimizer_v2 import (\w+)$": (
        r"from tf_keras.src.optimizers.legacy import \1"
    ),
    r"from tensorflow\.python\.keras import optimizers$": (
        "from tf_keras.src import optimizers"
    ),
    r"from tf_keras import optimizers$": "from tf_keras.src import optimizers",
    r"from tf_keras\.(?!src)([\w.]+) import": r"from tf_keras.src.\1 import",
}
"""Import lines of TensorFlow's and tf_keras's that have moved since."""

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_USE_LEGACY_KERAS": "1",
    "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "tensorflow"),
}


class Exemption(NamedTuple):
    """Tests that fail by a written rule."""

    file: str
    """A part of the file that only it has."""
    tests: str
    """A regular expression for the tests' names."""
    row: str
    """The row on the compatibility page."""


EXEMPTIONS = (
    Exemption(
        "loss_scale_optimizer.LossScaleOptimizer(opt, loss_scale=10.)",
        "testArbitraryAttributesNotExposed|testSlotMethodErrors",
        "T16, T18",
    ),
    Exemption("LossScaleOptimizerV3", "testConvertToLegacyOptimizer", "T20"),
    Exemption(
        "LossScaleOptimizerV3",
        "testErrorWhenV3LsoWrapsV2Optimizer",
        "T25",
    ),
)


class Result(NamedTuple):
    """What became of a file."""

    file: str
    passed: int
    skipped: int
    exempt: dict[str, str]
    failed: dict[str, str]


def rewrite_imports(text: str, *, theirs: bool) -> str:
    """Return the text of a test file with its import lines changed."""
    table = MOVED if theirs else OURS | MOVED
    lines = []
    for line in text.splitlines():
        changed = line
        for pattern, replacement in table.items():
            changed, count = re.subn(f"^{pattern}", replacement, line)
            if count:
                break
        lines.append(changed)
    # assertRaisesRegexp is gone from Python 3.12.
    return "\n".join(lines).replace("assertRaisesRegexp(", "assertRaisesRegex(") + "\n"


def run(path: Path, folder: Path, *, theirs: bool) -> Result:
    """Run one file in a process of its own."""
    name = str(path.relative_to(folder))
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        test, report = Path(temporary) / path.name, Path(temporary) / "report.xml"
        test.write_text(rewrite_imports(text, theirs=theirs), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull]
        command += ["-p", "no:cacheprovider"]
        finished = subprocess.run(  # noqa: S603  # our own interpreter
            [*command, "--rootdir", temporary, f"--junitxml={report}", str(test)],
            env=os.environ | ENVIRONMENT,
            cwd=temporary,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not report.exists():
            return Result(name, 0, 0, {}, {"the whole file": finished.stdout[-2000:]})
        return count_results(name, text, ET.parse(report))  # noqa: S314  # of our own


def count_results(name: str, text: str, report: ET.ElementTree) -> Result:
    """Sort the cases of a report."""
    passed = skipped = 0
    exempt, failed = {}, {}
    for case in report.iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            rows = [
                each.row
                for each in EXEMPTIONS
                if each.file in text and re.search(each.tests, test)
            ]
            if rows:
                exempt[test] = rows[0]
            else:
                failed[test] = problem.get("message", "")[:300]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Result(name, passed, skipped, exempt, failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--only", default="", help="a part of a file's path")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("loss_scale*_test.py"))
    results = [
        run(path, arguments.folder, theirs=arguments.theirs)
        for path in files
        if arguments.only in str(path)
    ]
    print("| file | tests | passed | skipped | by a rule | failed |")
    print("|---|---|---|---|---|---|")
    for result in results:
        total = sum(
            (result.passed, result.skipped, len(result.exempt), len(result.failed))
        )
        print(
            f"| {result.file} | {total} | {result.passed} | {result.skipped} "
            f"| {len(result.exempt)} | {len(result.failed)} |"
        )
    for result in results:
        for test, row in result.exempt.items():
            print(f"{result.file}: {test}: row {row}")
        for test, message in result.failed.items():
            print(f"FAILED {result.file}: {test}: {message}")
    return 1 if not results or any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
