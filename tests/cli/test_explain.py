"""`lossscale explain`: what it prints, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
from helpers.processes import run_process
from helpers.runs import record_run

from lossscale.diagnostics import Recorder, explain_run


def explain(*arguments, cwd):
    return run_process(
        [sys.executable, "-m", "lossscale", "explain", *arguments], cwd=cwd
    )


def refusal(result):
    """Return the one error of a command that must have failed."""
    assert 2 == result.returncode
    assert "" == result.stdout
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.partition("Error: ")[2].split())


@pytest.fixture
def run(tmp_path):
    return record_run(tmp_path / "run.jsonl", 200).path


def test_sentences_and_json_are_printed(run, tmp_path):
    result = explain(run, cwd=tmp_path)
    assert ("", 0) == (result.stderr, result.returncode)
    seen = explain_run(run)
    title, _, *lines = result.stdout.splitlines()
    assert "## run" == title
    text = " ".join(" ".join(lines).split())
    assert " ".join(f"- {line}" for line in str(seen).splitlines()) == text
    result = explain(run, "--format", "json", cwd=tmp_path)
    assert json.loads(json.dumps(seen.to_dict())) == json.loads(result.stdout)


def test_names_and_titles_are_text_in_markdown_and_in_a_terminal(tmp_path):
    path = tmp_path / "run.jsonl"
    names = ["\x1b[31mred\x07", "**b** [x](javascript:1) @user <img>", "half\ud800"]
    with Recorder(path, name="t\x1b[2J\n<b>", names=names, writers=()) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite=dict.fromkeys(names, "inf"))
    result = explain(path, cwd=tmp_path)
    assert (0, "") == (result.returncode, result.stderr)
    assert result.stdout.startswith("## t?\\[2J &lt;b>\n")
    printed = " ".join(result.stdout.split())
    assert "half? (inf), " in printed
    assert "\\*\\*b\\*\\* \\[x\\](javascript:1) \\@user &lt;img> (inf), " in printed
    assert "?\\[31mred? (inf)." in printed
    assert all(line.isprintable() for line in result.stdout.splitlines())
    assert all(line.isprintable() for line in str(explain_run(path)).splitlines())


def test_a_run_is_read_from_stdin(run, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lossscale", "explain", "-", "--step", "14"],
        input=run.read_bytes(),
        capture_output=True,
        cwd=tmp_path,
        check=True,
    )
    assert result.stdout.startswith(b"## The standard input\n")
    assert b"Step 14 was skipped" in result.stdout
    assert [run, run.with_name("run.jsonl.rollup")] == sorted(tmp_path.iterdir())


def test_a_torn_run_is_explained_with_one_remark(run, tmp_path):
    run.write_bytes(run.read_bytes()[:-30] + b"[12,\n")
    result = explain(run, cwd=tmp_path)
    assert 0 == result.returncode
    assert 1 == result.stderr.count("note: ")


BAD = {
    "binary": (lambda path: path.write_bytes(os.urandom(4_096)), "not a recorded run"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_sentence(run, tmp_path, kind):
    damage, words = BAD[kind]
    damage(run)
    assert words in refusal(explain(run, cwd=tmp_path))


def test_a_bad_stdin_is_one_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lossscale", "explain", "-"],
        input=b"{}\n",
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert 2 == result.returncode
    assert b"The standard input is not a recorded run" in result.stderr


def test_a_step_or_format_that_is_not_there_is_one_sentence(run, tmp_path):
    assert "There is no step 500" in refusal(
        explain(run, "--step", "500", cwd=tmp_path)
    )
    assert "was applied" in refusal(explain(run, "--step", "5", cwd=tmp_path))
    assert "--step" in refusal(explain(run, "--step", "x", cwd=tmp_path))
    words = refusal(explain(run, "--format", "jsn", cwd=tmp_path))
    assert "Did you mean 'json'" in words
