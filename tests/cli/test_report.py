"""`lossscale report`: what it writes and prints, and what it refuses."""

import json
import os
import sys

import pytest
from helpers.processes import run_process
from helpers.runs import record_run

from lossscale.diagnostics import Recorder


def lossscale(*arguments, cwd):
    return run_process([sys.executable, "-m", "lossscale", *arguments], cwd=cwd)


def report(*arguments, cwd):
    return lossscale("report", *arguments, cwd=cwd)


def check(result):
    """Return stdout of a command that must have succeeded quietly."""
    if result.returncode or result.stderr:
        raise AssertionError(result.stderr)
    return result.stdout


def refusal(result):
    """Return the one error of a command that must have failed."""
    assert 2 == result.returncode
    assert "" == result.stdout
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.partition("Error: ")[2].split())


@pytest.fixture
def run(tmp_path):
    return record_run(tmp_path / "run.jsonl", 200).path


def test_the_page_is_written_and_named(run, tmp_path):
    printed = check(report(run, cwd=tmp_path))
    page = tmp_path / "report.html"
    assert f"The report is {page.resolve()}\n" == printed
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_markdown_and_json_are_printed(run, tmp_path):
    assert check(report(run, "--format", "md", cwd=tmp_path)).startswith("## run\n")
    found = json.loads(check(report(run, "--format", "json", cwd=tmp_path)))
    assert 200 == found["runs"][0]["steps"]
    assert not (tmp_path / "report.html").exists()


def test_the_suffix_of_the_output_is_its_format(run, tmp_path):
    check(report(run, "-o", "out.json", cwd=tmp_path))
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["runs"]


def test_a_torn_run_is_reported_with_one_remark(run, tmp_path):
    run.write_bytes(run.read_bytes()[:-30] + b"[12,\n")
    result = report(run, "-o", "out.md", cwd=tmp_path)
    assert 0 == result.returncode
    assert 1 == result.stderr.count("note: ")
    assert "could not be read" in result.stderr


def newer(path):
    header, _, rest = path.read_text(encoding="utf-8").partition("\n")
    changed = json.loads(header) | {"format": "lossscale-run/2"}
    path.write_text(json.dumps(changed) + "\n" + rest, encoding="utf-8")


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:40])


BAD = {
    "binary": (lambda path: path.write_bytes(os.urandom(4_096)), "not a recorded run"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "foreign": (lambda path: path.write_text('{"a": 1}\n'), "not a recorded run"),
    "newer": (newer, "pip install --upgrade lossscale"),
    "truncated": (cut_in_the_header, "not a recorded run"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("form", ["html", "md"])
def test_a_bad_file_is_one_sentence_and_nothing_is_written(run, tmp_path, kind, form):
    damage, words = BAD[kind]
    damage(run)
    before = sorted(tmp_path.iterdir())
    assert words in refusal(report(run, "--format", form, cwd=tmp_path))
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["report", "export", "watch", "explain"])
def test_a_folder_and_a_pipe_are_not_runs(tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    more = ["-o", "out.parquet"] if command == "export" else []
    end = "expected a run recorded as JSON lines."
    for name, kind in (("pipe", "not a regular file"), ("folder", "a directory")):
        result = lossscale(command, name, *more, cwd=tmp_path)
        assert f"{name} is {kind}; {end}" == refusal(result)
    assert 2 == len(list(tmp_path.iterdir()))


def test_one_bad_run_among_several_writes_nothing(run, tmp_path):
    assert "none.jsonl" in refusal(report(run, "none.jsonl", cwd=tmp_path))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("no/such/out.html", "There is no folder"),
        (".", "is a folder"),
        ("run.jsonl", "is one of the runs"),
        ("run.jsonl.rollup", "is the roll-up of a run"),
        ("link", "is the roll-up of a run"),
        ("out.html/", "is a folder"),
        ("pipe", "is a device or pipe"),
        ("null", "is a device or pipe"),
        ("x.pdf", "does not end as"),
    ],
)
@pytest.mark.parametrize("command", ["report", "export"])
def test_an_output_that_cannot_be_written_is_one_sentence(
    run, tmp_path, output, words, command
):
    (tmp_path / "out.html").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    (tmp_path / "link").symlink_to("run.jsonl.rollup")
    files = run, tmp_path / "run.jsonl.rollup"
    content = [file.read_bytes() for file in files]
    before = sorted(tmp_path.iterdir())
    result = lossscale(command, run, "-o", output, cwd=tmp_path)
    assert words in refusal(result)
    assert content == [file.read_bytes() for file in files]
    assert before == sorted(tmp_path.iterdir())
    assert (tmp_path / "null").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


def test_a_roll_up_that_is_gone_is_not_written_over(run, tmp_path):
    (tmp_path / "run.jsonl.rollup").unlink()
    result = report(run, "--format", "md", "-o", "run.jsonl.rollup", cwd=tmp_path)
    assert "is the roll-up of a run" in refusal(result)


@pytest.mark.parametrize(
    ("form", "start"), [("md", "## run"), ("json", "{"), (None, "<!doctype html>")]
)
def test_a_dash_prints_the_report(run, tmp_path, form, start):
    more = [] if form is None else ["--format", form]
    before = sorted(tmp_path.iterdir())
    assert check(report(run, "-o", "-", *more, cwd=tmp_path)).startswith(start)
    assert before == sorted(tmp_path.iterdir())


def test_a_dash_is_no_file_of_an_export(run, tmp_path):
    assert "'-' is none" in refusal(lossscale("export", run, "-o", "-", cwd=tmp_path))


@pytest.mark.parametrize(
    ("form", "output"), [("html", "x.md"), ("md", "x.html"), ("json", "x.pdf")]
)
def test_an_ending_that_contradicts_the_format_is_refused(run, tmp_path, form, output):
    result = report(run, "--format", form, "-o", output, cwd=tmp_path)
    assert f"does not end as a report in {form} does" in refusal(result)
    assert not (tmp_path / output).exists()


def test_a_name_without_an_ending_is_a_page(run, tmp_path):
    check(report(run, "-o", "page", cwd=tmp_path))
    assert (tmp_path / "page").read_text(encoding="utf-8").startswith("<!doctype")


def test_a_folder_without_permission_is_one_sentence(run, tmp_path):
    if os.geteuid() == 0:
        # Root may write anywhere but to this file system.
        output, words = "/proc/report.html", "Error"
        result = report(run, "-o", output, cwd=tmp_path)
        assert 2 == result.returncode
        assert words in result.stderr
        assert "Traceback" not in result.stderr
        return
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    refusal(report(run, "-o", folder / "out.html", cwd=tmp_path))
    assert [] == list(folder.iterdir())


def test_a_name_that_is_not_unicode_is_shown(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path, name="\ud800 half", writers=()) as recorder:
        recorder.record(scale=8.0, applied=True)
    for form in ("html", "md", "json"):
        result = report(path, "-o", f"out.{form}", cwd=tmp_path)
        assert 0 == result.returncode, result.stderr
    result = report(path, "--format", "md", cwd=tmp_path)
    assert 0 == result.returncode, result.stderr
