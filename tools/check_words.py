"""Fail if the source or the pages use a word that this project has given up.

    python tools/check_words.py

Earlier versions had a language of their own. Each word below has a plain one that
readers know from other libraries; docs/glossary.md defines the terms. Identifiers,
comments, messages and pages are searched alike.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# What to search for, and what to write instead.
DENIED = {
    r"look(s|ed|ing)? (at|before)|(a|one|each|every|no) look": "check, inspect",
    r"verdicts?": "summary, check result",
    r"reckon(s|ed|ing)?": "compute",
    r"agreement|agreeing": "consensus, all_reduce",
    r"shelf|shelves": "pool",
    r"rooms?": "module; buffer",
    r"handover|handed over|hands? over": "pass, fused optimizer",
    r"told": "informed, given",
    r"lends?|lent|lending": "provide, adapt",
    r"stands": "is, represents",
    r"(come|comes|came|coming) apart": "diverge, differ",
    r"given_up|giving up|gives? up": "failed",
    r"culprits?": "nonfinite_names",
    r"(nobody|somebody|anybody|whoever)": "name the actor",
    r"of no use": "invalid",
    r"anew": "again",
    r"beside": "alongside, next to, compared with",
    r"(five )?verbs?": "functional API, functions",
    r"(?<!tf\.)nests?": "nested structure",
    r"clean steps?": "finite step",
    r"bad steps?": "overflow, skipped step",
    r"good steps?": "finite step",
    r"what it promises": "its contract",
    r"(zero|subnormal)_share": "zero_fraction, subnormal_fraction",
    r"backoff_refills|late_growth": "backoff_resets_hysteresis, growth_delay",
    r"shown\(": "format_value(",
    r"stepper": "wrapped optimizer",
    r"CarriedScale": "GradientScale",
    r"cell_of": "create_variables",
    r"tops": "amaxes",
    r"LostShare": "LostFraction",
    r"widen(s|ed|ing)?": "upcast",
    r"(ranks|who) agrees?": "one decision, reduce",
}

SEARCHED = (
    *("README.md", "PACKAGE.md", "CONTRIBUTING.md", "docs", "src", "examples"),
    *("benchmarks", "tests", "tools", "typing_tests"),
)
ENDINGS = {".py", ".md"}

# What lists the words, and folders and pages that still have old ones. No more of
# these are to be added.
UNCONVERTED = (
    "tools/check_words.py",  # it lists the words
    "tests/packaging/test_words.py",
)


class Hit(NamedTuple):
    """A denied word, where it is, and what to write."""

    path: str
    line: int
    word: str
    advice: str


def find(path: str, text: str) -> list[Hit]:
    """Return the denied words of a text."""
    return [
        Hit(path, text.count("\n", 0, match.start()) + 1, match[0], advice)
        for pattern, advice in DENIED.items()
        for match in re.finditer(rf"(?<![\w-])(?:{pattern})(?!\w)", text, re.IGNORECASE)
    ]


def files() -> list[Path]:
    """Return the files to search."""
    return [
        file
        for name in SEARCHED
        for file in ([ROOT / name] if (ROOT / name).is_file() else _inside(name))
        if not _is_unconverted(file)
    ]


def _inside(name: str) -> list[Path]:
    found = (ROOT / name).rglob("*")
    return sorted(x for x in found if x.suffix in ENDINGS and "_build" not in x.parts)


def _is_unconverted(file: Path) -> bool:
    return any(file.is_relative_to(ROOT / path) for path in UNCONVERTED)


def main() -> int:
    """Print every denied word with its place."""
    hits = [
        hit
        for file in files()
        for hit in find(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    ]
    for path, line, word, advice in sorted(hits):
        print(f"{path}:{line}: {word!r}: say {advice}")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
