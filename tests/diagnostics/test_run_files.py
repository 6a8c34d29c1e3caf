"""Reading a recorded run: with its roll-up, without it, and with a wrong one."""

import json
import math
import random
from itertools import chain

import numpy as np
import pytest

from lossscale.diagnostics import (
    Recorder,
    RecordWarning,
    build_report,
    measure_tensors,
    read_run,
)
from lossscale.diagnostics.records import blocks
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.diagnostics.records.reader import scan_run
from lossscale.diagnostics.records.run_file import rollup_path
from lossscale.diagnostics.report.summary import find_alarms
from lossscale.errors import StateError

STEPS = 3 * blocks.BLOCK_STEPS + 100


def make_run(path, steps=STEPS, seed=0, statistics=()):
    """Record a run with overflows, growths, clipping and gaps in what was measured."""
    rng = random.Random(seed)
    scale = 65536.0
    with Recorder(path, names=["a", "b", "c"], flush_seconds=1000.0) as recorder:
        for step in range(1, steps + 1):
            applied = rng.random() > 0.01
            recorder.record(
                scale=scale,
                applied=applied,
                cause=rng.choice(["inf", "nan"]),
                norm=rng.choice([rng.random(), None, math.inf]),
                clip=rng.choice([1.0, 0.5]),
                amax=rng.random() / 100,
                loss=rng.gauss(2, 1),
                nonfinite={rng.choice("abc"): "inf"},
            )
            if step in statistics:
                arrays = {"a": np.full(4, step, np.float16), "c": np.zeros(2)}
                recorder.record_statistics(measure_tensors(arrays), scale=scale)
            scale *= 0.5 if not applied else 2.0 if step % 200 == 0 else 1.0


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.jsonl"
    make_run(path)
    return path


def assert_same_blocks(expected, found):
    """Sums may differ in the digits that the run's own file does not have."""
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one._replace(series={}, start=0, end=0) == other._replace(
            series={}, start=0, end=0
        )
        assert one.series.keys() == other.series.keys()
        for name, series in one.series.items():
            assert list(series) == pytest.approx(list(other.series[name]), rel=1e-5)


def test_the_blocks_are_what_numpy_makes_of_the_steps(path):
    run = read_run(path)
    records = list(run.records())
    assert list(range(1, STEPS + 1)) == [record.step for record in records]
    assert [1024, 1024, 1024, 100] == [block.rows for block in run.blocks]
    start = 0
    for block in run.blocks:
        part = records[start : start + block.rows]
        losses = np.array([record.loss for record in part])
        scales = np.array([record.scale for record in part])
        headrooms = np.log2(65504.0 / (np.array([r.amax for r in part]) * scales))
        before = [records[start - 1].scale] if start else [scales[0]]
        moves = np.sign(np.diff(np.concatenate([before, scales])))
        assert (part[0].step, part[-1].step) == (block.first, block.last)
        assert losses.min() == pytest.approx(block.series["loss"].low, rel=1e-5)
        assert losses.max() == pytest.approx(block.series["loss"].high, rel=1e-5)
        assert losses.sum() == pytest.approx(block.series["loss"].total, rel=1e-5)
        assert headrooms.min() == pytest.approx(block.series["headroom"].low, rel=1e-5)
        norms = [record.norm for record in part]
        assert norms.count(math.inf) == block.series["norm"].nonfinite
        # The factor of a step that overflowed is 0, and clips nothing.
        assert sum(r.applied and r.clip < 1 for r in part) == block.clipped
        assert (moves == 1).sum() == block.growths
        assert (moves == -1).sum() == block.backoffs
        skipped = [(r.step, r.cause) for r in part if r.skipped]
        assert tuple(skipped[: blocks.MOST_SKIPS]) == block.skips
        assert len(skipped) == block.skipped == sum(block.causes.values())
        for tensor in block.tensors:
            hits = [
                r.step for r in part for name, _ in r.nonfinite if name == tensor[0]
            ]
            assert (len(hits), hits[0], hits[-1]) == (
                tensor.inf,
                tensor.first,
                tensor.last,
            )
        start += block.rows


def test_a_missing_roll_up_is_computed_again(path):
    expected = read_run(path).blocks
    rollup_path(path).unlink()
    assert_same_blocks(expected, read_run(path).blocks)


def test_a_torn_roll_up_is_used_as_far_as_it_goes(path):
    expected = read_run(path).blocks
    file = rollup_path(path)
    text = file.read_bytes()
    for cut in range(0, len(text), 97):
        file.write_bytes(text[:cut])
        run = scan_run(path)
        assert_same_blocks(expected, run.blocks)
        assert 1 == len(run.events_of("closed"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0].replace('"run":"', '"run":"x'), *lines[1:]],
        lambda lines: [lines[0].replace("rollup/1", "rollup/2"), *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [*lines[:2], "[]", *lines[2:]],
        lambda lines: [*lines[:2], "nonsense", *lines[2:]],
        lambda lines: [*lines[:2], '{"tensors":[1]}', *lines[2:]],
        lambda lines: [*lines[:2], '{"event":[1]}', *lines[2:]],
        lambda lines: [lines[0], *lines[:0:-1]],
    ],
)
def test_a_roll_up_that_does_not_fit_is_not_believed(path, damage):
    expected = read_run(path).blocks
    file = rollup_path(path)
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(damage(lines)) + "\n", encoding="utf-8")
    assert_same_blocks(expected, read_run(path).blocks)


