"""The tables of the pages: whole, and true to the code that they describe."""

import inspect
import re
from pathlib import Path

import pytest

import lossscale.numpy
from lossscale.core.classic import Binding

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^(```+).*?^\1$", re.DOTALL | re.MULTILINE)
RULE = re.compile(r"\|(:?-+:?\|)+")


def tables(page):
    """Return the tables of a page: rows of cells, the rule under the head included."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [block.strip().splitlines() for block in blocks]


def cells(row):
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_has_a_head_and_rows_as_long_as_it(page):
    for head, *rows in tables(page):
        assert rows, f"a row by itself: {head}"
        assert RULE.fullmatch(rows[0].replace(" ", "")), f"no head: {head}"
        for row in rows:
            assert cells(head) == cells(row), row


def table_under(page, heading):
    """Return the first column of the first table under a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"{heading}\n")[1]
    rows = re.findall(r"^\| `(\w+)(\(.*?\))` \|", text.split("\n## ")[0], re.MULTILINE)
    return dict(rows)


def signature(function):
    """Return a function's parameters as the page writes them: names and defaults."""
    found = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    empty = inspect.Signature.empty
    return str(found.replace(parameters=plain, return_annotation=empty))


def test_the_page_for_adapters_names_the_arguments_of_a_binding():
    shown = table_under("adding-a-framework.md", "## The classic classes")
    methods = inspect.getmembers(Binding, inspect.isfunction)
    named = {name: method for name, method in methods if not name.startswith("_")}
    assert {name: signature(method) for name, method in named.items()} == shown


def test_the_page_for_adapters_names_the_arguments_of_the_functions():
    shown = table_under("adding-a-framework.md", "## The functional API")
    names = ("init", "scale", "unscale", "update", "select")
    found = {name: signature(getattr(lossscale.numpy, name)) for name in names}
    assert found == shown


def test_the_rows_of_the_page_on_differences_are_numbered_one_after_another():
    page = ROOT / "docs" / "adapters" / "torch-differences.md"
    text = page.read_text(encoding="utf-8")
    numbers = [
        int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    ]
    assert list(range(1, len(numbers) + 1)) == numbers
