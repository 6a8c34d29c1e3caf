"""A recorded run as a Parquet file, read back by pyarrow."""

import json
import os
import stat
import sys

import pytest
from helpers.processes import run_process
from helpers.runs import record_run

from lossscale.diagnostics import Recorder, export_parquet, read_run
from lossscale.errors import MissingPackageError, SettingError, StateError


def test_every_step_is_in_the_file(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    monkeypatch.setattr("lossscale.diagnostics.records.parquet._ROWS", 64)
    known = record_run(tmp_path / "run.jsonl", 300)
    output = tmp_path / "run.parquet"
    assert 300 == export_parquet(known.path, output)
    table = parquet.read_table(output)
    assert known.loss.tolist() == table["loss"].to_pylist()
    assert known.causes == table["cause"].to_pylist()
    records = list(read_run(known.path).records())
    tensors = [
        [tuple(t.values()) for t in row] for row in table["nonfinite"].to_pylist()
    ]
    assert [list(record.nonfinite) for record in records] == tensors
    assert [r.nearest_finite for r in records] == table["nearest_finite"].to_pylist()
    header = json.loads(table.schema.metadata[b"lossscale"])
    assert read_run(known.path).header == header


def test_what_cannot_be_exported_leaves_nothing(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "other.txt").write_text("hello")
    with pytest.raises(StateError, match="not a recorded run"):
        export_parquet(tmp_path / "other.txt", tmp_path / "out.parquet")
    known = record_run(tmp_path / "run.jsonl", 10)
    with pytest.raises(OSError, match="no"):
        export_parquet(known.path, tmp_path / "no" / "out.parquet")
    assert not list(tmp_path.rglob("*.parquet*"))


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    known = record_run(tmp_path / "run.jsonl", 10)
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    null.symlink_to(os.devnull)
    for output in (pipe, null, tmp_path):
        with pytest.raises(SettingError, match="is not a regular file"):
            export_parquet(known.path, output)
    for output in (known.path, tmp_path / "run.jsonl.rollup"):
        with pytest.raises(SettingError, match="belongs to the run"):
            export_parquet(known.path, output)
    assert pipe.is_fifo()
    assert stat.S_ISCHR(null.stat().st_mode)
    assert 10 == read_run(known.path).rows


def test_half_a_character_in_a_name_is_exported_as_a_question_mark(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path, output = tmp_path / "run.jsonl", tmp_path / "out.parquet"
    names = ["a\ud800", "b\udfff"]
    with Recorder(path, names=names, name="\ud800", writers=()) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"a\ud800": "inf"})
    assert 1 == export_parquet(path, output)
    (row,) = parquet.read_table(output).to_pylist()
    assert [{"name": "a?", "cause": "inf"}] == row["nonfinite"]
    assert "b?" == row["nearest_finite"]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    known = record_run(tmp_path / "run.jsonl", 10)
    with pytest.raises(
        MissingPackageError, match=r"pip install 'lossscale\[parquet\]'"
    ):
        export_parquet(known.path, tmp_path / "out.parquet")


def test_the_command_exports_or_says_what_to_install(tmp_path):
    known = record_run(tmp_path / "run.jsonl", 10)
    output = tmp_path / "out.parquet"
    command = [sys.executable, "-m", "lossscale", "export", known.path, "-o", output]
    result = run_process(command)
    if result.returncode:
        assert "pip install 'lossscale[parquet]'" in result.stderr
        assert not output.exists()
    else:
        assert f"10 steps are in {output}\n" == result.stdout
