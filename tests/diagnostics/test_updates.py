"""Updates of the weights in a record and in its reports, without a framework."""

import json
import math

import numpy as np
import pytest

from lossscale.diagnostics import (
    Recorder,
    RecordWarning,
    UpdateStatistics,
    build_report,
    measure_tensors,
    read_run,
)
from lossscale.diagnostics.records.run_file import rollup_path

HALF = ("float16", False)
KEPT = ("float16", True)
SINGLE = ("float32", False)


def statistics_of(rows):
    """Return statistics with updates: (ratio, lost, dtype, has a master) by name."""
    gradients = {name: np.ones(2, np.float16) for name in rows}
    columns = zip(*rows.values(), strict=True)
    return measure_tensors(gradients)._replace(
        updates=UpdateStatistics(list(rows), *map(list, columns))
    )


def record(path, *samples, **settings):
    """Record a step for each sample; `None` is a step without updates."""
    with Recorder(path, writers=(), **settings) as recorder:
        for sample in samples:
            recorder.record(scale=8.0, applied=sample is not None, amax=1.0)
            plain = measure_tensors({"w": np.ones(2, np.float16)})
            found = plain if sample is None else statistics_of(sample)
            recorder.record_statistics(found, scale=8.0)
    return path


def samples_of(path):
    run = read_run(path)
    return list(run.statistics(run.start, run.end - run.start))


def summary_of(path):
    return json.loads(build_report([path], format="json"))["runs"][0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


# -- the record ------------------------------------------------------------------------


def test_updates_are_read_again_as_they_were_recorded(path):
    rows = {"a": (1e-3, 0.25, *HALF), "b": (0.0, 0.0, *KEPT), "c": (2.5, 1.0, *SINGLE)}
    record(path, rows, None)
    first, second = samples_of(path)
    assert [(name, *row) for name, row in rows.items()] == first.updates
    assert second.updates is None


def test_arrays_do_as_well_as_lists(path):
    updates = UpdateStatistics(
        ["w"], np.array([0.5]), np.array([0.25]), ["bfloat16"], np.array([True])
    )
    statistics = measure_tensors({"w": np.ones(2)})._replace(updates=updates)
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=1.0, applied=True)
        recorder.record_statistics(statistics, scale=1.0)
    assert [("w", 0.5, 0.25, "bfloat16", True)] == samples_of(path)[0].updates


def test_a_ratio_that_is_not_finite_is_none(path):
    record(path, {"a": (math.inf, 0.0, *SINGLE), "b": (math.nan, 0.0, *SINGLE)})
    assert [None, None] == [row.ratio for row in samples_of(path)[0].updates]


def test_a_weight_without_a_gradient_statistic_gets_a_name(path):
    statistics = measure_tensors({"a": np.ones(2)})
    updates = UpdateStatistics(["b"], [0.5], [0.0], ["float32"], [False])
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=1.0, applied=True)
        recorder.record_statistics(statistics._replace(updates=updates), scale=1.0)
    assert "b" == samples_of(path)[0].updates[0].name


MALFORMED = [
    *(5, "text", {}, [1], [[]], [[0, 0.1]], [["a", 0.1, 0.0, "float16", 0]]),
    *([[9, 0.1, 0.0, "float16", 0]], [[-1, 0.1, 0.0, "float16", 0]]),
    *([[0, -0.1, 0.0, "float16", 0]], [[0, "inf", 0.0, "float16", 0]]),
    *([[0, 0.1, -0.1, "float16", 0]], [[0, 0.1, 1.5, "float16", 0]]),
    *([[0, 0.1, None, "float16", 0]], [[0, True, 0.0, "float16", 0]]),
    *([[0, 0.1, 0.0, "float17", 0]], [[0, 0.1, 0.0, ["float16"], 0]]),
    *([[0, 0.1, 0.0, "float16", 2]], [[0, 0.1, 0.0, "float16", True]]),
    [[0, 0.1, 0.0, "float16", 0, 0]],
]


