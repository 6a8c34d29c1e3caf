# SPDX-License-Identifier: Apache-2.0
"""Runs the code in the README, in the pages and in docstrings."""

from contextlib import suppress

from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.myst import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser


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
    # One pattern for each depth: before Python 3.13, ** stands for one folder.
    patterns=[f"src/lossscale/{'*/' * depth}*.py" for depth in range(3)],
    document_types={".py": PythonDocStringDocument},
    setup=_import_triton_first,
)
pytest_collect_file = (_pages + _docstrings).pytest()
