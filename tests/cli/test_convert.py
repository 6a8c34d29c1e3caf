"""`lossscale convert`: the files that it reads, and what it says where it cannot."""

import json
import pickle
import sys

import pytest
from helpers.processes import run_process

from lossscale import Dynamic, presets, to_portable

torch = pytest.importorskip("torch", reason="torch is not installed")

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 17,
}


def run(*arguments, given=None, before=""):
    """Run the command; `before` is what the process does first."""
    program = f"{before}\nfrom lossscale.cli import main; main()"
    return run_process(
        [sys.executable, "-c", program, "convert", *arguments],
        input=given,
        text=False,
    )


def converted(*arguments, **keywords):
    result = run(*arguments, **keywords)
    if result.returncode:
        raise AssertionError(result.stderr.decode())
    return json.loads(result.stdout)


def refusal(*arguments, **keywords):
    """Return the error of a command that must have failed with one."""
    result = run(*arguments, **keywords)
    text = result.stderr.decode()
    if (2, b"") != (result.returncode, result.stdout) or "Traceback" in text:
        raise AssertionError(text)
    return text


@pytest.fixture
def saved(tmp_path):
    """Return a file that torch.save made of a scaler's state."""
    target = tmp_path / "scaler.pt"
    torch.save(TORCH, target)
    return target


def test_a_file_of_torch_is_read(saved):
    assert 1024.0 == converted(saved, "--to", "keras")["dynamic_scale"]


def test_a_file_of_torch_is_read_from_a_pipe(saved):
    state = converted("-", "--to", "keras", given=saved.read_bytes())
    assert (1024.0, 17) == (state["dynamic_scale"], state["step_counter"])


def test_a_file_in_the_old_format_of_torch_is_read(tmp_path):
    target = tmp_path / "scaler.pt"
    torch.save(TORCH, target, _use_new_zipfile_serialization=False)
    assert 1024.0 == converted(target, "--to", "keras")["dynamic_scale"]


def test_a_state_of_tensors_is_read(tmp_path):
    target = tmp_path / "scaler.pt"
    torch.save(TORCH | {"scale": torch.tensor(8.0)}, target)
    assert 8.0 == converted(target, "--to", "keras")["dynamic_scale"]


def test_without_torch_a_file_of_torch_is_refused_with_what_to_type(saved):
    text = refusal(
        saved, "--to", "keras", before="import sys; sys.modules['torch'] = None"
    )
    assert "pip install 'lossscale[torch]'" in text
    assert "codec" not in text


class Harmful:
    def __reduce__(self):
        return (print, ("this ran",))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_is_not_executed(tmp_path, protocol):
    target = tmp_path / "scaler.pt"
    target.write_bytes(pickle.dumps(Harmful(), protocol=protocol))
    assert "this ran" not in refusal(target, "--to", "keras")


def test_a_file_of_torch_that_executes_something_is_refused(tmp_path):
    target = tmp_path / "scaler.pt"
    torch.save({"scale": Harmful()}, target)
    text = refusal(target, "--to", "keras")
    assert "this ran" not in text
    assert "scaler.pt" in text


def test_a_file_that_is_neither_text_nor_torchs_is_refused_in_words(tmp_path):
    target = tmp_path / "scaler.bin"
    target.write_bytes(b"\xff\xfe\xfd\xfc" * 9)
    text = refusal(target, "--to", "keras")
    assert "codec" not in text
    assert "JSON" in text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_read(tmp_path, encoding):
    target = tmp_path / "state.json"
    target.write_text(json.dumps(TORCH), encoding=encoding)
    assert 1024.0 == converted(target, "--to", "keras")["dynamic_scale"]
    piped = converted("-", "--to", "keras", given=target.read_bytes())
    assert 1024.0 == piped["dynamic_scale"]


@pytest.mark.parametrize("collapsed", [0.0, float("inf")])
def test_a_collapsed_scale_is_refused_with_a_way_out_that_works(collapsed):
    state = json.dumps(TORCH | {"scale": collapsed}).encode()
    assert "--scale" in refusal("-", "--to", "keras", given=state)
    again = converted("-", "--to", "keras", "--scale", "2**10", given=state)
    assert 1024.0 == again["dynamic_scale"]


@pytest.mark.parametrize(
    "state",
    [
        {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 1}},
        {"loss_scale": 0.0, "counter": 0},
        {"scale": 0.0, "fin_steps": 0},
        {"dynamic_scale": 0.0, "step_counter": 0},
        {"current_loss_scale": 0.0, "good_steps": 0},
        {"cur_scale": 0.0, "cur_iter": 1, "last_overflow_iter": 0},
        {"scale": 0.0, "growth_tracker": 0, "hysteresis_tracker": 2},
    ],
    ids=["apex", "jmp", "flax", "keras", "tensorflow", "deepspeed", "megatron"],
)
def test_every_library_has_the_way_out(state):
    given = json.dumps(state).encode()
    assert "--scale" in refusal("-", "--to", "lossscale", given=given)
    again = converted("-", "--to", "lossscale", "--scale", "8", given=given)
    assert 8.0 == again["state"]["scale"]


def test_a_way_out_that_would_not_work_is_not_named():
    state = json.dumps(TORCH | {"growth_interval": 0}).encode()
    assert "--scale" not in refusal("-", "--to", "keras", given=state)


def test_the_scale_of_our_own_state_can_be_replaced():
    state = json.dumps(to_portable(Dynamic(), Dynamic().init())).encode()
    assert 4.0 == converted("-", "--to", "torch", "--scale", "4", given=state)["scale"]


def test_a_setting_that_the_state_holds_itself_is_not_ignored():
    given = json.dumps(TORCH).encode()
    policy = "torch:growth_interval=5,min_scale=2"
    text = refusal("-", "--to", "lossscale", "--policy", policy, given=given)
    assert "growth_interval" in text
    assert "min_scale" not in text


def test_a_setting_that_agrees_with_the_state_is_taken():
    given = json.dumps(TORCH).encode()
    policy = "torch:growth_interval=2000,min_scale=2"
    state = converted("-", "--to", "lossscale", "--policy", policy, given=given)
    assert 2.0 == state["policy"]["min_scale"]


def test_an_error_names_the_file_that_was_given(tmp_path):
    source = tmp_path / "state.json"
    source.write_text(json.dumps(TORCH), encoding="utf-8")
    target = tmp_path / "no" / "x.json"
    text = refusal(source, "--to", "keras", "-o", target)
    assert str(target) in text
    assert ".tmp" not in text


def test_a_name_that_is_nearly_right_is_asked_about(tmp_path):
    assert "Did you mean 'torch'?" in refusal("x.json", "--to", "tourch")
    assert "Did you mean '--output'?" in refusal("x.json", "--outptu", "y")


def test_settings_that_a_state_does_not_hold_come_from_the_preset():
    state = {"scale": 8.0, "growth_tracker": 1, "hysteresis_tracker": 2}
    out = converted("-", "--to", "lossscale", given=json.dumps(state).encode())
    expected = presets.get("megatron")
    assert to_portable(expected, expected.init())["policy"] == out["policy"]
