"""Writers for trackers: the real packages write real files, which are read back."""

import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.limits import HANG_SECONDS
from helpers.runs import record_run

from lossscale.diagnostics import (
    Alarm,
    Recorder,
    RecordWarning,
    StepRecord,
    read_run,
)
from lossscale.diagnostics.loggers import (
    LoggingWriter,
    MlflowWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    WindowWriter,
)
from lossscale.errors import ContextError, MissingPackageError

STEPS, EVERY = 230, 50
# The packages warn of what they import themselves.
theirs = pytest.mark.filterwarnings("default")
ALARM = Alarm("floor", STEPS, 12, "Steps overflow at the lowest scale.", ("a.weight",))


class Collector(WindowWriter):
    """Keeps what it is given: the windows that every tracker gets."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.windows = []

    def write_metrics(self, step, metrics):
        self.windows.append((step, metrics))


def record_and_alarm(writer, tmp_path):
    """Record a run and an alarm; return the run and the windows of a `Collector`."""
    collector = Collector(every=EVERY)
    known = record_run(tmp_path / "c.jsonl", STEPS, writers=(collector,), alarms=None)
    for i, step in enumerate(known.steps):
        writer.write_step(
            StepRecord(
                int(step),
                scale=float(known.scale[i]),
                applied=bool(known.applied[i]),
                norm=float(known.norm[i]),
                clip=float(known.clip[i]),
                amax=float(known.amax[i]),
                loss=float(known.loss[i]),
                lr=1e-3,
                cause=known.causes[i],
            )
        )
    writer.write_alarm(ALARM)
    writer.close()
    return known, dict(collector.windows)


def test_windows_have_running_totals_and_extremes(tmp_path):
    collector = Collector(every=EVERY)
    known = record_run(tmp_path / "run.jsonl", STEPS, writers=(collector,), alarms=None)
    assert [50, 100, 150, 200, 230] == [step for step, _ in collector.windows]
    start = 0
    for step, metrics in collector.windows:
        window = slice(start, step)
        assert known.loss[window].min() == metrics["lossscale/loss_min"]
        assert known.loss[window].max() == metrics["lossscale/loss_max"]
        assert known.scale[window].min() == metrics["lossscale/scale_min"]
        assert known.scale[step - 1] == metrics["lossscale/scale"]
        assert (~known.applied[:step]).sum() == metrics["lossscale/skipped_total"]
        assert (~known.applied[window]).sum() == metrics["lossscale/skipped_in_window"]
        assert known.causes[:step].count("nan") == metrics.get(
            "lossscale/skipped_nan_total", 0
        )
        assert known.norm[window].mean() == pytest.approx(
            metrics["lossscale/norm_mean"]
        )
        start = step


@theirs
def test_tensorboard_files_hold_every_window(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    writer = TensorBoardWriter(tmp_path / "events", every=EVERY)
    known, windows = record_and_alarm(writer, tmp_path)
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"tensors": 0})
    events.Reload()

    def values(tag):
        return {
            e.step: float(make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)
        }

    for tag in ("lossscale/skipped_total", "lossscale/scale", "lossscale/loss_max"):
        expected = {step: np.float32(m[tag]) for step, m in windows.items()}
        assert expected == pytest.approx(values(tag))
    assert (~known.applied).sum() == values("lossscale/skipped_total")[STEPS]
    assert {STEPS: 1.0} == values("lossscale/alarms_total")


def test_a_summary_writer_that_exists_is_used(tmp_path):
    class Summary:
        def __init__(self):
            self.scalars, self.texts, self.flushed = [], [], 0

        def add_scalar(self, tag, value, step):
            self.scalars.append((tag, value, step))

        def add_text(self, tag, text, step):
            self.texts.append((tag, text, step))

        def flush(self):
            self.flushed += 1

    summary = Summary()
    record_and_alarm(TensorBoardWriter(summary, every=EVERY), tmp_path)
    assert [("lossscale/alarm", ALARM.message, STEPS)] == summary.texts
    assert ("lossscale/alarms_total", 1, STEPS) in summary.scalars
    assert 1 == summary.flushed


def records_of_wandb(file):
    """Yield the records of a file of wandb: seven bytes, then a log as LevelDB's."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or the last part of one
            yield parts
            parts = b""


