"""Following a run while it is recorded, and its lines of text."""

import math
import signal
import subprocess
import sys
import time

import pytest
from helpers.limits import HANG_SECONDS
from helpers.runs import record_run

from lossscale.diagnostics import Recorder, read_run
from lossscale.diagnostics.live import render_run, sparkline
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.errors import StateError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_what_is_appended_is_followed(path):
    with Recorder(path, writers=(), flush_seconds=1000.0) as recorder:
        follower = RunFollower(path)
        assert "No step was recorded yet." == render_run(follower)[-1]
        for step in range(1, 6):
            recorder.record(scale=8.0, applied=step != 3, nonfinite={"new": "inf"})
            recorder.flush()
            follower.update()
            assert step == follower.steps
        assert (1, 3) == (follower.skipped, follower.last_skip.step)
        assert (("new", "inf"),) == follower.last_skip.nonfinite
        assert "running" in render_run(follower)[0]
        assert not follower.ended
    follower.update()
    assert follower.ended
    assert "ended" in render_run(follower)[0]


def test_a_line_that_is_half_written_is_read_when_it_is_whole(path):
    record_run(path, 10)
    follower = RunFollower(path)
    line = b"[11,1.0,8,1,0.5]\n"
    for i in range(len(line)):
        with path.open("ab") as file:
            file.write(line[i : i + 1])
        follower.update()
        assert 10 + (i == len(line) - 1) == follower.steps


def test_a_run_that_was_overwritten_is_read_again(path):
    record_run(path, 50)
    follower = RunFollower(path)
    record_run(path, 5, if_exists="overwrite")
    follower.update()
    assert 5 == follower.steps


def test_a_shorter_run_that_was_overwritten_by_a_longer_one_is_read_again(path):
    """In place: the file is the same, and it is longer than what was read of it."""
    with Recorder(path, writers=(), name="old") as recorder:
        for step in range(1, 6):
            recorder.record(scale=8.0, applied=step != 3)
    follower = RunFollower(path)
    overwrite = Recorder(path, writers=(), name="new", if_exists="overwrite")
    with overwrite as recorder:
        for _ in range(400):
            recorder.record(scale=64.0, applied=True)
        recorder.flush()
        follower.update()
        seen = (follower.title, follower.steps, follower.skipped, follower.last_skip)
        assert ("new", 400, 0, None) == seen
        assert {64.0} == {record.scale for record in follower.recent}


def test_steps_that_are_taken_again_are_counted_once(path):
    with Recorder(path, writers=(), flush_seconds=0) as recorder:
        for step in range(1, 11):
            recorder.record(scale=8.0, applied=step != 8, step=step)
        follower = RunFollower(path)
        for step in range(6, 13):
            recorder.record(scale=8.0, applied=step != 7, step=step)
            follower.update()
    assert (12, 1) == (follower.steps, follower.skipped)
    assert list(range(1, 13)) == [record.step for record in follower.recent]
    assert 7 == follower.last_skip.step


def test_totals_are_those_of_the_whole_run(path):
    known = record_run(path, 6_000)
    follower = RunFollower(path)
    assert 6_000 == follower.steps
    assert int((~known.applied).sum()) == follower.skipped
    assert known.causes.count("nan") == follower.causes["nan"]
    assert 4_096 == len(follower.recent)


def test_a_run_that_is_gone_is_one_error(path):
    record_run(path, 5)
    follower = RunFollower(path)
    path.unlink()
    with pytest.raises(StateError, match="cannot be read"):
        follower.update()


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_was_read_of_a_run_that_is_gone_is_still_shown(path, is_closed):
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=8.0, applied=True)
        recorder.flush()
        follower = RunFollower(path)
        if not is_closed:
            path.unlink()
            assert "run  step 1, its file is gone" == render_run(follower, 80)[0]
            return
    follower.update()
    path.unlink()
    assert "run  step 1, ended" == render_run(follower, 80)[0]


def test_a_run_that_goes_while_it_is_read_is_one_error(path, monkeypatch):
    record_run(path, 5)

    def read_and_remove(name):
        run = read_run(name)
        path.unlink()
        return run

    monkeypatch.setattr(
        "lossscale.diagnostics.records.follower.read_run", read_and_remove
    )
    with pytest.raises(StateError, match="cannot be read: No such file"):
        RunFollower(path)


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_line_is_wider_than_asked_for(path, width):
    record_run(path, 300, names=["x" * 300, "\x1b[31mred\x07"], name="n" * 500)
    lines = render_run(RunFollower(path), width)
    assert max(map(len, lines)) <= max(40, width)
    assert all(line.isprintable() for line in lines)


def test_what_was_not_recorded_is_not_shown(path):
    with Recorder(path, writers=()) as recorder:
        recorder.record(scale=2.0**17, applied=True, amax=0.25)
        recorder.record(scale=2.0**17, applied=True)
        recorder.flush()
        lines = render_run(RunFollower(path))
    labels = [line.split()[0] for line in lines if line]
    assert "scale" in labels
    assert not {"loss", "norm"} & set(labels)
    # The last step whose largest magnitude is known.
    assert any(line.split() == ["headroom", "1.0", "bits"] for line in lines)


