"""What a report says about a run: compared with NumPy, and with what was recorded."""

import base64
import json
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.runs import record_run
from hypothesis import given
from hypothesis import strategies as st

from lossscale import Dynamic, Fixed
from lossscale.diagnostics import (
    Recorder,
    build_report,
    exponent_histogram,
    measure_tensors,
    read_run,
)
from lossscale.diagnostics.formats import FORMATS
from lossscale.diagnostics.records import run_file
from lossscale.diagnostics.records.columns import read_columns
from lossscale.diagnostics.records.layout import decode_step
from lossscale.diagnostics.records.steps import CAUSES
from lossscale.diagnostics.report import levels, page, summary, tensors
from lossscale.diagnostics.report.buckets import fit, from_blocks, from_columns
from lossscale.diagnostics.report.levels import make_levels
from lossscale.diagnostics.report.tensors import (
    BROKEN,
    make_heat_map,
    make_histograms,
    outcome,
)
from lossscale.diagnostics.report.wording import number
from lossscale.errors import SettingError, StateError

STEPS = 3_000


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("run") / "run.jsonl", STEPS)


def summary_of(path):
    return json.loads(build_report([path], format="json"))["runs"][0]


def test_columns_are_what_was_recorded(known):
    columns = read_columns(read_run(known.path))
    for name in ("scale", "loss", "norm", "amax", "clip"):
        assert getattr(known, name).tolist() == getattr(columns, name).tolist()
    assert known.steps.tolist() == columns.step.tolist()
    codes = [0 if cause is None else 1 + CAUSES.index(cause) for cause in known.causes]
    assert codes == columns.cause.tolist()


def test_columns_of_gaps_and_infinities_are_those_of_the_records(tmp_path):
    path = tmp_path / "run.jsonl"
    values = [None, 1.5, math.inf, math.nan, 1e300, 5e-324]
    with Recorder(path, writers=()) as recorder:
        for step, value in enumerate(values):
            recorder.record(scale=8.0, applied=step != 2, norm=value, step=3 * step)
    columns = read_columns(read_run(path))
    recorded = [math.nan if value is None else value for value in values]
    assert recorded == pytest.approx(columns.norm.tolist(), nan_ok=True)
    assert [0, 3, 6, 9, 12, 15] == columns.step.tolist()


@pytest.mark.parametrize("most", [1, 7, 100, 2_999, 5_000])
def test_buckets_keep_the_extremes_of_every_series(known, most):
    every = from_columns(read_columns(read_run(known.path)), "float16")
    buckets = fit(every, most)
    assert len(buckets) <= most
    for name in ("scale", "loss", "norm"):
        values = getattr(known, name)
        for i in range(len(buckets)):
            part = values[buckets.first[i] - 1 : buckets.last[i]]
            assert np.float32(part.min()) == buckets.low[name][i]
            assert np.float32(part.max()) == buckets.high[name][i]
    assert (~known.applied).sum() == buckets.causes.sum()


def test_the_blocks_of_a_roll_up_give_the_same_buckets(known):
    run = read_run(known.path)
    steps = from_columns(read_columns(run), "float16").merge(1_024)
    blocks = from_blocks(run.blocks)
    for name in ("scale", "loss", "norm", "clip", "headroom"):
        assert steps.low[name] == pytest.approx(blocks.low[name], rel=1e-6)
        assert steps.high[name] == pytest.approx(blocks.high[name], rel=1e-6)
    assert steps.causes.tolist() == blocks.causes.tolist()


def decode(chunk):
    """Return the arrays of a chunk, by the standard library alone."""
    data = zlib.decompress(base64.b64decode(chunk["data"]))
    count = chunk["count"]

    def take(kind):
        nonlocal data
        planes, data = data[: 4 * count], data[4 * count :]
        whole = bytes(planes[p * count + i] for i in range(count) for p in range(4))
        return struct.unpack(f"<{count}{kind}", whole)

    arrays = {"gaps": take("I")}
    if not chunk["exact"]:
        arrays["widths"] = take("I")
    for name in chunk["series"]:
        arrays[name] = [take("f") for _ in range(1 if chunk["exact"] else 2)]
    arrays |= {f"skipped: {cause}": take("I") for cause in chunk["causes"]}
    if chunk["broken"]:
        arrays["broken"] = take("I")
    assert not data
    return arrays


