"""`lossscale simulate`: its steps, what it says about their worth, and ^C."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers.limits import HANG_SECONDS
from helpers.processes import run_process

COMMAND = [sys.executable, "-m", "lossscale", "simulate"]


def run(*arguments, given=None):
    return run_process(
        [*COMMAND, *arguments],
        input=given,
    )


def simulated(*arguments, **keywords):
    """Return the rows and the remarks of a command that must have succeeded."""
    result = run(*arguments, "--json", **keywords)
    if result.returncode:
        raise AssertionError(result.stderr)
    return json.loads(result.stdout), " ".join(result.stderr.split())


def test_a_default_run_of_a_million_steps_does_not_end_at_the_floor_without_a_word():
    (row,), remark = simulated("--steps", 1_000_000)
    assert 2.0**-126 == row["lowest"]
    assert "reached its lowest scale" in remark
    assert "--rate" in remark
    assert "--file" in remark


def test_a_run_that_drifts_up_to_the_cap_says_so():
    arguments = ("-p", "dynamic:growth_interval=2,max_scale=2**20", "--rate", "0.01")
    (row,), remark = simulated(*arguments)
    assert 2.0**20 == row["highest"]
    assert "reached its highest scale" in remark


def test_a_run_between_its_bounds_says_nothing():
    assert "" == simulated("--steps", 5000)[1]


def test_several_policies_at_the_floor_are_one_remark():
    sweep = ("--sweep", "growth_interval=2000:4000:9", "--steps", 200_000)
    rows, remark = simulated(*sweep)
    assert {2.0**-126} == {row["lowest"] for row in rows}
    assert 1 == remark.count("note:")
    assert "and 6 more" in remark


def test_a_file_without_magnitudes_says_what_the_answer_is_worth(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text("true\nfalse\ntrue\n", encoding="utf-8")
    rows, remark = simulated("--file", file)
    assert 1 == rows[0]["skipped"]
    assert "note:" in remark
    assert '"magnitude"' in remark
    assert "whatever the scale" in remark


def recorded(magnitudes, finite=None):
    flags = [True] * len(magnitudes) if finite is None else finite
    steps = zip(flags, magnitudes, strict=True)
    return "".join(
        json.dumps({"finite": flag, "magnitude": value}) + "\n" for flag, value in steps
    )


def test_recorded_magnitudes_decide_which_steps_overflow(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text(recorded([0.5] * 600), encoding="utf-8")
    policies = ("-p", "megatron", "-p", "torch", "-p", "fixed:65536", "-p", "fixed:2e5")
    rows, remark = simulated("--file", file, *policies)
    # 0.5 * 65,536 is finite in float16; 2**32 must come down to 2**16.
    assert [17, 0, 0, 600] == [row["skipped"] for row in rows]
    assert [65536.0, 65536.0] == [row["final"]["scale"] for row in rows[:2]]
    assert "" == remark


def test_the_dtype_of_the_gradients_can_be_another(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text(recorded([0.5] * 10), encoding="utf-8")
    arguments = ("--file", file, "-p", "megatron", "--dtype", "bfloat16")
    assert 0 == simulated(*arguments)[0][0]["skipped"]


def test_a_file_with_some_magnitudes_says_how_many_steps_are_replayed(tmp_path):
    file = tmp_path / "steps.jsonl"
    lines = recorded([0.5] * 7) + 'false\n{"finite": false, "scale": 65536}\n'
    file.write_text(lines, encoding="utf-8")
    _, remark = simulated("--file", file, "-p", "fixed:1024")
    assert "1 of 9 steps" in remark
    assert "1 overflow " in remark


READERS = ("headroom", "saturation", "log_max", "histogram")


def test_policies_that_read_magnitudes_say_that_only_their_rule_ran():
    names = ("dynamic", *READERS, "overflow_rate", "auto_start")
    policies = [part for name in names for part in ("-p", name)]
    rows, remark = simulated("--steps", 5000, "--rate", 0.01, *policies)
    plain, *others = [{**row, "policy": None} for row in rows]
    assert [plain] * len(READERS) == others[: len(READERS)]
    words = (
        "note: headroom, saturation, log_max and histogram read magnitudes, and these "
        "steps have none: only their rule ran, and their rows are what a plain Dynamic "
        "does."
    )
    assert words in remark
    assert "note: auto_start sets its start from a magnitude" in remark
    assert "overflow_rate" not in remark


def test_a_trace_says_it_too():
    rows, remark = simulated("--finite", "1011", "-p", "headroom", "--trace")
    # What it remembers besides is not a column.
    assert {"policy", "step", "finite", "scale", "good_steps", "bad_steps"} == {
        *rows[0]
    }
    assert "headroom reads magnitudes, and these steps have none" in remark
    assert "" == simulated("--finite", "1011", "--trace")[1]


def test_a_step_without_a_magnitude_is_left_to_the_rule(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text(recorded([0.5] * 7) + "true\n", encoding="utf-8")
    _, remark = simulated("--file", file, "-p", "headroom")
    assert "in finite steps without one, only its rule ran" in remark
    file.write_text(recorded([0.5] * 7), encoding="utf-8")
    assert "" == simulated("--file", file, "-p", "headroom")[1]


def test_a_policy_with_an_edge_says_that_a_file_has_no_fractions(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text(recorded([0.5] * 7), encoding="utf-8")
    _, remark = simulated("--file", file, "-p", "histogram", "-p", "headroom")
    assert "histogram reads the fraction of values above its edge" in remark
    assert "headroom" not in remark


def test_a_trace_follows_the_magnitudes(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_text(recorded([1.0] * 3), encoding="utf-8")
    arguments = ("--file", file, "-p", "dynamic:init_scale=2**17", "--trace")
    rows, _ = simulated(*arguments)
    assert [False, False, True] == [row["finite"] for row in rows]


def test_steps_are_read_from_a_pipe():
    rows, _ = simulated("--file", "-", given="\ufefftrue\nfalse\n")
    assert (2, 1) == (rows[0]["steps"], rows[0]["skipped"])


def test_a_line_of_a_pipe_that_cannot_be_read_is_named():
    result = run("--file", "-", given="true\nmaybe\n")
    assert 2 == result.returncode
    assert "The standard input, line 2" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--finite", "101", "--steps", "5"),
        ("--finite", "101", "--rate", "0.1"),
        ("--finite", "101", "--seed", "1"),
        ("--finite", "101", "--file", "-"),
        ("--file", "-", "--steps", "5"),
        ("--finite", "101", "--file", "-", "--rate", "0.1"),
        ("--trace", "--chart"),
        ("--chart", "--json"),
    ],
    ids=" ".join,
)
def test_options_that_exclude_each_other_are_refused(arguments):
    result = run(*arguments, given="true\n")
    assert (2, "") == (result.returncode, result.stdout)
    (error,) = [x for x in result.stderr.splitlines() if x.startswith("Error: ")]
    named = [word for word in arguments if word.startswith("--")]
    assert all(name in error for name in named[:2])


@pytest.mark.parametrize("others", [(), ("--finite", "101")])
def test_a_dtype_without_magnitudes_is_refused(others):
    result = run("--dtype", "float16", *others)
    assert 2 == result.returncode
    assert "--file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        (["-p", "pytorch"], "'torch'"),
        (["-p", "torch:growth_intervall=3"], "'growth_interval'"),
        (["--sweep", "hysterisis=1,2"], "'hysteresis'"),
        (["--polciy", "torch"], "'--policy'"),
    ],
)
def test_a_name_that_is_nearly_right_is_asked_about(arguments, question):
    result = run(*arguments)
    assert 2 == result.returncode
    assert f"Did you mean {question}?" in result.stderr


def test_a_random_sequence_is_numpys_in_pieces_or_not():
    from lossscale.cli.sequences import random_flags

    expected = np.random.default_rng(3).random(5000) >= 0.1
    assert expected.tolist() == random_flags(5000, 0.1, 3, piece=7).tolist()


ANNOUNCED = """
import signal

