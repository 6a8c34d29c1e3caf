"""The command, run as a person or a script would: in a process of its own."""

import json
import os
import pty
import subprocess
import sys

import pytest
from helpers.limits import HANG_SECONDS
from helpers.processes import run_process
from helpers.terminals import read_all, seen_on_a_terminal

from lossscale import Dynamic, presets, to_portable

COMMAND = [sys.executable, "-m", "lossscale"]


def run(*arguments, cwd=None, given=None):
    return run_process(
        [*COMMAND, *arguments],
        cwd=cwd,
        input=given,
    )


def check(result):
    """Return stdout of a command that must have succeeded quietly."""
    if result.returncode or "Traceback" in result.stderr:
        raise AssertionError(result.stderr)
    return result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--policy", "pytorch"),
        ("simulate", "--policy", "torch:growth_interval=0"),
        ("simulate", "--policy", "torch:interval=3"),
        ("simulate", "--policy", "torch:growth_factor=big"),
        ("simulate", "--policy", "torch:growth_factor"),
        ("simulate", "--policy", "fixed:0"),
        ("simulate", "--sweep", "growth_interval"),
        ("simulate", "--finite", "10a"),
        ("simulate", "--finite", "1", "--file", __file__),
        ("simulate", "--file", __file__),
        ("simulate", "--file", "none.jsonl"),
        ("simulate", "--rate", "2"),
        ("simulate", "--steps", "0"),
        ("simulate", "--steps", "99999999999999"),
        ("simulate", "--steps", "99999999999999999999"),
        ("simulate", "--rate", "nan"),
        (
            *("simulate", "--sweep", "growth_interval=1:9999:9999"),
            *("--sweep", "hysteresis=1:9999:9999"),
        ),
        ("simulate", "--trace", "--steps", "20000"),
        ("presests",),
        ("simulate", "--seed", "-1"),
        ("simulate", "-p", "fixed:0**-1"),
        ("simulate", "-p", "dynamic:growth_interval=-2**0.5"),
        ("simulate", "--sweep", "growth_interval=1:2:nan"),
        ("simulate", "--sweep", "growth_interval=1:inf:3"),
        ("simulate", "--sweep", "growth_interval=1:2:0"),
        ("demo", "--seed", "-1"),
        ("demo", "-o", "no/such/folder/x.png"),
        ("demo", "-o", "x.foo"),
        ("demo", "-o", "x.png", "--json"),
        ("presets", "pytorch"),
        ("convert", "none.json", "--to", "torch"),
        ("convert", __file__, "--to", "torch"),
        ("demo", "--policy", "pytorch"),
        ("demo", "--steps", "0"),
        ("train",),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_status_2(arguments):
    result = run(*arguments)
    assert 2 == result.returncode
    assert "" == result.stdout
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_cannot_be_used_is_one_message_and_status_2(tmp_path):
    latin, digits = tmp_path / "latin.jsonl", tmp_path / "digits.jsonl"
    latin.write_bytes(b"\xff\xfe\n")
    digits.write_text("9" * 5000 + "\n", encoding="utf-8")
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000 + "\n", encoding="utf-8")
    good = tmp_path / "good.json"
    good.write_text(json.dumps(to_portable(Dynamic(), Dynamic().init())))
    for arguments in (
        ("simulate", "--file", str(latin)),
        ("simulate", "--file", str(digits)),
        ("simulate", "--file", str(deep)),
        ("convert", str(good), "--to", "torch", "-o", ""),
        ("convert", str(digits), "--to", "torch"),
        ("convert", str(good), "--to", "torch", "-o", str(tmp_path / "no" / "x.json")),
        ("convert", str(good), "--to", "torch", "--policy", "torch"),
    ):
        result = run(*arguments)
        assert 2 == result.returncode
        assert "Error: " in result.stderr
        assert "Traceback" not in result.stderr


def test_a_chart_falls_back_to_plain_characters():
    result = run_process(
        [*COMMAND, "simulate", "--steps", "300", "--chart"],
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
        text=False,
    )
    assert result.stdout.decode("ascii").count("|") > 10


def test_every_command_has_help():
    listed = check(run("--help"))
    for command in ("demo", "simulate", "presets", "convert", "doctor"):
        assert command in listed
        assert "Usage:" in check(run(command, "--help"))