def test_a_chunk_holds_the_numbers_of_its_steps(known):
    overview, *details = make_levels(read_run(known.path), [], 1_000_000)
    assert not overview["exact"]
    lows, highs = decode(overview)["loss"]
    assert known.loss.min() == pytest.approx(min(lows), rel=1e-6)
    assert known.loss.max() == pytest.approx(max(highs), rel=1e-6)
    assert all(chunk["exact"] for chunk in details)
    losses = [value for chunk in details for value in decode(chunk)["loss"][0]]
    assert known.loss.astype(np.float32).tolist() == losses


def test_losses_that_are_not_finite_are_counted_in_every_bucket(tmp_path):
    path = tmp_path / "run.jsonl"
    losses = np.ones(3_000)
    losses[[5, 1_500, 1_501]] = math.nan
    losses[2_999] = math.inf
    with Recorder(path, writers=(), alarms=None) as recorder:
        for i, loss in enumerate(losses):
            recorder.record(scale=8.0, applied=True, loss=None if i == 7 else loss)
    run = read_run(path)
    blocks = from_blocks(run.blocks)
    assert [1, 2, 1] == blocks.broken.tolist()
    steps = from_columns(read_columns(run), "float16")
    assert [1, 2, 1] == steps.merge(1_024).broken.tolist()
    overview, *details = make_levels(run, [], 1_000_000)
    broken = [n for c in details for n in decode(c).get("broken", [0] * c["count"])]
    assert (~np.isfinite(losses)).tolist() == list(map(bool, broken))
    assert 4 == sum(decode(overview)["broken"])


def test_a_skipped_step_is_not_clipped(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=8.0, applied=True, norm=0.5, clip=1.0)
        recorder.record(scale=8.0, applied=True, norm=2.0, clip=0.5)
        recorder.record(scale=8.0, applied=False, norm=math.inf, clip=0.0)
    assert 1 == summary_of(path)["clipped"]
    run = read_run(path)
    assert [0.5] == from_blocks(run.blocks).low["clip"].tolist()
    steps = from_columns(read_columns(run), "float16")
    assert [1.0, 0.5] == steps.low["clip"][:2].tolist()
    assert np.isnan(steps.low["clip"][2])


def test_chunks_keep_to_their_budget_and_no_spike_is_lost(known):
    for budget in (400_000, 60_000, 30_000):
        chunks = make_levels(read_run(known.path), [], budget)
        assert sum(len(chunk["data"]) for chunk in chunks) <= budget
        highest = max(max(decode(chunk)["loss"][-1]) for chunk in chunks)
        assert known.loss.max() == pytest.approx(highest, rel=1e-3)


def test_a_long_run_is_shown_step_by_step_where_it_went_wrong(known, monkeypatch):
    monkeypatch.setattr(levels, "_MOST_WINDOWS", 2)
    run = read_run(known.path)
    overview, *windows = make_levels(run, [1_500], 1_000_000, most_steps=100)
    assert (1, STEPS, 3) == (overview["from"], overview["to"], overview["count"])
    shown = [(window["from"], window["to"]) for window in windows if window["exact"]]
    assert [(1, 2_048)] == shown


def steps_of(chunk):
    """Return the first and the last steps of a chunk's buckets."""
    arrays = decode(chunk)
    first = chunk["from"] + np.cumsum(arrays["gaps"])
    return first, first + np.array(arrays.get("widths", 0))


@pytest.mark.parametrize(
    ("budget", "most_steps"),
    [(1_000_000, STEPS), (60_000, STEPS), (60_000, 100), (3_000, 100)],
)
def test_a_finer_chunk_has_all_of_a_bucket_or_nothing_of_it(
    known, budget, most_steps, monkeypatch
):
    """Otherwise a zoom would show a step twice, or not at all."""
    monkeypatch.setattr(levels, "_CHUNK", 128)
    monkeypatch.setattr(levels, "OVERVIEW", 300 if most_steps == STEPS else 2)
    chunks = make_levels(read_run(known.path), [1_500], budget, most_steps=most_steps)
    assert len(chunks) > 1
    for chunk in chunks:
        first, last = steps_of(chunk)
        for other in chunks:
            apart = (last < other["from"]) | (first > other["to"])
            inside = (first >= other["from"]) & (last <= other["to"])
            assert (apart | inside).all()