# A shell that starts the tests in the background has their processes ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

from lossscale.cli import main
from lossscale.diagnostics import simulation

compiled = simulation._compile_loop

def announced():
    runner = compiled()
    def run(limits, *others):
        print(len(limits), flush=True)
        return runner(limits, *others)
    return run

simulation._compile_loop = announced
main()
"""


def test_an_interrupt_ends_a_long_simulation_after_a_piece_of_it():
    pytest.importorskip("numba", reason="numba is not installed")
    arguments = ["simulate", "--steps", "50000000", "--sweep", "hysteresis=1:999:999"]
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The second piece: the first is compiled before it runs.
    sizes = [int(process.stdout.readline()) for _ in range(2)]
    os.kill(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=HANG_SECONDS)
    sizes += [int(line) for line in rest.split()]
    assert "Aborted!" in errors
    # Of the thousands of pieces those have run that came before the signal did.
    assert max(sizes) <= 2**20
    assert len(sizes) < 999 * 48
    assert 0 != process.returncode


def test_without_numba_a_long_simulation_is_a_remark_and_no_warning():
    program = (
        "import sys; sys.modules['numba'] = None;"
        "from lossscale.diagnostics import simulation; simulation.WORTH_COMPILING = 9;"
        "sys.argv[1:] = ['simulate', '--steps', '99'];"
        "from lossscale.cli import main; main()"
    )
    result = run_process(
        [sys.executable, "-c", program],
        check=True,
    )
    assert result.stderr.startswith("note: numba is not installed")
    assert "RuntimeWarning" not in result.stderr
