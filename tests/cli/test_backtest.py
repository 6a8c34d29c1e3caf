"""`lossscale backtest` and `recommend`: what they print and write, what they refuse."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
from helpers.limits import HANG_SECONDS
from helpers.processes import run_process
from helpers.runs import record_run

from lossscale import Dynamic
from lossscale.cli.policies import parse_policy
from lossscale.core.data_policies import (
    Headroom,
    Histogram,
    LogMax,
    OverflowRate,
    RisingFloor,
    Saturation,
    WindowFollowsScale,
)
from lossscale.diagnostics import Recorder
from lossscale.errors import LossScaleError


def run(command, *arguments, cwd):
    return run_process(
        [sys.executable, "-m", "lossscale", command, *arguments], cwd=cwd
    )


def check(result):
    """Return stdout of a command that must have succeeded."""
    if result.returncode:
        raise AssertionError(result.stderr)
    return result.stdout


def refusal(result):
    """Return the one error of a command that must have failed."""
    assert 2 == result.returncode
    assert "" == result.stdout
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.partition("Error: ")[2].split())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("run") / "run.jsonl", 200).path


def test_a_table_with_what_it_is_worth(recorded, tmp_path):
    result = run("backtest", recorded, "-p", "torch", "-p", "fixed:2**10", cwd=tmp_path)
    lines = check(result).splitlines()
    assert "run: 200 steps, float16" == lines[0]
    names = [line.split()[0] for line in lines[4:] if line.strip()]
    assert ["as", "torch", "fixed:2**10"] == names
    assert "note: The gradients are those of the recorded training." in result.stderr


def test_json_has_estimates_bounds_settings_and_remarks(recorded, tmp_path):
    arguments = "-p", "headroom:margin=2", "--format", "json"
    found = json.loads(check(run("backtest", recorded, *arguments, cwd=tmp_path)))
    assert "lossscale-backtest/1" == found["format"]
    assert 200 == found["steps"]
    (policy,) = found["policies"]
    assert "headroom:margin=2" == policy["name"]
    assert ("headroom", 2.0) == (policy["policy"]["kind"], policy["policy"]["margin"])
    assert {"likely", "low", "high"} == set(policy["skipped"])
    assert 200 == len(policy["trajectory"]["scales"])
    assert found["remarks"]


def test_markdown_is_a_table_and_a_list(recorded, tmp_path):
    text = check(
        run("backtest", recorded, "-p", "torch", "--format", "md", cwd=tmp_path)
    )
    assert text.startswith("## Backtest of run\n\n| policy | skipped |")
    assert "\n| torch | " in text
    assert "\n- The gradients are those of the recorded training." in text


@pytest.mark.parametrize(
    "name", ["out.html", "out.HTM", "out.json", "out.md", "out.MD", "out"]
)
def test_the_suffix_of_the_output_is_its_format(recorded, tmp_path, name):
    printed = check(run("backtest", recorded, "-p", "torch", "-o", name, cwd=tmp_path))
    path = tmp_path / name
    assert f"The backtest is {path.resolve()}\n" == printed
    start = {".json": "{", ".md": "## "}.get(path.suffix.lower(), "<!doctype html>")
    assert path.read_text(encoding="utf-8").startswith(start)


def test_a_page_without_an_output_has_a_name(recorded, tmp_path):
    check(run("backtest", recorded, "-p", "torch", "--format", "html", cwd=tmp_path))
    assert ["backtest.html"] == [path.name for path in tmp_path.iterdir()]


REFUSED = {
    ("-p", "headrom"): "Did you mean 'headroom'?",
    ("-p", "headroom:marge=3"): "Did you mean 'margin'?",
    ("-p", "torch:growth_intervall=3"): "Did you mean 'growth_interval'?",
    ("-p", "headroom:margin=none"): "margin must be a number such as 1024",
    ("-p", "headroom:margin=99"): "margin",
    ("-p", "fixed:-1"): "scale must be",
    ("-p", "rising_floor:floors=8"): "floors is written step:scale",
    ("-p", "dynamic:init_scale"): "A setting is written name=value",
    (): "--policy",
    ("-p", "torch", "-o", "."): "--output must be a file",
    ("-p", "torch", "-o", "missing/out.html"): "There is no folder",
    ("-p", "torch", "--format", "htm"): "Did you mean 'html'?",
    ("-p", "torch", "-o", "out.txt"): "does not end as a report in html does",
    ("-p", "torch", "-o", "a.md", "--format", "json"): "report in json does: .json",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_bad_arguments_are_one_error_and_leave_nothing(recorded, tmp_path, arguments):
    result = run("backtest", recorded, *arguments, cwd=tmp_path)
    assert REFUSED[arguments] in refusal(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [(), ("--format", "md"), ("--format", "json")])
def test_a_title_is_not_obeyed_by_the_terminal(tmp_path, options):
    path = tmp_path / "run.jsonl"
    record_run(path, 50, name="a\x1b[2J\nb")
    printed = check(run("backtest", path, "-p", "torch", *options, cwd=tmp_path))
    assert "\x1b" not in printed
    title = {(): "a?[2J b: 50 steps", ("--format", "md"): "## Backtest of a?\\[2J b\n"}
    assert printed.startswith(title.get(options, "{"))


def test_the_record_itself_is_not_overwritten(tmp_path):
    path = record_run(tmp_path / "run.jsonl", 20).path
    before = path.read_bytes()
    result = run("backtest", path, "-p", "torch", "-o", path, cwd=tmp_path)
    assert "is one of the runs" in refusal(result)
    assert before == path.read_bytes()


BAD = {
    "missing": (lambda path: None, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "binary": (lambda path: path.write_bytes(os.urandom(999)), "not a recorded run"),
    "no steps": (lambda path: Recorder(path).close(), "holds no step"),
}


@pytest.mark.parametrize("command", ["backtest", "recommend"])
@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_run_is_one_error(tmp_path, kind, command):
    make, expected = BAD[kind]
    path = tmp_path / "bad.jsonl"
    make(path)
    policy = ["-p", "torch", "-o", "out.html"] if command == "backtest" else []
    assert expected in refusal(run(command, path, *policy, cwd=tmp_path))
    assert not (tmp_path / "out.html").exists()


def test_a_recommendation_is_reasons_and_code(tmp_path):
    with Recorder(tmp_path / "run.jsonl", writers=()) as recorder:
        for _ in range(300):
            recorder.record(scale=1024.0, applied=True, amax=0.25)
    result = run("recommend", "run.jsonl", cwd=tmp_path)
    reasons, _, code = check(result).partition("\n\n")
    assert reasons.startswith("- The largest gradient of the first 100 finite steps")
    names = {}
    with warnings.catch_warnings():
        # A scaler for a GPU, made where there is none, warns and is disabled.
        warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled")
        exec(code, names)  # noqa: S102  # that is what the code is for
    assert Dynamic(init_scale=2.0**16) == names["policy"]
    assert "note: No step overflowed" in result.stderr
    found = json.loads(
        check(run("recommend", "run.jsonl", "--format", "json", cwd=tmp_path))
    )
    assert "lossscale-recommendation/1" == found["format"]
    assert ("dynamic", 2.0**16) == (
        found["policy"]["kind"],
        found["policy"]["init_scale"],
    )
    assert code == found["code"]


def test_without_a_recommendation_it_says_why(tmp_path):
    record_run(tmp_path / "run.jsonl", 20)
    text = check(run("recommend", "run.jsonl", cwd=tmp_path))
    assert text.startswith("No recommendation.\nThe record is too short")
    found = json.loads(
        check(run("recommend", "run.jsonl", "--format", "json", cwd=tmp_path))
    )
    assert (None, "") == (found["policy"], found["code"])


ANNOUNCED = """
import signal

