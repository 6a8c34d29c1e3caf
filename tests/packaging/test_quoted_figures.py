"""Tables of figures on the pages about PyTorch: each is in a file of results."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "adapters"
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


def quoted_tables(head, page="torch-clipping.md"):
    """Return the rows of every table of a page that begins with a head."""
    text = (PAGES / page).read_text(encoding="utf-8")
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


CONTENDERS = ("torch without scaler and clipping", "masters", "masters, float16 norms")


def optim_results():
    """Return the rows about `lossscale.torch.optim` on a GPU."""
    rows = read_results("torch_optim.cuda.csv")
    return {(row["case"], row["work"], row["of"]): row for row in rows}


@pytest.mark.parametrize(
    ("head", "work"),
    [("| captured |", "training in a graph"), ("| not captured |", "training")],
)
def test_a_table_of_training_steps_is_that_of_its_file(head, work):
    results = optim_results()
    (quoted,) = quoted_tables(head, "torch-optim.md")
    models = {case for case, kind, _ in results if kind == work}
    assert models == {model for model, *_ in quoted}
    for model, *cells in quoted:
        ratios = [float(results[model, work, of]["ratio"]) for of in CONTENDERS]
        expected = [f"{ratio:.2f}" for ratio in ratios]
        if work == "training":
            contenders = ("torch", *CONTENDERS[1:])
            rows = [results[model, work, of]["memory_mb"] for of in contenders]
            expected.append(", ".join(f"{int(row):,}" for row in rows) + " MB")
        assert expected == cells, model


def test_the_table_of_the_optimizer_phase_is_that_of_its_file():
    results = optim_results()
    (quoted,) = quoted_tables("| parameters of |", "torch-optim.md")
    for case, (_, *cells) in zip(("medium", "XL", "many small"), quoted, strict=True):
        expected = [
            f"{1 / float(results[case, 'phase in a graph', of]['ratio']):.2f}"
            for of in ("ours", "ours, masters")
        ]
        expected.append(f"{float(results[case, 'phase', 'ours']['ratio']):.1f}")
        assert expected == cells, case


def test_the_table_of_quality_is_that_of_its_file():
    rows = read_results("torch_quality.cuda.csv")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    (quoted,) = quoted_tables(
        "| | seed 0 | seed 1 | seed 2 | skipped steps | seconds", "torch-optim.md"
    )
    for kind, (_, *cells) in zip(kinds, quoted, strict=True):
        own = [row for row in rows if row["kind"] == kind]
        expected = [f"{float(row['loss']):.3f}" for row in own]
        expected.append(", ".join(row["skipped"] for row in own))
        expected.append(", ".join(f"{float(row['seconds']):.0f}" for row in own))
        expected.append(f"{int(own[0]['memory_mb']):,} MB")
        assert expected == cells, kind