@pytest.mark.parametrize("updates", MALFORMED, ids=repr)
def test_a_line_with_malformed_updates_is_left_out(path, updates):
    record(path, {"a": (1e-3, 0.25, *HALF)})
    rollup_path(path).unlink()
    lines = path.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith('{"statistics"'))
    event = json.loads(lines[index])
    event["statistics"]["updates"] = updates
    lines[index] = json.dumps(event, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(RecordWarning, match="1 line could not be read"):
        run = read_run(path)
    assert 1 == run.rows
    assert [] == list(run.statistics(run.start, run.end - run.start))


def test_a_record_from_before_there_were_updates_is_read(path):
    record(path, None)
    assert '"updates"' not in path.read_text()
    assert summary_of(path)["updates"] is None
    assert "Updates of the weights" not in build_report([path])
    assert "Updates of the weights" not in build_report([path], format="md")


# -- the report ------------------------------------------------------------------------


def many(count):
    """Return rows of which tensor i has the ratio i / 1000 and has lost i per cent."""
    return {f"t{i}": (i / 1000, i / 100, *KEPT) for i in range(1, count + 1)}


def test_the_tensors_that_stand_out_are_listed(path):
    rows = many(40) | {"much": (1e-3, 0.9, *KEPT), "zero": (0.0, 0.0, *KEPT)}
    updates = summary_of(record(path, rows))["updates"]
    assert (1, 42) == (updates["step"], updates["tensors"])
    names = [row["name"] for row in updates["rows"]]
    # The five that lost most, the five largest ratios, the five smallest.
    most = ["much", "t40", "t39", "t38", "t37", "t36"]
    assert most == names[:6]
    assert {"zero", "t1", "t2", "t3"} == set(names[6:])
    assert len(names) <= 15
    shares = [row["lost"] for row in updates["rows"]]
    assert sorted(shares, reverse=True) == shares


def test_the_last_step_that_was_applied_is_shown(path):
    rows = {"a": (1e-3, 0.25, *HALF)}
    summary = summary_of(record(path, {"a": (0.5, 0.0, *HALF)}, rows, None))
    assert 2 == summary["updates"]["step"]
    assert [1e-3] == [row["ratio"] for row in summary["updates"]["rows"]]


def test_a_step_with_statistics_of_no_tensor_has_a_report(path):
    for count in (1, 2):
        with Recorder(path, writers=()) as recorder:
            recorder.record(scale=1.0, applied=True)
            arrays = {} if count == 1 else {"a": np.ones(2)}
            recorder.record_statistics(measure_tensors(arrays), scale=1.0)
        assert build_report([path]).endswith("</html>\n")


def test_every_format_has_the_table(path):
    record(path, {"a": (1.5e-3, 0.25, *KEPT), "b": (math.inf, 0.0, *SINGLE)})
    text = build_report([path], format="md")
    assert "| a | float16 | yes | 0.0015 | 25.0\u00a0% |" in text
    assert "| b | float32 | no | \u2013 | 0\u00a0% |" in text
    page = build_report([path])
    assert '<h2 id="updates-title">Updates of the weights</h2>' in page
    assert "<td>0.0015</td><td>25.0\u00a0%</td>" in page
    assert page.index('id="tensors"') < page.index('id="updates"')


def test_several_runs_have_a_table_each(tmp_path):
    paths = [
        record(tmp_path / "a.jsonl", {"a": (0.5, 0.0, *HALF)}),
        record(tmp_path / "b.jsonl", None),
        record(tmp_path / "c.jsonl", {"c": (0.25, 0.0, *HALF)}),
    ]
    page = build_report(paths)
    section = page[page.index('id="updates"') : page.index('id="nonfinite"')]
    assert ["a", "c"] == [name for name in "abc" if f"<h3>{name}</h3>" in section]


def advice_of(path):
    return [text for text in summary_of(path)["advice"] if "rounded away" in text]


def test_updates_that_are_lost_for_want_of_a_master_have_advice(path):
    rows = {
        "kept": (1e-4, 0.99, *KEPT),
        "single": (1e-9, 0.98, *SINGLE),
        "worst": (1e-4, 0.9, *HALF),
        "other": (1e-4, 0.6, "bfloat16", False),
        "fine": (1e-2, 0.5, *HALF),
    }
    (text,) = advice_of(record(path, rows))
    assert text == (
        "Use master_weights=True: the update of step 1 was rounded away in float16 "
        "for 90.0\u00a0% of worst, and more than half of 1 other tensor."
    )


@pytest.mark.parametrize(
    "row", [(1e-4, 0.99, *KEPT), (1e-9, 1.0, *SINGLE), (1e-3, 0.5, *HALF)]
)
def test_updates_that_a_master_keeps_or_would_not_have_none(path, row):
    assert [] == advice_of(record(path, {"a": row}))


def test_a_page_with_long_names_keeps_to_its_table(path):
    rows = {f"{i}{'n' * 5000}<b>": (i / 100, i / 100, *HALF) for i in range(60)}
    page = build_report([record(path, rows)])
    section = page[page.index('id="updates"') : page.index('id="nonfinite"')]
    assert len(section) < 10_000
    assert "<b>" not in section