@given(
    shift=st.integers(-20, 20),
    magnitude=st.integers(-20, 6),
    seed=st.integers(0, 1_000),
    name=st.sampled_from(["float16", "float8_e5m2", "float8_e4m3"]),
)
def test_the_slider_predicts_what_a_conversion_does(shift, magnitude, seed, name):
    dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kinds = {
        "float16": np.float16,
        "float8_e5m2": dtypes.float8_e5m2,
        "float8_e4m3": dtypes.float8_e4m3fn,
    }
    rng = np.random.default_rng(seed)
    stored = (rng.standard_normal(500) * 2.0**magnitude).astype(np.float16)
    first, counts = exponent_histogram(stored)
    found = outcome(counts, first, stored.size, name, shift)
    exact = np.abs(stored.astype(np.float64)) * 2.0**shift
    nonzero = exact > 0
    normal = 2.0 ** FORMATS[name].smallest_normal
    over = float((exact > FORMATS[name].largest).mean())
    assert found.overflow - 1e-9 <= over <= found.overflow_most + 1e-9
    with np.errstate(over="ignore"):
        rounded = exact.astype(kinds[name]).astype(np.float64)
    to_zero = float((nonzero & (rounded == 0)).mean())
    # Between half the smallest number and the smallest, only the histogram's exponent
    # is known: what it calls subnormal is all that a tie could move.
    assert to_zero - float((nonzero & (exact < normal)).mean()) <= found.to_zero + 1e-9
    below = float((nonzero & (exact < normal)).mean())
    assert below == pytest.approx(found.to_zero + found.subnormal)
    half = 2.0 ** (FORMATS[name].smallest - 1)
    assert float((nonzero & (exact < half)).mean()) == pytest.approx(found.to_zero)


def test_a_heat_map_has_the_extremes_that_numpy_finds(known):
    heat_map = make_heat_map(read_run(known.path))
    steps = sorted(known.gradients)
    assert steps == heat_map.first.tolist()
    for column, step in enumerate(steps):
        for row, name in enumerate(heat_map.names):
            gradient = known.gradients[step][name].astype(np.float64)
            largest = np.abs(gradient).max()
            expected = 300.0 if largest == 0 else math.log2(65504.0 / largest)
            assert expected == pytest.approx(heat_map.headroom[row, column], abs=1e-4)
            lost = (np.abs(gradient) < 2.0**-14).mean()
            assert lost == pytest.approx(heat_map.lost[row, column], abs=1e-5)


def test_the_summary_is_what_was_recorded(known):
    found = summary_of(known.path)
    skipped = int((~known.applied).sum())
    assert (STEPS, skipped) == (found["steps"], found["skipped"])
    counts = {c: known.causes.count(c) for c in CAUSES if c in known.causes}
    assert counts == found["causes"]
    assert known.scale.min() == found["lowest_scale"]
    assert known.scale.max() == found["highest_scale"]
    assert known.norm.max() == found["largest_norm"]
    moves = np.sign(np.diff(known.scale))
    assert (moves == 1).sum() == found["growths"]
    assert (moves == -1).sum() == found["backoffs"]
    assert known.loss[:20].mean() == pytest.approx(found["first_loss"])
    assert known.loss[-20:].mean() == pytest.approx(found["last_loss"])
    assert sum(tensor["inf"] for tensor in found["tensors"]) == skipped


def test_the_share_lost_is_that_of_the_last_statistics(known):
    last = known.gradients[max(known.gradients)]
    flat = np.concatenate([gradient.astype(np.float64) for gradient in last.values()])
    expected = float((np.abs(flat) < 2.0**-14).mean())
    assert expected == pytest.approx(summary_of(known.path)["lost_share"], abs=1e-5)


def test_a_run_without_steps_has_a_report(tmp_path):
    path = tmp_path / "run.jsonl"
    Recorder(path, writers=()).close()
    for form in ("html", "md", "json"):
        assert "No step was recorded" in build_report([path], format=form)


