"""What a `Recorder` writes, when it writes it, and what never stops a training."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.limits import HANG_SECONDS
from helpers.processes import run_process

import lossscale
import lossscale.numpy as ls
from lossscale import Dynamic, Signal
from lossscale.diagnostics import (
    Recorder,
    RecordWarning,
    StepRecord,
    measure_tensors,
    read_run,
)
from lossscale.diagnostics.loggers import StepWriter
from lossscale.diagnostics.records.appending import AppendOnlyFile, is_being_written
from lossscale.diagnostics.records.layout import COLUMNS
from lossscale.diagnostics.records.steps import read_report
from lossscale.diagnostics.records.writer import RunWriter
from lossscale.errors import SettingError, SettingTypeError, StateError
from lossscale.presets import PRESETS


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_of(path):
    return list(read_run(path).records())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_step_is_an_array_in_the_columns_of_the_header(path):
    with Recorder(path) as recorder:
        recorder.record(
            scale=65536.0, applied=True, norm=0.5, clip=1.0, amax=0.25, loss=2.0, lr=0.1
        )
    header, row, closed = lines_of(path)
    assert list(COLUMNS) == header["columns"]
    assert [1, 65536, 1, 0.5, 1, 0.25, 2, 0.1] == [row[0], *row[2:]]
    assert 1 == closed["closed"]["step"]


def test_what_was_recorded_is_read_again(path):
    given = [
        StepRecord(1, scale=65536.0, norm=0.5, clip=0.125, amax=0.25, loss=2.0, lr=0.1),
        StepRecord(2, scale=65536.0),
        StepRecord(3, scale=2.0**-126, loss=1.5),
        StepRecord(
            4,
            scale=3.0,
            applied=False,
            norm=math.inf,
            cause="nan",
            nonfinite=(("a", "inf"), ("b", "nan")),
            nearest_finite="c",
        ),
    ]
    with Recorder(path, names=["a", "b", "c"]) as recorder:
        for record in given:
            values = record._asdict()
            del values["time"], values["nearest_finite"]
            recorder.record(**values)
    assert given == [record._replace(time=0.0) for record in steps_of(path)]


def test_a_nan_is_kept_apart_from_what_was_not_measured(path):
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=False, loss=float("nan"), norm=None)
    (step,) = steps_of(path)
    assert math.isnan(step.loss)
    assert step.norm is None
    assert "NaN" not in path.read_text(encoding="utf-8")


def test_hundreds_of_tensors_in_a_row_are_a_few_characters(path):
    names = [f"layer{index}" for index in range(500)]
    broken = dict.fromkeys(names[:400], "nan") | {names[450]: "inf"}
    with Recorder(path, names=names) as recorder:
        recorder.record(scale=8.0, applied=False, cause="nan", nonfinite=broken)
    row = path.read_text(encoding="utf-8").splitlines()[1]
    assert '{"nan":[[0,399]],"inf":[450]}' in row
    assert tuple(broken.items()) == steps_of(path)[0].nonfinite


def test_the_nearest_finite_tensor_is_the_next_towards_the_loss(path):
    names = ["embedding", "block0", "block1", "head"]
    with Recorder(path, names=names) as recorder:
        broken = {"embedding": "nan", "block0": "inf"}
        recorder.record(scale=8.0, applied=False, nonfinite=broken)
        everything = dict.fromkeys(names, "nan")
        recorder.record(scale=8.0, applied=False, nonfinite=everything)
    assert ["block1", None] == [step.nearest_finite for step in steps_of(path)]


def test_without_the_models_order_no_tensor_is_called_the_nearest(path):
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"b": "inf"})
        recorder.record(scale=8.0, applied=False, nonfinite={"a": "inf"})
    assert [None, None] == [step.nearest_finite for step in steps_of(path)]
    assert ["b", "a"] == read_run(path).names


def test_the_header_says_what_the_run_was_made_with(path):
    policy = Dynamic(growth_interval=20)
    names = {"a": "float16", "b": "float32"}
    config = {"batch": 8, "note": np.float32(0.5), "bad": float("nan")}
    with Recorder(path, policy=policy, names=names, device="H200", config=config):
        pass
    header = read_run(path).header
    assert ("dynamic", 20) == (
        header["policy"]["kind"],
        header["policy"]["growth_interval"],
    )
    assert (["a", "b"], ["float16", "float32"]) == (header["names"], header["dtypes"])
    assert ("H200", 8) == (header["device"], header["config"]["batch"])
    assert np.__version__ == header["versions"]["numpy"]
    assert "nan" == header["config"]["bad"]


REPORT = {
    "index": 1,
    "applied": False,
    "scale": 8.0,
    "norm": None,
    "clip": 1.0,
    "amax": 0.5,
    "loss_finite": True,
}


def test_a_step_report_is_read_by_its_attributes():
    named = {"reason": "nan", "nonfinite": {"w": "nan"}}
    record = read_report(SimpleNamespace(**REPORT, **named))
    expected = StepRecord(
        1,
        scale=8.0,
        applied=False,
        clip=1.0,
        amax=0.5,
        cause="nan",
        nonfinite=(("w", "nan"),),
    )
    assert expected == record


def report(index, **values):
    named = {"reason": "inf", "nonfinite": {}} | REPORT | {"index": index, **values}
    return SimpleNamespace(**named)


def test_a_recorder_is_called_with_step_reports(path):
    with Recorder(path) as recorder:
        recorder(report(1))
        recorder(report(2, applied=True, scale=4.0))
    assert [(1, "inf"), (2, None)] == [(s.step, s.cause) for s in steps_of(path)]


def test_the_largest_magnitude_is_that_of_the_tensors_if_only_they_were_measured(path):
    measured = measure_tensors({"a": np.float16([0.5, -4.0]), "b": np.float16([2.0])})
    known = {"applied": True, "scale": 8.0, "statistics": measured}
    with Recorder(path) as recorder:
        recorder(report(1, **known, amax=None))
        recorder(report(2, **known, amax=0.25))
        recorder(report(3, applied=True, amax=None))
    assert [0.5, 0.25, None] == [step.amax for step in steps_of(path)]


def test_a_note_adds_the_loss_before_or_after_its_report(path):
    with Recorder(path) as recorder:
        recorder(report(1, applied=True))
        recorder.note(1, loss=2.5, lr=0.1)
        recorder.note(2, loss=2.25)
        recorder(report(2, applied=True))
        recorder(report(3, applied=True))
    assert [2.5, 2.25, None] == [step.loss for step in steps_of(path)]
    assert [0.1, None, None] == [step.lr for step in steps_of(path)]


def test_the_signal_of_any_framework_is_a_step(path):
    policy = Dynamic(init_scale=8.0)
    state = ls.init(policy)
    gradients = np.array([0.5, np.inf], np.float16)
    _, signal = ls.unscale(gradients, state, measure=["nan", "amax", "norm"])
    with Recorder(path) as recorder:
        recorder.record_signal(state, signal, loss=np.float32(2.0))
        recorder.record_signal(state, signal._replace(nan=True))
        recorder.record_signal(state, signal._replace(too_large=np.bool_(True)))
        recorder.record_signal(state, signal._replace(loss_finite=False))
    steps = steps_of(path)
    assert ["inf", "nan", "headroom", "loss"] == [step.cause for step in steps]
    # The signal's largest magnitude carries the scale, that of a record does not.
    assert (8.0, 0.0625, 2.0) == (steps[0].scale, steps[0].amax, steps[0].loss)


def test_a_recorder_without_a_policy_uses_the_standard_library_alone(path):
    program = f"""
