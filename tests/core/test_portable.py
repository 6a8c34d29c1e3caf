"""The portable form: JSON there and back, and one clear error for anything else."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from helpers.limits import HANG_SECONDS
from hypothesis import given
from hypothesis import strategies as st

from lossscale import Dynamic, Fixed, ScaleState, from_portable, presets, to_portable
from lossscale.core import portable
from lossscale.errors import StateError

POLICIES = [Fixed(8.0), Dynamic(), *(p.policy for p in presets.PRESETS.values())]


@pytest.mark.parametrize("policy", POLICIES)
def test_json_there_and_back(policy):
    scale = np.float32(1.7) * np.float32(3) if isinstance(policy, Dynamic) else 8.0
    state = ScaleState(scale, np.int32(17), np.int64(2))
    text = json.dumps(to_portable(policy, state), allow_nan=False)
    assert (policy, state) == from_portable(json.loads(text))


@given(
    st.floats(2.0**-126, 2.0**127, width=32),
    st.integers(0, 2**31 - 2),
    st.integers(0, 2**31 - 2),
)
def test_every_state_survives_to_the_last_bit(scale, good, bad):
    state = ScaleState(scale, good, bad)
    text = json.dumps(to_portable(Dynamic(), state))
    assert state == from_portable(json.loads(text))[1]


def example():
    return to_portable(Dynamic(), Dynamic().init())


def changed(**changes):
    """Return the example with parts replaced; None leaves a part out."""
    result = example()
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = result
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return result


MALFORMED = {
    "empty": {},
    "no format": changed(format=None),
    "foreign format": changed(format="safetensors"),
    "newer format": changed(format="lossscale/2"),
    "format of another type": changed(format=1),
    "no policy": changed(policy=None),
    "no state": changed(state=None),
    "further key": changed(more=1),
    "policy is a list": changed(policy=[1]),
    "state is a number": changed(state=3),
    "no kind": changed(policy__kind=None),
    "unknown kind": changed(policy__kind="adaptive"),
    "kind is a list": changed(policy__kind=["dynamic"]),
    "setting missing": changed(policy__growth_interval=None),
    "setting unknown": changed(policy__interval=3),
    "setting out of range": changed(policy__growth_factor=0.5),
    "setting of another type": changed(policy__hysteresis="2"),
    "scale missing": changed(state__scale=None),
    "scale zero": changed(state__scale=0.0),
    "scale negative": changed(state__scale=-8.0),
    "scale NaN": changed(state__scale=float("nan")),
    "scale infinite": changed(state__scale=float("inf")),
    "scale text": changed(state__scale="8"),
    "scale true": changed(state__scale=True),
    "scale without reciprocal": changed(state__scale=2.0**-140),
    "scale a list": changed(state__scale=[8.0]),
    "scale of 5,000 digits": changed(state__scale=10**5000),
    "counter of 5,000 digits": changed(state__good=10**5000),
    "older format": changed(format="lossscale/0"),
    "format of 5,000 digits": changed(format="lossscale/" + "9" * 5000),
    "counter negative": changed(state__good=-1),
    "counter fractional": changed(state__good=1.5),
    "counter true": changed(state__bad=True),
    "counter beyond int32": changed(state__good=2**31 - 1),
    "state with more": changed(state__step=3),
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_object_gives_one_clear_error(value):
    with pytest.raises(StateError) as caught:
        from_portable(value)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize("value", [None, 3, "lossscale/1", [example()]])
def test_something_that_is_no_object_gives_the_same(value):
    with pytest.raises(StateError, match="is an object"):
        from_portable(value)


def test_a_newer_format_says_what_to_type():
    with pytest.raises(StateError, match="pip install --upgrade lossscale"):
        from_portable(changed(format="lossscale/2"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_value_gives_anything_but_a_state_error(value):
    with pytest.raises(StateError):
        from_portable(value)


def test_a_state_that_could_never_move_again_is_refused():
    stuck = Dynamic(min_scale=1.0, at_min="hold", init_scale=8.0)
    with pytest.raises(StateError, match="could never move"):
        to_portable(stuck, ScaleState(0.25, 0, 0))
    with pytest.raises(StateError, match="fixed at"):
        to_portable(Fixed(8.0), ScaleState(99.0, 0, 0))
    with pytest.raises(StateError, match="A state is a ScaleState"):
        to_portable(Dynamic(), (8.0, 0, 0))


def test_a_policy_of_ones_own_cannot_be_written_and_says_so():
    class Own:
        def init(self):
            return ScaleState(1.0, 0, 0)

        def step(self, state, signal, *, where):
            del signal, where
            return state

    with pytest.raises(StateError, match="Own cannot be written"):
        to_portable(Own(), ScaleState(1.0, 0, 0))


def test_a_vector_of_scales_cannot_be_written():
    state = ScaleState(np.ones(3, np.float32), np.zeros(3, int), np.zeros(3, int))
    with pytest.raises(StateError, match="one number"):
        to_portable(Dynamic(), state)


def test_a_fixed_scale_that_is_no_float32_goes_there_and_back():
    import lossscale.numpy as ls

    policy = Fixed(0.1)
    again, state = from_portable(to_portable(policy, ls.init(policy)))
    assert policy == again
    assert ls.init(policy) == ls.init(again, state)


def test_files_go_there_and_back(tmp_path):
    path = tmp_path / "scaler.json"
    policy, state = Dynamic(growth_interval=7), ScaleState(4.0, 3, 1)
    portable.save(path, policy, state)
    assert (policy, state) == portable.load(path)
    assert [path] == list(tmp_path.iterdir())


def test_a_truncated_file_gives_one_clear_error(tmp_path):
    path = tmp_path / "scaler.json"
    portable.save(path, Dynamic(), Dynamic().init())
    whole = path.read_text(encoding="utf-8")
    for length in range(len(whole.rstrip())):
        path.write_text(whole[:length], encoding="utf-8")
        with pytest.raises(StateError):
            portable.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"3", b"\x80\x04\x95pickle", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "list", "number", "pickle", "not utf-8", "deep"],
)
def test_a_foreign_file_gives_one_clear_error(tmp_path, content):
    path = tmp_path / "scaler.json"
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"scaler\.json"):
        portable.load(path)


def test_a_file_that_is_not_there_gives_one_clear_error(tmp_path):
    with pytest.raises(StateError, match="No such file"):
        portable.load(tmp_path / "none.json")


def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "scaler.json"
    portable.save(path, Dynamic(), ScaleState(4.0, 3, 1))
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        portable.save(path, Dynamic(), ScaleState(8.0, 0, 0))
    assert before == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())


def test_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    portable.save(real, Dynamic(), Dynamic().init())
    link.symlink_to(real)
    portable.save(link, Dynamic(), ScaleState(8.0, 0, 0))
    assert link.is_symlink()
    assert 8.0 == portable.load(real)[1].scale


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    portable.save(pipe, Dynamic(), Dynamic().init())
    text = reader.communicate(timeout=HANG_SECONDS)[0]
    assert "lossscale/1" == json.loads(text)["format"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"directory|file"):
        portable.save(name, Dynamic(), Dynamic().init())
    assert [] == list(tmp_path.iterdir())


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "scaler.json"
    portable.save(path, Dynamic(), Dynamic().init())
    path.chmod(0o640)
    portable.save(path, Dynamic(), Dynamic().init())
    assert 0o640 == path.stat().st_mode & 0o777


def test_the_new_file_is_written_next_to_the_old_one(tmp_path, monkeypatch):
    """Only a rename within one file system is atomic."""
    seen = []
    original = os.fsync

    def watch(descriptor):
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    path = tmp_path / "scaler.json"
    portable.save(path, Dynamic(), Dynamic().init())
    ((temporary,),) = seen
    assert temporary.startswith(".scaler.json.")


def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path):
    path = tmp_path / "scaler.json"
    program = textwrap.dedent(
        f"""
        from lossscale import Dynamic, ScaleState
        from lossscale.core import portable
        for number in range(10**9):
            portable.save({str(path)!r}, Dynamic(), ScaleState(8.0, number, number))
        """
    )
    for attempt in range(8):
        path.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", program])
        deadline = time.monotonic() + HANG_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, state = portable.load(path)
        assert state.good_steps == state.bad_steps
