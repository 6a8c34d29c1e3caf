"""Whatever a file holds: reading it ends with a run or with one error of ours.

Most files are a real run with changed bytes, lines and values, some are made of
nothing.
Nothing may crash, and what is read must be usable. They are the same in every run
of the tests, 1,000 of them; after a change to the reader, read all 5,000:

    LOSSSCALE_WHOLE=1 python -m pytest tests/diagnostics/test_fuzzed_runs.py
"""

import builtins
import json
import math
import os
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale.cli.application import application
from lossscale.diagnostics import (
    Recorder,
    RecordWarning,
    UpdateStatistics,
    build_report,
    measure_tensors,
    read_run,
)
from lossscale.diagnostics.alarms import KINDS, scan
from lossscale.diagnostics.live import render_run
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.diagnostics.records.run_file import rollup_path
from lossscale.errors import StateError

FORMATS = ("html", "md", "json")


def examples(count):
    """Return the settings for as many examples, or for a fifth of them."""
    return settings(
        max_examples=count if os.environ.get("LOSSSCALE_WHOLE") else count // 5
    )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["inf", "nan", "-inf", "headroom", "loss", -1, 2**70, 1e308]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["inf", "nan", "step", "scale", "tensors", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
STEP = st.lists(JSON, max_size=14).map(
    lambda rest: [1, 0.5, 65536.0, 0, *rest]
) | st.lists(JSON, max_size=14)
EVENT = st.dictionaries(
    st.sampled_from(
        ["statistics", "names", "resumed", "alarm", "closed", "tensors", "event", "?"]
    ),
    JSON
    | st.fixed_dictionaries(
        {"step": JSON, "scale": JSON, "tensors": st.lists(st.lists(JSON, max_size=8))}
    ),
    max_size=2,
)
UPDATE = st.tuples(
    *map(st.sampled_from, ((0, 1, 2), (0.5, None), (0.5, 1), ("float16",), (0, 1)))
).map(list)
CHANGED = st.tuples(UPDATE, st.integers(0, 4), JSON).map(
    lambda drawn: [*drawn[0][: drawn[1]], drawn[2], *drawn[0][drawn[1] + 1 :]]
)
STATISTICS = st.builds(
    lambda updates: {
        "statistics": {"step": 1, "scale": 8.0, "tensors": [], "updates": updates}
    },
    st.lists(UPDATE | CHANGED | st.lists(JSON, max_size=6), max_size=3) | JSON,
)
"""Lines in which all but the updates is as it should be."""
LINE = (
    st.one_of(STEP, EVENT, STATISTICS, JSON).map(
        lambda value: json.dumps(value).encode()
    )
    | st.binary(max_size=20)
    | st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"[1,0,8,1", b"[]"])
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the bytes of a real run and of its roll-up, and a place for files."""
    path = tmp_path_factory.mktemp("fuzzed") / "run.jsonl"
    with Recorder(path, names=["a", "b"]) as recorder:
        recorder.describe(dtypes={"a": "float16", "b": "float32"})
        for step in range(1, 9):
            recorder.record(
                scale=8.0,
                applied=step % 3 > 0,
                loss=1.0,
                amax=0.1,
                nonfinite={"a": "nan"},
            )
        statistics = measure_tensors({"a": np.ones(2), "b": np.zeros(3)})
        updates = UpdateStatistics(["a"], [0.5], [0.25], ["float16"], [False])
        recorder.record_statistics(statistics._replace(updates=updates), scale=8.0)
    rolled = rollup_path(path).read_bytes()
    return path, path.read_bytes().splitlines(keepends=True), rolled


def check_reading(path, content, rolled=None):
    """Read a file, and check everything that was read; return it, or `None`.

    Raises if reading ends in another way than with a usable run or with one error.
    """
    path.write_bytes(content)
    if rolled is None:
        rollup_path(path).unlink(missing_ok=True)
    else:
        rollup_path(path).write_bytes(rolled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        try:
            found = read_run(path)
        except StateError as error:
            message = str(error)
            found = None
    if found is None:
        assert "\n" not in message
        return None
    records = list(found.records())
    if rolled is None:  # a roll-up is believed about steps that were damaged later
        assert found.rows == len(records)
    assert sorted({r.step for r in records}) == [r.step for r in records]
    for record in records:
        assert 0 < record.scale < math.inf
        assert all(isinstance(name, str) for name, _ in record.nonfinite)
    for block in found.blocks:
        for sample in found.statistics(block.offset, block.size):
            assert 0 < sample.scale < math.inf
            for row in sample.updates or ():
                assert row.ratio is None or 0 <= row.ratio < math.inf
                assert 0 <= row.lost <= 1
                assert isinstance(row.name, str)
    assert {alarm.kind for alarm in scan(records)} <= set(KINDS)
    return found


@examples(2000)
@given(data=st.data())
def test_lines_of_any_kind_among_those_of_a_run(run, data):
    path, lines, _ = run
    extra = data.draw(st.lists(LINE, max_size=5))
    at = data.draw(st.integers(1, len(lines)))
    content = b"".join([*lines[:at], *(line + b"\n" for line in extra), *lines[at:]])
    found = check_reading(path, content)
    assert found is not None
    assert found.rows >= 1


@examples(1000)
@given(data=st.data())
def test_bytes_of_a_run_that_were_changed(run, data):
    path, lines, rolled = run
    content = bytearray(b"".join(lines))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(
            st.binary(max_size=9)
        )
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    check_reading(path, bytes(content), rolled if data.draw(st.booleans()) else None)


@examples(600)
@given(data=st.data())
def test_a_roll_up_of_any_kind(run, data):
    path, lines, rolled = run
    head, *rows = rolled.splitlines(keepends=True)
    extra = [line + b"\n" for line in data.draw(st.lists(LINE, max_size=4))]
    at = data.draw(st.integers(0, len(rows)))
    changed = b"".join([head, *rows[:at], *extra, *rows[at:]])
    found = check_reading(path, b"".join(lines), changed)
    assert 8 == found.rows


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the same of a run that went back to earlier steps twice."""
    path = tmp_path_factory.mktemp("resumed") / "run.jsonl"
    with Recorder(path, names=["a", "b"]) as recorder:
        for step in (*range(1, 9), *range(5, 12), *range(3, 7)):
            recorder.record(
                step=step, scale=8.0, applied=step % 3 > 0, nonfinite={"a": "nan"}
            )
    rolled = rollup_path(path).read_bytes()
    return path, path.read_bytes().splitlines(keepends=True), rolled