import sys
from lossscale.diagnostics import Recorder, read_run
with Recorder({str(path)!r}) as recorder:
    recorder.record(scale=8.0, applied=True)
assert 1 == read_run({str(path)!r}).rows
assert not {{"numpy", "click", "rich", "torch"}} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def wait_until(condition):
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_package_that_is_not_installed_records_from_its_source(path):
    program = (
        "import sys; from lossscale.diagnostics import Recorder\n"
        "with Recorder(sys.argv[1]) as recorder: recorder.record(scale=8, applied=True)"
    )
    source = Path(lossscale.__file__).parents[1]
    # Without site-packages there is no metadata that would say its version.
    command = [sys.executable, "-S", "-c", program, path]
    run_process(command, check=True, env={"PYTHONPATH": str(source)})
    assert "from source" == read_run(path).header["versions"]["lossscale"]


def test_a_package_of_another_name_has_its_version(path, monkeypatch):
    """tensorflow-cpu and tf-nightly install a module that is called tensorflow."""

    def find_nothing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("lossscale.diagnostics.records.headers.version", find_nothing)
    module = SimpleNamespace(__version__="2.99.0")
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    monkeypatch.setitem(sys.modules, "flax", SimpleNamespace(__version__=3))
    Recorder(path).close()
    versions = read_run(path).header["versions"]
    assert ("2.99.0", "from source") == (versions["tensorflow"], versions["flax"])