def test_a_roll_up_of_a_longer_run_is_not_believed(path):
    """As if the run had been copied while it was written, and its roll-up later."""
    text = path.read_bytes()
    at = text.index(b"\n[2000,") + 1
    path.write_bytes(text[:at])
    run = read_run(path)
    assert 1999 == run.rows == run.last_step


def test_a_resumed_run_completes_its_roll_up(path):
    rollup_path(path).unlink()
    Recorder(path).close()
    run = scan_run(path)
    # Only the lines that say that it was resumed and closed are after the last block.
    assert STEPS == sum(block.rows for block in run.blocks)
    assert [] == run.finished
    assert_same_blocks(run.blocks, read_run(path).blocks)


def record_again(path, rows):
    """Record steps with their scales, by a process of its own."""
    with Recorder(path, policy={"min_scale": 1.0}, writers=()) as recorder:
        for step, scale, applied in rows:
            recorder.record(step=step, scale=scale, applied=applied)


BRANCHES = {
    "lower": [
        [(s, 8.0, True) for s in range(1, 11)],
        [(s, 2.0, True) for s in (9, 10)],
    ],
    "from the start": [[(1, 8.0, True), (2, 4.0, True)], [(1, 2.0, True)]],
    "within a branch": [
        [(1, 8.0, True), (2, 4.0, True), (3, 4.0, True)],
        [(3, 16.0, True), (4, 1.0, True), (5, 1.0, True)],
        [(5, 64.0, True), (6, 64.0, True)],
        [(4, 2.0, True), (5, 2.0, True), (6, 4.0, True)],
    ],
    "at random": [
        [
            (step, 2.0 ** random.Random(97 * start + step).randrange(6), True)
            for step in range(start, start + 40)
        ]
        for start in (1, 30, 20, 45, 45, 12)
    ],
}


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("is_one_process", [True, False])
@pytest.mark.parametrize("is_rolled_up", [True, False])
def test_moves_after_a_resume_are_those_of_the_steps_that_are_kept(
    tmp_path, kind, is_one_process, is_rolled_up
):
    path, branches = tmp_path / "run.jsonl", BRANCHES[kind]
    for rows in [list(chain(*branches))] if is_one_process else branches:
        record_again(path, rows)
    if not is_rolled_up:
        rollup_path(path).unlink()
    run = read_run(path)
    taken = {}
    for rows in branches:  # what is taken again replaces all that came after
        taken = {s: scale for s, scale in taken.items() if s < rows[0][0]}
        taken |= {step: scale for step, scale, _ in rows}
    assert list(taken.items()) == [(r.step, r.scale) for r in run.records()]
    moves = np.sign(np.diff(list(taken.values())))
    assert int((moves > 0).sum()) == sum(block.growths for block in run.blocks)
    assert int((moves < 0).sum()) == sum(block.backoffs for block in run.blocks)
    assert len(taken) == run.rows


@pytest.mark.parametrize("is_rolled_up", [True, False])
def test_alarms_of_steps_that_were_taken_again_are_left_out(tmp_path, is_rolled_up):
    path = tmp_path / "run.jsonl"
    good = [(step, 1.0, True) for step in range(1, 6)]
    early = [(step, 1.0, False) for step in range(6, 9)]
    between = [(step, 1.0, True) for step in range(9, 700)]
    late = [(step, 1.0, False) for step in range(700, 703)]
    record_again(path, [*good, *early, *between, *late])
    assert [8, 702] == [alarm.step for alarm in find_alarms(read_run(path))]
    record_again(path, [(step, 1.0, True) for step in range(600, 800)])
    if not is_rolled_up:
        rollup_path(path).unlink()
    run = read_run(path)
    assert [8] == [alarm["step"] for alarm in run.events_of("alarm")]
    assert [8] == [alarm.step for alarm in find_alarms(run)]
    assert [8] == [alarm["step"] for alarm in RunFollower(path).alarms]
    record_again(path, [(step, 1.0, True) for step in range(6, 20)])
    report = json.loads(build_report([path], format="json"))["runs"][0]
    assert (0, []) == (report["skipped"], report["alarms"])
    assert not any("checkpoint" in text for text in report["advice"])


def test_a_resumed_run_whose_lines_were_overwritten_is_read_with_one_warning(tmp_path):
    """The roll-up says where these steps are; where they were, nothing can be read."""
    path = tmp_path / "run.jsonl"
    steps = [(step, 8.0, True) for step in range(1, 2001)]
    record_again(path, [*steps, *steps[499:1500]])
    head, *lines = path.read_bytes().splitlines(keepends=True)
    damaged = [b"x" * (len(line) - 1) + b"\n" for line in lines[:1100]]
    path.write_bytes(b"".join([head, *damaged, *lines[1100:]]))
    words = f"1,024 lines could not be read, the first at byte {len(head)}"
    with pytest.warns(RecordWarning, match=words) as warned:
        run = read_run(path)
    assert 1 == len(warned)
    assert list(range(500, 1501)) == [record.step for record in run.records()]
    assert 1001 == run.rows