def test_differences_name_what_differs_and_nothing_else(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, scale in zip(paths, (8.0, 16.0), strict=True):
        with Recorder(path, writers=(), config={"batch": scale, "seed": 1}) as recorder:
            recorder.record(scale=scale, applied=True, loss=1.0)
    report = json.loads(build_report(paths, format="json"))
    rows = {row["name"]: row["values"] for row in report["differences"]}
    assert ["8", "16"] == rows["config: batch"]
    assert ["8", "16"] == rows["last scale"]
    assert not {"config: seed", "loss at the end", "skipped"} & set(rows)


def test_a_run_that_lacks_a_value_does_not_differ_in_it(tmp_path):
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path, loss in zip(paths, (1.0, None, 1.0), strict=True):
        with Recorder(path, writers=()) as recorder:
            recorder.record(scale=8.0, applied=True, loss=loss, norm=loss)
    report = json.loads(build_report(paths, format="json"))
    names = {row["name"] for row in report["differences"]}
    assert not {"loss at the end", "largest norm"} & names
    page = build_report(paths)
    assert page.index('<section id="differences"') < page.index('<section id="curves"')


def test_what_was_not_recorded_is_not_on_the_page(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        with Recorder(path, writers=()) as recorder:
            recorder.record(scale=8.0, applied=True)
    for text in (build_report(paths[:1]), build_report(paths)):
        head = text.partition('<section id="curves"')[0]
        assert "oss at the end" not in head
        assert "owest headroom" not in head


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (Dynamic(), "dynamic"),
        (
            Dynamic(growth_interval=50, max_scale=2.0**24),
            "dynamic, growth_interval 50,",
        ),
        (Fixed(scale=128.0), "fixed, scale 128"),
        ({"kind": "mine", "rate": 0.5}, "mine, rate 0.5"),
        (None, "\u2013"),
    ],
)
def test_markdown_lists_what_differs_from_the_policys_defaults(tmp_path, policy, line):
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=(), policy=policy) as recorder:
        recorder.record(scale=8.0, applied=True)
    text = build_report([path], format="md").replace("\\_", "_")
    assert f"| policy | {line}" in text
    assert "hysteresis" not in text
    assert "| loss |" not in text


def record_steps(path, steps, **settings):
    """Record steps given as keywords, and return the advice of the report."""
    with Recorder(path, writers=(), **settings) as recorder:
        for step in steps:
            recorder.record(**step)
    return summary_of(path)["advice"]


def test_advice_follows_the_order_of_the_alarms(tmp_path):
    fine = [{"scale": 1024.0, "applied": True, "loss": 2.0}] * 20
    bad = {"applied": False, "loss": 2.0, "nonfinite": {"a": "inf"}}
    falling = [bad | {"scale": 2.0**-i} for i in range(-10, 1)]
    nan = [{"scale": 0.5, "applied": False, "cause": "loss", "loss": math.nan}] * 5
    policy = {"kind": "dynamic", "growth_interval": 50}
    advice = record_steps(tmp_path / "a.jsonl", [*fine, *falling, *nan], policy=policy)
    # NaN may have come from step 20 itself.
    assert "step 19 or earlier" in advice[0]
    assert advice[1].startswith("The gradients were growing.")
    assert any(text.startswith("NaN came after the first alarm") for text in advice)
    advice = record_steps(tmp_path / "b.jsonl", [*fine, *nan], policy=policy)
    assert any("does not come from the scale" in text for text in advice)


def test_advice_brackets_the_layer_that_broke(tmp_path):
    names = ["a", "b", "c"]
    bad = {"scale": 8.0, "applied": False, "nonfinite": {"a": "inf", "b": "nan"}}
    (text,) = [
        text
        for text in record_steps(tmp_path / "run.jsonl", [bad], names=names)
        if "look between" in text
    ]
    assert "At step 1 the backward pass had c finite, and b no longer" in text


def test_the_bracket_is_found_in_one_read_of_a_block(tmp_path, monkeypatch):
    """NaN in every tensor has no bracket: the time must not grow with the tensors."""
    path = tmp_path / "run.jsonl"
    names = [f"layer{i}" for i in range(40)]
    with Recorder(path, names=names, writers=(), alarms=None) as recorder:
        for step in range(1, 3 * 1_024 + 1):
            bad = step % 50 == 0
            broken = dict.fromkeys(names, "nan") if bad else ()
            recorder.record(scale=8.0, applied=not bad, cause="nan", nonfinite=broken)
    run = read_run(path)
    decoded = []

    def decode(row, names):
        decoded.append(row[0])
        return decode_step(row, names)

    monkeypatch.setattr(run_file, "decode_step", decode)
    assert summary._find_bracket(run, ()) is None
    assert list(range(1, 3 * 1_024 + 1)) == decoded
    monkeypatch.setattr(summary, "_MOST_BLOCKS", 2)
    decoded.clear()
    assert summary._find_bracket(run, ()) is None
    assert 2 * 1_024 == len(decoded)