def test_the_file_is_written_without_a_flush(path):
    recorder = Recorder(path, flush_seconds=0.01)
    for _ in range(4):
        recorder.record(scale=8.0, applied=True)
    wait_until(lambda: len(path.read_text(encoding="utf-8").splitlines()) >= 5)
    assert [1, 2, 3, 4] == [row[0] for row in lines_of(path)[1:]]
    recorder.close()


def test_with_no_seconds_every_step_is_written_at_once(path):
    recorder = Recorder(path, flush_seconds=0)
    # The first two are held back until it is clear that no note comes for them.
    for _ in range(5):
        recorder.record(scale=8.0, applied=True)
    assert 6 == len(lines_of(path))
    recorder.close()


def test_a_flush_is_one_append(path):
    """Seen by the system: one write to the run, whatever the number of steps."""
    recorder = Recorder(path, flush_seconds=1000.0)
    written, original = [], os.write

    def watch(descriptor, data):
        written.append(len(data))
        return original(descriptor, data)

    for _ in range(100):
        recorder.record(scale=8.0, applied=True)
    os.write = watch
    try:
        recorder.flush()
    finally:
        os.write = original
    recorder.close()
    assert 1 == len(written)


def test_steps_from_several_threads_are_all_there(path):
    def record(start):
        for step in range(start, start + 500):
            recorder.record(scale=8.0, applied=True, loss=float(step))

    with Recorder(path, flush_seconds=0.001) as recorder:
        threads = [threading.Thread(target=record, args=(n * 500,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = read_run(path)
    assert 0 == run.malformed.lines
    losses = {record.loss for record in run.records()}
    assert set(map(float, range(2000))) == losses


KILLED = """
import sys
from lossscale.diagnostics import Recorder
recorder = Recorder(sys.argv[1], flush_seconds=0.001)
step = 0
while True:
    step += 1
    recorder.record(step=step, scale=65536.0, applied=step % 7 != 0, loss=1.0 / step)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_kill_tears_at_most_one_line(path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    wait_until(lambda: path.exists() and path.stat().st_size > 300_000)
    process.kill()
    process.wait()
    text = path.read_bytes()
    whole = text[: text.rindex(b"\n") + 1].splitlines()
    rows = [json.loads(line) for line in whole[1:]]
    assert list(range(1, len(rows) + 1)) == [row[0] for row in rows]


def test_a_resumed_run_goes_on_after_its_last_step_and_says_so(path):
    with Recorder(path) as recorder:
        recorder(report(1, applied=True))
        recorder(report(2, applied=True))
    with Recorder(path) as recorder:
        recorder(report(1, applied=True))  # a new scaler counts from 1
        recorder.record(scale=4.0, applied=True)
    assert [1, 2, 3, 4] == [step.step for step in steps_of(path)]
    (resumed,) = read_run(path).events_of("resumed")
    assert 2 == resumed["after_step"]


def test_a_scaler_that_counts_on_by_itself_is_followed(path):
    with Recorder(path) as recorder:
        recorder(report(1, applied=True))
    with Recorder(path) as recorder:
        recorder(report(2, applied=True))
        recorder(report(3, applied=True))
    assert [1, 2, 3] == [step.step for step in steps_of(path)]


def test_steps_that_are_taken_again_replace_those_of_before(path):
    """As after a reload of a checkpoint, in the same process or in another."""
    with Recorder(path) as recorder:
        for step in range(1, 7):
            recorder.record(step=step, scale=8.0, applied=True, loss=1.0)
        recorder.record(step=5, scale=4.0, applied=True, loss=2.0)
    with Recorder(path) as recorder:
        recorder.record(step=3, scale=2.0, applied=True, loss=3.0)
        recorder.record(step=4, scale=2.0, applied=True, loss=3.0)
    steps = steps_of(path)
    assert [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)] == [(s.step, s.loss) for s in steps]
    assert 4 == read_run(path).rows


def test_a_resume_after_a_torn_line_loses_that_line_alone(path):
    with Recorder(path) as recorder:
        for _ in range(3):
            recorder.record(scale=8.0, applied=True)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: whole.index("[3,") + 6], encoding="utf-8")
    path.with_name("run.jsonl.rollup").unlink()
    with pytest.warns(RecordWarning, match="1 line could not be read") as warned:
        recorder = Recorder(path)
    recorder.record(scale=8.0, applied=True)
    recorder.record(scale=8.0, applied=True)
    recorder.close()
    assert 1 == len(warned)
    assert [1, 2, 3, 4] == [step.step for step in steps_of(path)]


def test_a_resumed_run_knows_new_tensors(path):
    with Recorder(path, names=["a"]) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"a": "inf"})
    with Recorder(path, names=["a", "b"]) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"b": "inf"})
    names = [step.nonfinite[0][0] for step in steps_of(path)]
    assert ["a", "b"] == names


def test_an_existing_run_can_be_overwritten_or_refused(path):
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=True)
    with pytest.raises(SettingError, match="if_exists='resume'"):
        Recorder(path, if_exists="raise")
    with Recorder(path, if_exists="overwrite") as recorder:
        recorder.record(scale=4.0, applied=True)
    assert [4.0] == [step.scale for step in steps_of(path)]


@pytest.mark.parametrize("if_exists", ["resume", "overwrite"])
@pytest.mark.parametrize("content", [b"precious", b"{}\n", b"\x00\xff" * 100])
def test_a_file_that_is_not_a_run_is_left_alone(path, content, if_exists):
    path.write_bytes(content)
    with pytest.raises(StateError, match="is not a recorded run"):
        Recorder(path, if_exists=if_exists)
    assert content == path.read_bytes()
    assert ["run.jsonl"] == [file.name for file in path.parent.iterdir()]


def test_a_second_recorder_of_the_same_file_is_refused(path):
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    with Recorder(path), pytest.raises(SettingError, match="another Recorder"):
        Recorder(path)


def test_a_forked_process_keeps_no_lock(path):
    """Such as the worker of a data loader, which outlives the recorder."""
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    recorder = Recorder(path)
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(start)
        os.read(end, 1)  # until the test ends
        os._exit(0)
    try:
        recorder.close()
        assert not is_being_written(path)
        Recorder(path).close()
    finally:
        os.close(start)
        os.close(end)
        os.waitpid(child, 0)


def test_a_copy_of_the_open_file_keeps_no_lock(path):
    """A process that C forked has one, of which Python does not know."""
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    file = AppendOnlyFile(path)
    copy = os.dup(file._descriptor)
    assert is_being_written(path)
    file.close()
    assert not is_being_written(path)
    os.close(copy)


def test_the_worker_of_a_killed_training_keeps_no_lock(path):
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    program = (
        "import os, signal, sys\n"
        "from lossscale.diagnostics import Recorder\n"
        f"recorder = Recorder({str(path)!r})\n"
        "if os.fork():\n"
        "    signal.pause()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert b"ready" in process.stdout.readline()
    process.kill()
    process.wait(HANG_SECONDS)
    try:
        assert not is_being_written(path)
        Recorder(path).close()
    finally:  # the worker reads the end of its input
        process.stdin.close()
        process.stdout.close()


def test_a_reader_that_looks_at_the_lock_does_not_stop_a_training(path):
    fcntl = pytest.importorskip("fcntl", reason="file locks need fcntl")
    Recorder(path).close()
    with path.open("rb") as file:  # as a watch that looks, and is slow
        fcntl.flock(file, fcntl.LOCK_SH)
        release = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        Recorder(path).close()
        release.join()
    stop = threading.Event()

    def look():
        while not stop.is_set():
            is_being_written(path)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        for _ in range(100):
            Recorder(path).close()
    finally:
        stop.set()
        watch.join()


def test_rank_0_alone_is_recorded(path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=True)
        recorder.record_signal(None, None)  # not even read
        assert not recorder.wants_statistics(1)
    assert not path.exists()


def test_every_rank_has_a_file_of_its_own(path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    for rank in (None, 0):
        with Recorder(path, rank=rank, every_rank=True) as recorder:
            recorder.record(scale=8.0, applied=True)
    found = sorted(file.name for file in path.parent.glob("*.jsonl"))
    assert ["run.rank0.jsonl", "run.rank3.jsonl"] == found
    assert 3 == read_run(path.with_name("run.rank3.jsonl")).header["rank"]


def test_folders_that_are_missing_are_made(tmp_path):
    path = tmp_path / "runs" / "first" / "run.jsonl"
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=True)
    assert 1 == read_run(path).rows


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int8"}, "dtype must be"),
        ({"names": "weight"}, "names must be names"),
        ({"names": [1]}, "names must be names"),
        ({"names": {"a": "float17"}}, "The dtype of 'a'"),
        ({"statistics_every": -1}, "statistics_every"),
        ({"statistics_every": 0.5}, "statistics_every"),
        ({"flush_seconds": -1.0}, "flush_seconds"),
        ({"flush_seconds": float("nan")}, "flush_seconds"),
        ({"if_exists": "append"}, "if_exists must be"),
        ({"rank": -1}, "rank must be"),
        ({"every_rank": 1}, "every_rank must be"),
        ({"writers": print}, r"writers must be a list .* got <built-in function print"),
        ({"writers": [print]}, r"writers must be .*function print> in it"),
        ({"writers": [StepWriter]}, "writers must be"),
        ({"writers": StepWriter()}, r"writers must be a list .* got <.*StepWriter"),
        ({"writers": "tensorboard"}, "writers must be"),
        ({"on_alarm": "x"}, "on_alarm must be a function .* got 'x'"),
        ({"alarms": True}, r"alarms must be an AlarmRules.* got True.* Leave it out"),
        ({"config": 5}, r"config must be a mapping, .* got 5\."),
        ({"policy": "torch"}, r"got 'torch'.*presets.get\('torch'\)"),
        ({"policy": Dynamic}, r"policy must be .* Write Dynamic\(\)\."),
        ({"policy": PRESETS["flax"]}, r"policy must be .* Pass the \.policy of"),
        ({"policy": 3}, "policy must be a policy"),
    ],
)
def test_a_bad_setting_is_an_error_and_no_file(path, settings, words):
    with pytest.raises((SettingError, SettingTypeError), match=words):
        Recorder(path, **settings)
    assert [] == list(path.parent.iterdir())


def test_a_setting_that_was_refused_leaves_no_lock(path):
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    with pytest.raises(SettingTypeError) as refused:  # a traceback keeps its locals
        Recorder(path, writers=print)
    assert refused.value is not None
    Recorder(path).close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_recorder_that_fails_after_opening_leaves_no_lock(path, exists, monkeypatch):
    pytest.importorskip("fcntl", reason="file locks need fcntl")
    if exists:
        with Recorder(path) as recorder:
            recorder.record(scale=8.0, applied=True)

    def fail(*arguments, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lossscale.diagnostics.records.recorder.Session", fail)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            Recorder(path)
    assert interrupted.value is not None
    assert exists == path.exists()
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=True)
    assert 1 + exists == read_run(path).rows


@pytest.mark.parametrize("given", [{"name": 5}, {"device": 0}])
def test_a_number_for_a_name_is_kept_as_text(path, given):
    Recorder(path, **given).close()
    ((key, value),) = given.items()
    assert str(value) == read_run(path).header[key]


@pytest.mark.parametrize("if_exists", ["resume", "overwrite"])
def test_a_device_is_no_run(tmp_path, if_exists):
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    with pytest.raises(SettingError, match="it is not a regular file"):
        Recorder(null, if_exists=if_exists)
    assert [null] == list(tmp_path.iterdir())


def test_a_disk_without_room_for_the_header_is_an_error_and_no_file(tmp_path):
    """A limit on the size of files has the effect of a disk that is full."""
    result = run_process([sys.executable, "-c", NO_ROOM, tmp_path / "run.jsonl"])
    assert "" == result.stderr
    assert "SettingError run.jsonl cannot be written: File too large." in result.stdout
    assert [] == list(tmp_path.iterdir())


NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from lossscale.diagnostics import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
path = Path(sys.argv[1])
try:
    Recorder(path)
except Exception as error:
    print(type(error).__name__, str(error).replace(f"{path.parent}/", ""))
"""


def test_a_header_that_cannot_be_made_leaves_no_lock(path):
    """The second recorder would be refused if the first still had the file."""
    with pytest.raises(TypeError):
        RunWriter(path, {"names": 3}, overwrite=False)
    assert [] == list(path.parent.iterdir())
    Recorder(path).close()


@pytest.mark.parametrize("place", ["a directory", "below a file", "a pipe"])
def test_a_place_that_cannot_be_written_is_an_error(tmp_path, place):
    path = tmp_path / "run.jsonl"
    if place == "a directory":
        path.mkdir()
    elif place == "below a file":
        path.write_text("x", encoding="utf-8")
        path = path / "run.jsonl"
    else:
        os.mkfifo(path)
    with pytest.raises(SettingError, match=r"cannot be (written|made)"):
        Recorder(path)


@pytest.mark.parametrize(
    "values",
    [
        {"scale": 0.0},
        {"scale": float("inf")},
        {"scale": float("nan")},
        {"scale": None},
        {"norm": "much"},
        {"loss": np.zeros(2)},
        {"step": -1},
        {"step": 1.5},
        {"step": 2**60},
        {"applied": False, "cause": "bad luck"},
        {"applied": False, "nonfinite": {"w": "odd"}},
        {"applied": False, "nonfinite": 3},
        {"applied": "no"},
        {"applied": None},
        {"applied": 1},
        {"applied": np.float32(0.0)},
        {"applied": np.array([True, False])},
    ],
)
def test_a_bad_value_is_an_error_and_no_line(path, values):
    with Recorder(path, flush_seconds=0) as recorder:
        with pytest.raises((SettingError, SettingTypeError)):
            recorder.record(**({"scale": 8.0, "applied": True} | values))
        recorder.record(scale=8.0, applied=True)
    assert [1] == [step.step for step in steps_of(path)]


@pytest.mark.parametrize("applied", [True, np.bool_(True), np.array([True])])
def test_whether_a_step_was_applied_may_be_an_array(path, applied):
    with Recorder(path) as recorder:
        recorder.record(scale=8.0, applied=applied)
        recorder.record(scale=8.0, applied=np.logical_not(applied))
    assert [True, False] == [step.applied for step in steps_of(path)]


def test_what_is_not_a_step_is_an_error_and_no_line(path):
    state = ls.init(Dynamic(init_scale=8.0))
    statistics = measure_tensors({"w": np.ones(2, np.float16)})
    wrong = [
        (lambda r: r.record_signal(Signal(True), state), r"Write record_signal\(state"),
        (lambda r: r.record_signal(8.0, Signal(True)), "takes the ScaleState .* 8.0"),
        (lambda r: r.record_signal(state, None), "takes the ScaleState .* None"),
        (lambda r: r.record_signal(state, Signal("no")), "signal.finite must be True"),
        (lambda r: r.record_statistics({}, scale=8.0), "must be a TensorStatistics"),
        (lambda r: r(3), r"A step report is expected, .* got 3, .* recorder.record\("),
    ]
    with Recorder(path, flush_seconds=0) as recorder:
        for call, words in wrong:
            with pytest.raises(SettingTypeError, match=words):
                call(recorder)
        recorder.record_signal(state, Signal(True))
        recorder.record_statistics(statistics, scale=8.0)
    assert [1] == [step.step for step in steps_of(path)]


def test_an_error_in_a_reports_own_code_is_not_hidden(path):
    class Failing(SimpleNamespace):
        @property
        def amax(self):
            return self.missing.norm

        missing = None

    values = {name: value for name, value in vars(report(1)).items() if name != "amax"}
    values["applied"] = True
    with Recorder(path) as recorder, pytest.raises(AttributeError, match="'norm'"):
        recorder(Failing(**values))


def test_a_full_disk_is_one_warning_and_the_training_goes_on(tmp_path):
    full = tmp_path / "full.jsonl"
    with Recorder(full, flush_seconds=1000.0) as recorder:
        recorder.record(scale=8.0, applied=True)
        descriptor = os.open("/dev/full", os.O_WRONLY)
        os.dup2(descriptor, recorder._session._writer._file._descriptor)
        os.close(descriptor)
        with pytest.warns(RecordWarning, match="No space left.*the training goes on"):
            recorder.flush()
        for _ in range(10):
            recorder.record(scale=8.0, applied=True)


def test_a_closed_recorder_takes_steps_and_does_nothing(path):
    recorder = Recorder(path)
    recorder.record(scale=8.0, applied=True)
    recorder.close()
    recorder.close()
    recorder.record(scale=8.0, applied=True)
    recorder.flush()
    assert 1 == read_run(path).rows


def test_a_process_that_ends_without_a_close_loses_nothing(path):
    program = f"""
from lossscale.diagnostics import Recorder
recorder = Recorder({str(path)!r}, flush_seconds=1000.0)
for _ in range(5):
    recorder.record(scale=8.0, applied=True)
raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert 5 == read_run(path).rows
    assert 1 == len(read_run(path).events_of("closed"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_writes_nothing(path):
    program = f"""
import os
from lossscale.diagnostics import Recorder
recorder = Recorder({str(path)!r}, flush_seconds=1000.0)
for _ in range(5):
    recorder.record(scale=8.0, applied=True)
if os.fork() == 0:
    recorder.record(scale=4.0, applied=True)
    recorder.flush()
    raise SystemExit(0)
os.wait()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    assert [8.0] * 5 == [step.scale for step in steps_of(path)]


def test_a_recorder_that_nothing_holds_any_more_is_closed(path):
    recorder = Recorder(path, flush_seconds=1000.0)
    recorder.record(scale=8.0, applied=True)
    del recorder
    assert 1 == len(read_run(path).events_of("closed"))


def test_statistics_are_wanted_on_the_first_step_and_every_so_many(path):
    with Recorder(path) as recorder:
        wanted = [step for step in range(1, 150) if recorder.wants_statistics(step)]
    assert [1, 51, 101] == wanted
    with Recorder(path, statistics_every=0) as recorder:
        assert not recorder.wants_statistics(1)