# A shell that starts the tests in the background has their processes ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

from lossscale.cli import main
from lossscale.diagnostics.backtests import backtest

one = backtest.run_one

def announced(*arguments, **keywords):
    print("next", flush=True)
    return one(*arguments, **keywords)

backtest.run_one = announced
main()
"""


def test_an_interrupt_ends_it_and_leaves_nothing(recorded, tmp_path):
    # Policies that take their steps one by one: minutes without the ^C.
    policies = [f"-plog_max:window={n}" for n in range(2, 2_000)]
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED, "backtest", recorded, "-oo.html", *policies],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "next\n" == process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=HANG_SECONDS)
    assert "Aborted!" in errors
    assert len(rest.splitlines()) < len(policies) / 2
    assert 0 != process.returncode
    assert not list(tmp_path.iterdir())


def test_policies_that_hold_a_rule_are_written_with_settings_of_both():
    expected = {
        "headroom:margin=2,init_scale=1024": Headroom(
            Dynamic(init_scale=1024.0), margin=2.0
        ),
        "log_max:window=50,growth_interval=7": LogMax(
            Dynamic(growth_interval=7), window=50
        ),
        "histogram:period=3": Histogram(period=3),
        "saturation:edge=448": Saturation(edge=448.0),
        "overflow_rate:tolerance=0.2": OverflowRate(tolerance=0.2),
        "window_follows_scale:init_scale=8": WindowFollowsScale(
            Dynamic(
                init_scale=8.0, growth_interval=256, min_scale=2.0**-5, at_min="hold"
            )
        ),
        "rising_floor:floors=5:2+20:2**6": RisingFloor(floors=((5, 2.0), (20, 64.0))),
    }
    for text, policy in expected.items():
        assert policy == parse_policy(text)
    with pytest.raises(LossScaleError, match="window"):
        parse_policy("headroom:window=2.5")