def test_a_bracket_after_a_step_without_one_is_found(tmp_path):
    """Every tensor breaks in step 1; step 2 breaks in the first alone."""
    path = tmp_path / "run.jsonl"
    with Recorder(path, names=["a", "b"], writers=()) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"a": "inf", "b": "inf"})
        recorder.record(scale=8.0, applied=False, nonfinite={"a": "inf"})
    bracket = {"step": 2, "broken": "a", "nearest_finite": "b"}
    assert bracket == summary_of(path)["bracket"]


def test_a_run_of_zeros_is_told_to_scale(tmp_path):
    path = tmp_path / "run.jsonl"
    zeros = {"w": np.zeros(8, np.float16)}
    with Recorder(path, writers=(), policy={"kind": "fixed", "scale": 1.0}) as recorder:
        recorder.record(scale=1.0, applied=True, amax=0.0)
        recorder.record_statistics(measure_tensors(zeros), scale=1.0)
    (text,) = summary_of(path)["advice"]
    assert text.startswith("100.0\u00a0% of the stored gradients were zero")
    assert "nothing was learned" in text


def test_a_loss_that_ends_as_nan_is_shown_as_such(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        for loss in (*([1.0] * 20), *([math.nan] * 20)):
            recorder.record(scale=8.0, applied=True, loss=loss)
    assert "<dt>Loss at the end</dt><dd>NaN" in build_report([path])
    assert summary_of(path)["last_loss"] is None


def test_a_tensor_without_a_finite_number_is_beyond_the_range(tmp_path):
    path = tmp_path / "run.jsonl"
    gradients = {"a": np.full(4, np.nan, np.float16), "b": np.ones(4, np.float16)}
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=1.0, applied=False)
        recorder.record_statistics(measure_tensors(gradients), scale=1.0)
    heat_map = make_heat_map(read_run(path))
    assert [BROKEN, pytest.approx(math.log2(65504.0))] == heat_map.headroom[
        :, 0
    ].tolist()
    assert np.isnan(heat_map.lost[0, 0])


def record_broken(path):
    """Record three steps; in the second, tensors are not finite, wholly or partly."""
    names = ["few", "most", "all", "none", "empty"]
    with Recorder(path, names=names, writers=(), alarms=None) as recorder:
        for step in (1, 2, 3):
            gradients = {name: np.full(1_000, 0.5, np.float16) for name in names}
            gradients["empty"] = np.zeros((0,), np.float16)
            if step == 2:
                gradients["few"][:10] = np.inf
                gradients["most"][:] = np.nan
                gradients["most"][0] = 0
                gradients["all"][:] = np.inf
            broken = {"few": "inf", "most": "nan", "all": "inf"} if step == 2 else {}
            recorder.record(scale=8.0, applied=step != 2, nonfinite=broken)
            recorder.record_statistics(measure_tensors(gradients), scale=8.0)
    return read_run(path)


@pytest.mark.parametrize("most_cells", [400_000, 0])
def test_any_number_that_is_not_finite_is_an_overflow(
    tmp_path, monkeypatch, most_cells
):
    """Read from the statistics of each step, or from the roll-up of a long run."""
    monkeypatch.setattr(tensors, "_MOST_CELLS", most_cells)
    heat_map = make_heat_map(record_broken(tmp_path / "run.jsonl"))
    assert ["few", "most", "all", "none"] == heat_map.names
    healthy = pytest.approx(math.log2(65504 / 0.5))
    column = 1 if most_cells else 0
    found = heat_map.headroom[:, column].tolist()
    assert [BROKEN, BROKEN, BROKEN, healthy] == found
    if most_cells:
        assert [healthy] * 4 == heat_map.headroom[:, 0].tolist()


def test_a_histogram_counts_what_is_not_finite_as_overflow(tmp_path):
    run = record_broken(tmp_path / "run.jsonl")
    histograms = make_histograms(run, make_heat_map(run))
    found = dict(zip(histograms.names, histograms.nonfinite[1].tolist(), strict=True))
    numbers = {"few": 10, "most": 999, "all": 1000, "none": 0, "empty": 0}
    assert numbers | {"all tensors": 2_009} == found
    row = histograms.names.index("few")
    for shift in (-24, 0):
        overflow = outcome(
            histograms.counts[1, row],
            histograms.first_exponent,
            1_000,
            "float16",
            shift,
            nonfinite=float(histograms.nonfinite[1, row]),
        ).overflow
        assert overflow == pytest.approx(0.01)