@examples(200)
@given(data=st.data())
def test_lines_that_were_overwritten_under_a_roll_up(resumed, data):
    """Their ends stay where they are, so that the roll-up fits."""
    path, (head, *lines), rolled = resumed
    first = data.draw(st.integers(0, len(lines) - 1))
    last = data.draw(st.integers(first, len(lines) - 1))
    damaged = [b"x" * (len(line) - 1) + b"\n" for line in lines[first : last + 1]]
    content = b"".join([head, *lines[:first], *damaged, *lines[last + 1 :]])
    assert check_reading(path, content, rolled) is not None
    check_commands(path, path.parent)


@examples(700)
@given(st.lists(LINE, max_size=6))
def test_files_of_any_lines(run, lines):
    check_reading(run[0], b"\n".join(lines))


@examples(700)
@given(
    st.dictionaries(
        st.sampled_from(
            ["format", "run", "columns", "names", "dtype", "started", "policy", "name"]
        ),
        JSON,
    )
)
def test_headers_of_any_kind(run, header):
    path, lines, _ = run
    whole = json.loads(lines[0]) | header
    content = json.dumps(whole).encode() + b"\n" + b"".join(lines[1:])
    check_reading(path, content)


HEADER_KEYS = (
    *("name", "config", "versions", "device", "dtypes", "policy", "names"),
    *("statistics_every", "rank", "started"),
)


@examples(200)
@given(st.dictionaries(st.sampled_from(HEADER_KEYS), JSON), st.lists(LINE, max_size=4))
def test_a_run_of_any_kind_that_is_read_has_a_report(run, header, extra):
    path, lines, _ = run
    whole = json.dumps(json.loads(lines[0]) | header).encode() + b"\n"
    extra = [line + b"\n" for line in extra]
    found = check_reading(path, b"".join([whole, *extra, *lines[1:]]))
    if found is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        reports = {kind: build_report([path], format=kind) for kind in FORMATS}
    assert reports["html"].endswith("</html>\n")
    assert found.rows == json.loads(reports["json"])["runs"][0]["steps"]
    assert reports["md"].startswith("## ")