def test_a_given_sequence_is_traced_step_by_step():
    out = check(
        run("simulate", "--finite", "1101", "-p", "dynamic:growth_interval=2",
            "--trace", "--json")
    )  # fmt: skip
    rows = json.loads(out)
    assert [65536.0, 131072.0, 65536.0, 65536.0] == [row["scale"] for row in rows]
    assert [True, True, False, True] == [row["finite"] for row in rows]


def test_a_file_of_steps_is_read(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text('true\n{"finite": false, "loss": 3.5}\n\nfalse\n', encoding="utf-8")
    (row,) = json.loads(check(run("simulate", "--file", str(file), "--json")))
    assert (3, 2, 16384.0) == (row["steps"], row["skipped"], row["final"]["scale"])


def test_a_sweep_tries_every_combination():
    out = check(
        run("simulate", "-p", "torch", "--sweep", "growth_interval=10:30:3",
            "--sweep", "hysteresis=1,2", "--steps", "100", "--json")
    )  # fmt: skip
    names = [row["policy"] for row in json.loads(out)]
    assert 6 == len(set(names))
    assert "torch:growth_interval=20,hysteresis=2" in names


def test_the_summary_of_a_given_sequence_is_exact():
    (row,) = json.loads(
        check(run("simulate", "--finite", "11010", "-p", "dynamic:growth_interval=2",
                  "--json"))
    )  # fmt: skip
    assert (5, 2, 1, 2) == (
        row["steps"],
        row["skipped"],
        row["growths"],
        row["backoffs"],
    )
    assert (32768.0, 131072.0) == (row["lowest"], row["highest"])
    assert {"scale": 32768.0, "good_steps": 0, "bad_steps": 0} == row["final"]
    assert [0, 1, 2, 3, 4, 5] == row["trajectory"]["steps"]
    expected = [65536.0, 65536.0, 131072.0, 65536.0, 65536.0, 32768.0]
    assert expected == row["trajectory"]["scales"]


@pytest.mark.parametrize(("rate", "skipped"), [("0", 0), ("1", 500)])
def test_the_rate_is_the_share_of_overflows(rate, skipped):
    arguments = ("simulate", "--steps", "500", "--rate", rate, "--json")
    (row,) = json.loads(check(run(*arguments)))
    assert skipped == row["skipped"]


def test_numbers_are_written_for_people():
    from lossscale.cli.output import number

    written = [number(value) for value in (65536.0, 2.0**-21, 2.0**40, 0.5, 3.4e38)]
    assert ["65,536", "2^-21", "2^40", "0.5", "3.4e+38"] == written


def test_a_random_sequence_is_the_same_for_the_same_seed():
    arguments = ("simulate", "--steps", "500", "--rate", "0.1", "--json")
    first = check(run(*arguments))
    assert first == check(run(*arguments))
    assert first != check(run(*arguments, "--seed", "1"))


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["presests"], "'presets'"),
        (["presets", "pytorch"], "'torch'"),
        (["demo", "--polcy", "torch"], "'--policy'"),
    ],
)
def test_a_name_that_is_nearly_right_is_asked_about(arguments, question):
    assert f"Did you mean {question}?" in run(*arguments).stderr


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_shows_every_name_of_a_preset_whole(columns):
    shown = seen_on_a_terminal(columns, "presets")
    for name in presets.PRESETS:
        assert 3 <= sum(line.startswith(f"{name} ") for line in shown)
    assert "…" not in "".join(shown)
    # The name of an original is one long word, which a terminal breaks by itself.
    assert columns >= max(len(line) for line in shown if len(line.split()) > 1)


def test_a_table_in_a_pipe_is_not_cut():
    out = check(run("presets"))
    for name, preset in presets.PRESETS.items():
        assert name in out
        assert preset.source in out
    assert "…" not in out


def test_presets_in_json_are_those_of_the_package():
    everything = json.loads(check(run("presets", "--json")))
    assert list(presets.PRESETS) == list(everything)
    assert 1000 == everything["megatron"]["policy"]["growth_interval"]


def test_a_chart_is_drawn_for_each_policy():
    out = check(run("simulate", "-p", "torch", "-p", "fixed:1024", "--chart"))
    assert 2 == out.count("log2 of the scale")
    # The axis of a fixed scale of 2**10 has a 10 and no 1024.
    fixed = out.partition("fixed:1024")[2].partition("\n")[2]
    assert " 10\n" in fixed
    assert "1024" not in fixed.replace("1,024", "1024")