def test_a_rounded_share_of_zeros_is_no_number_that_is_not_finite():
    row = ["w", 3 * 10**9, 1.0, 0.333333, 0.0, 0, [2 * 10**9]]
    assert 0 == tensors.count_nonfinite(row)
    assert 0 == tensors.count_nonfinite(["w", 9, 1.0, 0.0, 0.0, 0, []])
    assert 1 == tensors.count_nonfinite(["w", 9, 1.0, 0.555556, 0.0, 0, [3]])


def test_steps_a_second_are_intervals_by_time(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=8.0, applied=True)
    head = path.read_text(encoding="utf-8").splitlines()[0]
    lines = [f"[{step},{step / 2},8,1]" for step in (1, 2, 3)]
    path.with_name("run.jsonl.rollup").unlink()
    path.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    assert 2.0 == pytest.approx(summary_of(path)["steps_per_second"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (0.5, "0.5"),
        (65536.0, "65,536"),
        (2.0**40, "2\u2074\u2070"),
        (2.0**-126, "2\u207b\xb9\xb2\u2076"),
        (1234567.25, "1,234,567"),
        (1.5e-5, "1.5e-5"),
        (1.5e12, "1.5e12"),
        (10**400, "over 1e308"),
    ],
)
def test_numbers_are_written_for_a_reader(value, text):
    assert text == number(value)


def test_a_healthy_run_is_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    steps = [{"scale": 8.0, "applied": True, "amax": 1.0}] * 50
    steps += [{"scale": 16.0, "applied": False, "nonfinite": {"a": "inf"}}]
    (text,) = record_steps(path, steps)
    assert text.startswith("Nothing to change: 1 step was skipped while the scale grew")
    assert "grew once, which is how" in text


def test_a_skip_without_a_growth_is_not_one_while_the_scale_grew(tmp_path):
    steps = [{"scale": 8.0, "applied": False, "nonfinite": {"a": "inf"}, "amax": 1.0}]
    steps += [{"scale": 4.0, "applied": True, "amax": 1.0}] * 50
    (text,) = record_steps(tmp_path / "run.jsonl", steps)
    assert "Nothing to change: 1 step was skipped, which is how" in text


FINE = {"scale": 8.0, "applied": True, "amax": 1.0, "loss": 1.0}
BROKEN_RUNS = {
    "NaN gradients": ([FINE] * 24 + [FINE | {"applied": False, "cause": "nan"}]) * 4,
    "a loss that ends as NaN": [FINE] * 30 + [FINE | {"loss": math.nan}] * 30,
    "infinite losses": [FINE] * 30 + [FINE | {"loss": math.inf}] * 30,
    "steps that were not taken": [
        *([FINE] * 30),
        FINE | {"applied": False, "cause": "not stepped"},
    ],
}


@pytest.mark.parametrize("kind", BROKEN_RUNS)
def test_a_broken_run_is_never_left_alone(tmp_path, kind):
    advice = record_steps(tmp_path / "run.jsonl", BROKEN_RUNS[kind])
    assert advice
    assert not any("Nothing to change" in text for text in advice)


def test_the_advice_on_nan_says_where_to_look(tmp_path):
    advice = record_steps(tmp_path / "run.jsonl", BROKEN_RUNS["NaN gradients"])
    assert "4 steps had NaN in the gradients" in advice[0]
    assert "Look for it in the forward pass" in advice[0]