POLICY_KEYS = ("kind", "growth_interval", "min_scale", "scale", "growth_factor")
HEADER = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(HEADER_KEYS), JSON, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "policy": st.dictionaries(st.sampled_from(POLICY_KEYS), JSON),
            "config": st.dictionaries(st.text(max_size=4), JSON, max_size=3),
            "versions": st.dictionaries(st.sampled_from(["torch", "x"]), JSON),
            "dtypes": st.lists(st.sampled_from(["float16", "float32"]), max_size=4),
        },
    ),
)
COMMANDS = (
    ("report", "--format", "json"),
    ("report", "-o", "out.html"),
    ("watch", "--once"),
    ("explain",),
    ("export", "-o", "out.parquet"),
    ("backtest", "-p", "dynamic", "-p", "fixed:scale=4"),
    ("recommend",),
)


def check_commands(path, outputs):
    """Raise unless every command ends with a result or with one sentence.

    Returns how many had a result.
    """
    runner, results = CliRunner(), 0
    for command, *options in COMMANDS:
        chosen = [str(outputs / o) if o.startswith("out.") else o for o in options]
        result = runner.invoke(application, [command, str(path), *chosen])
        if result.exit_code not in (0, 2) or "Traceback" in result.output:
            raise AssertionError((command, result.output)) from result.exception
        results += not result.exit_code
    return results


def test_every_command_has_a_result_for_a_run_that_nobody_touched(run):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path, lines, rolled = run
    path.write_bytes(b"".join(lines))
    rollup_path(path).write_bytes(rolled)
    assert len(COMMANDS) == check_commands(path, path.parent)


@examples(500)
@given(HEADER, st.lists(LINE, max_size=4), st.integers(1, 12))
def test_every_command_takes_a_run_of_any_kind(run, header, extra, at):
    path, lines, _ = run
    whole = json.dumps(json.loads(lines[0]) | header).encode() + b"\n"
    more = [line + b"\n" for line in extra]
    rollup_path(path).unlink(missing_ok=True)
    path.write_bytes(b"".join([whole, *lines[1:at], *more, *lines[at:]]))
    check_commands(path, path.parent)


@examples(300)
@given(st.lists(LINE, max_size=4), st.integers(1, 12))
def test_lines_of_any_kind_are_followed(run, extra, at):
    path, lines, _ = run
    rollup_path(path).unlink(missing_ok=True)
    path.write_bytes(b"".join(lines[:at]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        follower = RunFollower(path)
        with path.open("ab") as file:
            file.write(b"".join([*(line + b"\n" for line in extra), *lines[at:]]))
        follower.update()
    assert render_run(follower, 80)


TAMPERED = {
    "formats": {"dtypes": [{}, []]},
    "infinite": {"config": {"x": math.inf}},
    "a number beyond every format": {"config": {"x": 10**400}},
    "versions": {"versions": ["torch"]},
    "policy": {"policy": [1]},
    "started": {"started": 10**400},
}


@pytest.mark.parametrize("change", TAMPERED)
def test_a_header_that_was_tampered_with_is_one_sentence_or_a_report(run, change):
    path, lines, _ = run
    whole = json.dumps(json.loads(lines[0]) | TAMPERED[change]).encode() + b"\n"
    rollup_path(path).unlink(missing_ok=True)
    path.write_bytes(b"".join([whole, *lines[1:]]))
    check_commands(path, path.parent)


def test_a_time_without_end_is_no_step(run):
    path, lines, _ = run
    found = check_reading(path, b"".join([*lines, b"[99,1e400,8,1]\n"]))
    assert 8 == found.rows


def test_reading_runs_nothing(run, monkeypatch):
    """No name, cause or value of a file reaches what could run it."""
    path, lines, _ = run

    def refuse(*_arguments):
        message = "something of the file was run"
        raise AssertionError(message)

    for name in ("eval", "exec", "compile", "__import__"):
        monkeypatch.setattr(builtins, name, refuse)
    code = json.dumps(["__import__('os').system('true')"] * 12).encode() + b"\n"
    assert check_reading(path, b"".join([*lines, code])) is not None