@theirs
def test_wandb_keeps_every_window_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(ContextError, match=r"wandb\.init"):
        WandbWriter()
    with wandb.init(project="test", mode="offline", dir=str(tmp_path)):
        _, windows = record_and_alarm(WandbWriter(every=EVERY), tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    def read():
        """Another process of wandb's writes the file; the last record is its exit."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            data = list(records_of_wandb(file))
            found = [wandb_internal_pb2.Record.FromString(each) for each in data]
            if found and found[-1].WhichOneof("record_type") == "exit":
                return found
            time.sleep(0.05)
        message = "wandb did not write its file."
        raise AssertionError(message)

    rows, alerts = [], []
    for record in read():
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {(i.key or "/".join(i.nested_key)): i.value_json for i in items}
            )
        if record.WhichOneof("record_type") == "alert":
            alerts.append((record.alert.title, record.alert.text))
    found = {
        int(row["lossscale/step"]): float(row["lossscale/skipped_total"])
        for row in rows
        if "lossscale/skipped_total" in row
    }
    assert found == {s: m["lossscale/skipped_total"] for s, m in windows.items()}
    assert [("loss scale: floor", ALARM.message)] == alerts


@theirs
def test_mlflow_keeps_every_window_in_local_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(ContextError, match=r"mlflow\.start_run"):
        MlflowWriter()
    with mlflow.start_run() as run:
        _, windows = record_and_alarm(MlflowWriter(every=EVERY), tmp_path)
    client = mlflow.MlflowClient()
    for name in ("lossscale/skipped_total", "lossscale/loss_max"):
        history = client.get_metric_history(run.info.run_id, name)
        expected = {step: m[name] for step, m in windows.items()}
        assert expected == {entry.step: entry.value for entry in history}
    tags = client.get_run(run.info.run_id).data.tags
    assert f"step {STEPS}: {ALARM.message}" == tags["lossscale.alarm.floor"]


@theirs
def test_trackio_keeps_every_window(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    trackio.init(project="test", name="run", embed=False, auto_log_gpu=False)
    _, windows = record_and_alarm(TrackioWriter(every=EVERY), tmp_path)
    trackio.finish()
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("test", "run")
    found = {
        row["step"]: row["lossscale/skipped_total"]
        for row in rows
        if "lossscale/skipped_total" in row
    }
    assert {s: m["lossscale/skipped_total"] for s, m in windows.items()} == found


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard.summary", lambda: TensorBoardWriter("folder")),
        ("wandb", WandbWriter),
        ("mlflow", MlflowWriter),
        ("trackio", TrackioWriter),
    ],
)
def test_a_missing_package_is_named(package, make, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    extra = package.partition(".")[0]
    with pytest.raises(MissingPackageError, match=rf"install 'lossscale\[{extra}\]'"):
        make()
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f"\n{extra} = [" in project.read_text(encoding="utf-8")


def test_python_logging_names_tensors_and_alarms(caplog):
    writer = LoggingWriter()
    with caplog.at_level("INFO", logger="lossscale"):
        writer.write_step(StepRecord(step=6, scale=8.0))
        writer.write_step(
            StepRecord(7, 0.0, 8.0, False, cause="inf", nonfinite=(("a", "inf"),))
        )
        writer.write_alarm(ALARM)
    assert [("INFO", "7"), ("WARNING", f"{STEPS:,}")] == [
        (record.levelname, record.args[0]) for record in caplog.records
    ]
    assert "inf in a (inf)" in caplog.messages[0]
    assert f"Step {STEPS}: alarm floor: Steps overflow" in caplog.messages[1]
    assert "Last step with good weights: 12." in caplog.messages[1]


class Broken(WindowWriter):
    """A tracker whose server is gone."""

    def __init__(self):
        super().__init__(every=1)
        self.calls = 0

    def write_metrics(self, step, metrics):
        self.calls += 1
        message = "no route to host"
        raise ConnectionError(message)


def record_steps(recorder, count=5):
    for _ in range(count):
        recorder.record(scale=8.0, applied=True)
    recorder.flush()


def test_a_tracker_that_fails_is_one_warning_and_the_training_goes_on(tmp_path):
    broken, fine = Broken(), Collector(every=1)
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=(broken, fine)) as recorder:
        with pytest.warns(RecordWarning, match="Broken .* no route to host") as caught:
            record_steps(recorder)
        assert 1 == len(caught)
    assert (1, 5) == (broken.calls, len(fine.windows))
    assert 5 == read_run(path).rows


def test_an_interrupt_inside_a_tracker_is_an_interrupt(tmp_path):
    class Interrupted(WindowWriter):
        def write_metrics(self, step, metrics):
            raise KeyboardInterrupt

    recorder = Recorder(tmp_path / "run.jsonl", writers=[Interrupted(every=1)])
    with pytest.raises(KeyboardInterrupt):
        record_steps(recorder)
    recorder.close()
