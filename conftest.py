# SPDX-License-Identifier: Apache-2.0
"""Runs the code in the README, in the pages and in docstrings."""

from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.myst import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

_pages = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/adapters/*.md"],
)
_docstrings = Sybil(
    parsers=[DocTestParser()],
    # One pattern for each depth: before Python 3.13, ** stands for one folder.
    patterns=[f"src/lossscale/{'*/' * depth}*.py" for depth in range(3)],
    document_types={".py": PythonDocStringDocument},
)
pytest_collect_file = (_pages + _docstrings).pytest()