def test_shares_of_skips_have_their_sign(path):
    with Recorder(path, writers=()) as recorder:
        for step in range(200):
            recorder.record(scale=8.0, applied=step != 100)
    assert any("(0.50 %)" in line for line in render_run(RunFollower(path)))


def test_bars_are_extremes_of_what_they_stand_for():
    values = [1.0] * 100
    values[57] = 9.0
    assert 1 == sparkline(values, 10).count("█")
    assert 1 == sparkline(values, 10, min).count("▁") - 9
    assert " " == sparkline([math.nan], 5)
    assert "" == sparkline([], 5)


def test_alarms_are_shown_with_the_last_good_step(path):
    with Recorder(path, writers=(), policy={"min_scale": 1.0}) as recorder:
        recorder.record(scale=1.0, applied=True)
        for _ in range(3):
            recorder.record(scale=1.0, applied=False)
    text = " ".join(" ".join(render_run(RunFollower(path))).split())
    assert "alarms 1 step 4, floor: 3 of the last 4 steps overflowed" in text
    assert "Last step with good weights: 1." in text


def run_watch(*arguments, **options):
    command = [sys.executable, "-m", "lossscale", "watch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )


def test_once_prints_the_same(path):
    record_run(path, 300)
    result = run_watch(path, "--once", env={"COLUMNS": "80", "PYTHONUTF8": "1"})
    assert (0, "") == (result.returncode, result.stderr)
    assert "\n".join(render_run(RunFollower(path), 80)) + "\n" == result.stdout


def test_a_file_that_is_not_a_run_is_one_sentence(tmp_path):
    (tmp_path / "other").write_text("hello")
    result = run_watch(tmp_path / "other", "--once")
    assert 2 == result.returncode
    assert "is not a recorded run" in " ".join(result.stderr.split())


def test_without_textual_it_says_what_to_install(path):
    record_run(path, 5)
    program = (
        "import sys; sys.modules['textual'] = None; sys.modules['textual.app'] = None\n"
        "from lossscale.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "watch", path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 2 == result.returncode
    assert "pip install 'lossscale[watch]'" in " ".join(result.stderr.split())


def test_the_live_view_follows_resizes_and_quits(path):
    pytest.importorskip("textual", reason="textual is not installed")
    import asyncio

    from lossscale.cli.watch_app import WatchApp

    async def use():
        with Recorder(path, writers=(), flush_seconds=0) as recorder:
            for _ in range(100):
                recorder.record(scale=8.0, applied=True, loss=2.0)
            recorder.flush()
            app = WatchApp(RunFollower(path))
            async with app.run_test(size=(100, 30)) as pilot:
                shown = app.query_one("#run")
                assert "step 100" in str(shown.render())
                recorder.record(scale=8.0, applied=False, nonfinite={"[b]x": "inf"})
                recorder.flush()
                app.follow()
                await pilot.pause()
                assert "step 101: inf in [b]x (inf)" in str(shown.render())
                await pilot.resize_terminal(50, 20)
                await pilot.pause()
                lines = str(shown.render()).splitlines()
                assert max(map(len, lines)) <= 50
                await pilot.press("q")
            assert not app.is_running

    asyncio.run(use())


@pytest.mark.parametrize("way", ["removed", "moved", "emptied"])
def test_the_live_view_outlives_its_file_and_finds_it_again(path, way):
    pytest.importorskip("textual", reason="textual is not installed")
    import asyncio

    from lossscale.cli.watch_app import WatchApp

    async def use():
        record_run(path, 20)
        content = path.read_bytes()
        path.write_bytes(content[: content.index(b'{"closed"')])  # as if it goes on
        app = WatchApp(RunFollower(path))
        async with app.run_test(size=(120, 30)) as pilot:
            shown = app.query_one("#run")
            if way == "moved":
                path.rename(path.with_name("elsewhere"))
            elif way == "removed":
                path.unlink()
            else:
                path.write_bytes(b"")
            app.follow()
            await pilot.pause()
            text = str(shown.render())
            assert "step 20" in text
            assert ("is empty" if way == "emptied" else "cannot be read") in text
            await pilot.resize_terminal(100, 20)
            await pilot.pause()
            path.write_bytes(content)
            app.follow()
            await pilot.pause()
            assert ", ended" in str(shown.render()).splitlines()[0]
            await pilot.press("q")
        assert not app.is_running

    asyncio.run(use())


def test_the_live_view_in_a_real_terminal_quits_by_q(path):
    pytest.importorskip("textual", reason="textual is not installed")
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    import os

    record_run(path, 50)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "lossscale", "watch", path]
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(follower)
    seen, deadline = b"", time.monotonic() + HANG_SECONDS
    try:
        while b"skipped" not in seen:
            assert time.monotonic() < deadline
            seen += os.read(leader, 65_536)
        os.write(leader, b"q")
        while process.poll() is None:
            assert time.monotonic() < deadline
            try:
                os.read(leader, 65_536)
            except OSError:  # the other side has closed
                break
        assert 0 == process.wait(timeout=HANG_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        os.close(leader)