def test_a_nan_that_a_lower_scale_ended_is_not_looked_for(tmp_path):
    """As in the demonstration: overflows, one of them with NaN, and the scale grows."""
    steps, scale = [], 2.0**18
    for step in range(1, 301):
        cause = {90: "inf", 150: "nan", 210: "inf"}.get(step)
        fine = {"scale": scale, "applied": cause is None, "amax": 1e-3, "loss": 1.0}
        steps.append(fine | {"cause": cause})
        scale *= 0.5 if cause else 2.0 if step % 40 == 0 else 1.0
    (text,) = record_steps(tmp_path / "run.jsonl", steps)
    assert "a lower scale ended it" in text
    assert "forward pass" not in text
    # One that comes back while the scale falls is no overflow.
    for step in range(280, 300):
        steps[step] |= {"applied": step % 4 != 0, "scale": 2.0 ** (80 - step // 4)}
        steps[step]["cause"] = None if steps[step]["applied"] else "nan"
    advice = record_steps(tmp_path / "other.jsonl", steps)
    assert any("forward pass" in text for text in advice)


@pytest.mark.parametrize(
    ("files", "titles"),
    [
        (["a/run.jsonl", "b/run.jsonl"], ["run (a)", "run (b)"]),
        (["a/x/run.jsonl", "b/y/run.jsonl"], ["run (a/x)", "run (b/y)"]),
        (["run.jsonl", "b/run.jsonl"], ["run", "run (b)"]),
        (["a/run.jsonl", "a/other.jsonl"], ["run", "other"]),
        (["a/run.jsonl", "a/run.jsonl"], ["run", "run"]),
    ],
)
def test_runs_with_one_name_are_told_apart(tmp_path, files, titles):
    paths = [tmp_path / file for file in files]
    for path in {*paths}:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Recorder(path, writers=()) as recorder:
            recorder.record(scale=8.0, applied=True)
    report = json.loads(build_report(paths, format="json"))
    assert titles == [run["title"] for run in report["runs"]]
    markdown, html = (build_report(paths, format=form) for form in ("md", "html"))
    for title in titles:
        assert f"## {title}\n" in markdown
        assert f"<h3>{title}</h3>" in html
        assert f">{title}</option>" in html


def test_runs_with_one_given_name_are_told_apart_by_their_files(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        with Recorder(path, name="sweep", writers=()) as recorder:
            recorder.record(scale=8.0, applied=True)
    text = build_report(paths, format="md")
    assert "## sweep (a.jsonl)\n" in text
    assert "## sweep (b.jsonl)\n" in text


HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "`|**bold**| [x](javascript:alert(1))\n# heading",
    "\u2028\u202e\x00 name",
    "$title ${data}",
]


def test_hostile_names_stay_text_in_every_format(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path, names=HOSTILE, name=HOSTILE[0], writers=()) as recorder:
        for name in HOSTILE:
            recorder.record(scale=8.0, applied=False, nonfinite={name: "inf"})
    html = build_report([path])
    assert 2 == html.count("<script") == html.count("</script>")
    assert "<img" not in html
    markdown = build_report([path], format="md")
    assert "<" not in markdown.replace("&lt;", "")
    assert not re.search(r"(?<!\\)[`*]b|\]\(", markdown.replace(r"\]", ""))
    assert "\n# heading" not in markdown
    report = json.loads(build_report([path], format="json"))
    assert set(HOSTILE) == {t["name"] for t in report["runs"][0]["tensors"]}


def test_the_policy_of_the_page_allows_its_one_script_and_style(known):
    html = build_report([known.path])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{page._hash(script)}'" in policy
    assert f"style-src '{page._hash(style)}'" in policy
    assert "unsafe" not in policy
    assert not re.search(r'\s(src|href)="(?!#)', html)


def test_the_chart_library_is_what_its_author_published(known):
    from hashlib import sha256

    library = page._asset("uPlot.iife.min.js").encode()
    assert page.UPLOT_SHA256 == sha256(library).hexdigest()
    html = build_report([known.path])
    assert page.UPLOT_SHA256 in html
    assert "Permission is hereby granted" in html


def test_a_page_keeps_to_its_size_whatever_the_names(tmp_path):
    path = tmp_path / "run.jsonl"
    names = [f"{i:05d}" + 2_000 * "\u00e9" for i in range(600)]
    record_run(path, 200, names=names, every=20)
    assert len(build_report([path]).encode()) <= page.MOST_BYTES


def test_several_runs_keep_to_the_size_together(tmp_path, known):
    assert len(build_report([known.path] * 24).encode()) <= page.MOST_BYTES


@pytest.mark.parametrize("wrong", [[], "run.jsonl", Path("run.jsonl")])
def test_paths_are_a_list_of_files(wrong):
    with pytest.raises(SettingError, match="paths must be") as caught:
        build_report(wrong)
    is_named = "Write build_report(['run.jsonl'])." in str(caught.value)
    assert is_named == bool(wrong)


def test_a_file_that_is_not_a_run_is_one_error(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("hello\n")
    with pytest.raises(StateError, match="is not a recorded run"):
        build_report([path])


def test_an_infinite_loss_is_named_by_its_advice(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        for step in range(1, 20):
            recorder.record(
                step=step, scale=8.0, applied=False, cause="loss", loss=math.inf
            )
    text = build_report([path], format="md")
    assert "a loss that is not finite, does not come from the scale" in text
