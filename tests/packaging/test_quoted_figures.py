"""Tables of figures on the page about clipping: each is in a file of results."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "adapters" / "torch-clipping.md"
COLUMNS = [
    ("AdamW fused", ""),
    ("SGD foreach", ""),
    ("AdamW fused", "clipped "),
    ("SGD foreach", "clipped "),
]


def read_results(name):
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def host_time(name, case):
    """Return the table of host times that a file of results gives."""
    ratios = {
        (row["tensors"], row["optimizer"], row["case"]): row["ours_over_torch"]
        for row in read_results(name)
    }
    sizes = sorted({int(size) for size, _, _ in ratios})
    return [
        [f"{size:,}", *(ratios[str(size), kind, clip + case] for kind, clip in COLUMNS)]
        for size in sizes
    ]


def quoted_tables(head):
    """Return the rows of every table of the page that begins with a head."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        for block in blocks
        for first, _rule, *rows in [block.strip().splitlines()]
        if first.startswith(head)
    ]


@pytest.mark.parametrize(
    ("index", "name", "case"),
    [
        (0, "torch_host_time.cuda.csv", "step"),
        (1, "torch_host_time.cpu.csv", "step"),
        (2, "torch_host_time.cpu.csv", "overflow"),
    ],
)
def test_a_table_of_host_times_is_that_of_its_file(index, name, case):
    quoted = quoted_tables("| tensors | fused AdamW |")
    assert 3 == len(quoted)
    assert host_time(name, case) == quoted[index]


def test_the_table_of_the_gpu_is_that_of_its_file():
    ratios = {
        (row["case"], row["work"], row["of"]): float(row["times_lossscale"])
        for row in read_results("torch_step.cuda.csv")
    }
    (quoted,) = quoted_tables("| fp32 gradients of |")
    for case, (name, *cells) in zip(
        ("medium", "XL", "many small"), quoted, strict=True
    ):
        flat = 1 / ratios[case, "check and clip", "flat read"]
        graph = 1 / ratios[case, "check and clip in a graph", "flat read"]
        expected = [
            ratios[case, "check and clip", "torch"],
            flat,
            graph,
            ratios[case, "clipped step", "torch"],
        ]
        for number, cell in zip(expected, cells, strict=True):
            if cell != "the host takes longer":
                digits = cell.split()[0]
                decimals = len(digits.partition(".")[2])
                assert f"{number:.{decimals}f}" == digits, f"{name}: {cell}"