def test_a_state_is_converted_from_a_pipe_and_losses_are_printed(tmp_path):
    policy = presets.get("deepspeed")
    portable = json.dumps(to_portable(policy, policy.init()))
    result = run("convert", "-", "--to", "torch", given=portable)
    assert 65536.0 == json.loads(check(result))["scale"]
    assert "not kept: hysteresis is 2 here" in result.stderr
    target = tmp_path / "torch.json"
    source = tmp_path / "portable.json"
    source.write_text(portable, encoding="utf-8")
    out = check(run("convert", str(source), "--to", "torch", "-o", str(target)))
    assert "" == out
    back = json.loads(check(run("convert", str(target), "--to", "lossscale")))
    assert "lossscale/1" == back["format"]


def test_settings_that_a_state_does_not_hold_can_be_given():
    state = json.dumps({"scale": 8.0, "growth_tracker": 1, "hysteresis_tracker": 3})
    arguments = (
        "convert",
        "-",
        "--to",
        "lossscale",
        "--policy",
        "megatron:hysteresis=4",
    )
    converted = json.loads(check(run(*arguments, given=state)))
    assert {"scale": 8.0, "good_steps": 1, "bad_steps": 1} == converted["state"]


def test_the_demo_tells_and_draws(tmp_path):
    out = check(run("demo", "--steps", "3", cwd=tmp_path))
    for name in ("float32", "no scaling", "fixed scale", "dynamic scale"):
        assert name in out
    picture = tmp_path / "lossscale-demo.png"
    assert str(picture) in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_takes_a_policy_a_seed_and_json(tmp_path):
    out = check(
        run("demo", "--steps", "3", "--seed", "4", "--policy", "fixed:64", "--json",
            cwd=tmp_path)
    )  # fmt: skip
    assert [1.0, 1.0, 4096.0, 64.0] == [row["final_scale"] for row in json.loads(out)]
    assert [] == list(tmp_path.iterdir())


def test_the_version_is_printed():
    from importlib.metadata import version

    assert version("lossscale") in check(run("--version"))


@pytest.mark.parametrize(
    "arguments",
    # More than a pipe holds (64 KiB), and less.
    [("simulate", "--trace", "--steps", "2000"), ("presets",)],
    ids=" ".join,
)
def test_a_reader_that_goes_away_is_no_error(arguments):
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=HANG_SECONDS)
    assert (b"", 0) == (errors, process.returncode)


def test_a_terminal_sees_a_progress_bar_and_a_pipe_does_not(tmp_path):
    arguments = [*COMMAND, "demo", "--steps", "40", "--json"]
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=follower, cwd=tmp_path,
        env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(follower)
    shown = read_all(leader)
    json.loads(process.stdout.read())
    process.stdout.close()
    process.wait(timeout=HANG_SECONDS)
    assert b"training" in shown
    assert "training" not in run("demo", "--steps", "2", "--json").stderr


def test_without_its_packages_the_command_says_what_to_type():
    program = (
        "import sys; sys.modules['click'] = None; import lossscale.cli as c; c.main()"
    )
    result = run_process([sys.executable, "-c", program])
    assert 2 == result.returncode
    assert "pip install 'lossscale[cli]'" in result.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("numpy", ["simulate"], "cli"),
        ("numpy", ["demo"], "numpy"),
        ("uniplot", ["simulate", "--chart"], "cli"),
        ("packaging", ["doctor", "click"], "cli"),
        ("matplotlib", ["demo"], "plot"),
    ],
)
def test_without_a_package_a_command_says_what_to_type(package, arguments, extra):
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {arguments!r};"
        "from lossscale.cli import main; main()"
    )
    result = run_process([sys.executable, "-c", program])
    assert 2 == result.returncode
    assert f"pip install 'lossscale[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_policies_as_text():
    from lossscale.cli.policies import parse_policy

    assert Dynamic() == parse_policy("dynamic")
    expected = presets.get(
        "torch", init_scale=2.0**10, consecutive_overflows=True, at_max="clamp"
    )
    assert expected == parse_policy(
        "torch:init_scale=2**10,consecutive_overflows=yes,at_max=clamp"
    )
    assert 1024.0 == parse_policy("fixed:1024").scale
    assert 64.0 == parse_policy("fixed:scale=64").scale