def test_a_part_of_the_steps_is_read_by_its_offset(path):
    run = read_run(path)
    found = [record.step for record in run.records(1500, 1503)]
    assert [1500, 1501, 1502, 1503] == found


def test_a_torn_line_is_left_out_with_one_warning(path):
    text = path.read_bytes()
    at = text.index(b"\n[1500,") + 1
    path.write_bytes(text[: at + 9] + b"\n" + text[text.index(b"\n", at) + 1 :])
    rollup_path(path).unlink()
    with pytest.warns(RecordWarning, match=f"1 line .* at byte {at:,}") as warned:
        run = read_run(path)
    assert 1 == len(warned)
    steps = [record.step for record in run.records()]
    assert [step for step in range(1, STEPS + 1) if step != 1500] == steps


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    from lossscale.diagnostics.records import lines

    monkeypatch.setattr(lines, "MOST_BYTES", 10_000)
    monkeypatch.setattr(lines, "_PIECE", 1_000)
    path = tmp_path / "run.jsonl"
    make_run(path, steps=20)
    with path.open("ab") as file:
        file.write(b"[" + b"1," * 50_000 + b"\n[21,0,8,1]\n[" + b"1," * 50_000)
    with pytest.warns(RecordWarning, match="2 lines"):
        run = read_run(path)
    assert 21 == run.rows


def test_statistics_are_read_where_they_are(tmp_path):
    path = tmp_path / "run.jsonl"
    make_run(path, steps=3000, statistics=range(1, 3000, 50))
    run = read_run(path)
    block = run.blocks[1]
    found = list(run.statistics(block.offset, block.size))
    assert [step for step in range(1, 3000, 50) if 1024 < step <= 2048] == [
        one.step for one in found
    ]
    name, size, amax, zeros, subnormals, first, counts = found[0].tensors[0]
    assert ("a", 4, 1051.0, 0.0, 0.0, 10, [4]) == (
        *(name, size, amax, zeros, subnormals, first, counts),
    )


def test_the_extremes_of_statistics_are_rolled_up(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "TENSOR_BLOCKS", 2)
    path = tmp_path / "run.jsonl"
    make_run(path, steps=5000, statistics=range(1, 5000, 50))
    expected = read_run(path).tensor_blocks
    rollup_path(path).unlink()
    assert expected == read_run(path).tensor_blocks
    assert [(1, 2001), (2051, 4051), (4101, 4951)] == [
        (block.first, block.last) for block in expected
    ]
    assert [2001.0, None, 0.0] == expected[0].amax
    assert [0.0, None, 1.0] == expected[0].lost
    assert 100 == sum(block.samples for block in expected)


HEADER = '{"format":"lossscale-run/1"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is not a recorded run"),
        (b"{" * 100_000 + b"\n", "is not a recorded run"),
        (b"true\nfalse\n", "is not a recorded run"),
        (b'{"finite": true}\n', "is not a recorded run"),
        (b'{"format":"lossscale/1"}\n', "is not a recorded run"),
        (b'{"format":"lossscale-run/2"}\n', "pip install --upgrade lossscale"),
        (b'{"format":"lossscale-run/1"', "is not a recorded run"),
        (HEADER.encode(), "header that is damaged"),
        (b'{"format":"lossscale-run/1"' + b" " * 2**20, "is not a recorded run"),
        ("ä".encode("utf-16"), "is not a recorded run"),
    ],
    ids=str,
)
def test_a_file_that_is_not_a_run_is_one_error(tmp_path, content, words):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(StateError, match=words):
        read_run(path)
    assert content == path.read_bytes()


def test_a_directory_a_pipe_and_nothing_are_one_error_each(tmp_path):
    import os

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    expected = "expected a run recorded as JSON lines."
    nul = f"{tmp_path}/nul\0byte"
    for path, message in (
        (tmp_path, f"{tmp_path} is a directory; {expected}"),
        (pipe, f"{pipe} is not a regular file; {expected}"),
        (f"{pipe}2", f"{pipe}2 cannot be read: No such file or directory."),
        (nul, f"{nul!r} cannot be read: embedded null byte."),
    ):
        with pytest.raises(StateError) as caught:
            read_run(path)
        assert message == str(caught.value)


def test_an_enormous_file_of_another_kind_is_refused_at_once(tmp_path):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # without a byte on the disk
    with pytest.raises(StateError, match="is not a recorded run"):
        read_run(path)


def test_a_newer_column_is_ignored(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0])
    header["columns"].append("weather")
    lines[0] = json.dumps(header)
    lines[1] = lines[1][:-1] + ',null,null,null,"fair"]'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert STEPS == read_run(path).rows
