# SPDX-License-Identifier: Apache-2.0
"""Runs the code in the README, in the pages and in docstrings; refuses mixed suites."""

import importlib.util
from contextlib import suppress
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.myst import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "lossscale"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse folders whose tests need several processes, before anything is imported.

    One process with TensorFlow and Triton aborts, and Keras has one backend for each.
    """
    folders = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if any(len(_suites_in(folder)) > 1 for folder in folders if folder.is_dir()):
        message = (
            "The frameworks' tests cannot share one process. Type `make test` for all "
            "of them, `python tools/run_tests.py core torch` for some suites, or "
            "`pytest tests/core` for one folder."
        )
        raise pytest.UsageError(message)


def _suites_in(folder: Path) -> set[str]:
    """Return the kinds of suites that a folder has tests of, such as core and torch."""
    file = ROOT / "tools" / "run_tests.py"
    spec = importlib.util.spec_from_file_location("run_tests", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name.partition("-")[0]
        for name, suite in module.SUITES.items()
        for path in suite.paths
        if (ROOT / path).is_relative_to(folder)
    }


def _import_triton_first(_namespace: object) -> None:
    """Have Triton there before a block imports TensorFlow.

    The other way round ends the process, and torch's optimizers import Triton.
    """
    with suppress(ImportError):
        import triton  # noqa: F401, PLC0415


_pages = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=[
        "README.md",
        "PACKAGE.md",
        "docs/*.md",
        "docs/adapters/*.md",
        "docs/packages/*.md",
    ],
    setup=_import_triton_first,
)
_docstrings = Sybil(
    parsers=[DocTestParser()],
    # One pattern for each folder: before Python 3.13, ** stands for one folder.
    patterns=[
        f"{folder.relative_to(ROOT).as_posix()}/*.py"
        for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")})
    ],
    document_types={".py": PythonDocStringDocument},
    setup=_import_triton_first,
)
pytest_collect_file = (_pages + _docstrings).pytest()
