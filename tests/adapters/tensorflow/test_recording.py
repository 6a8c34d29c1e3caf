"""Steps recorded in TensorFlow, from eager tensors."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import lossscale.tensorflow as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.diagnostics import Recorder, read_run  # noqa: E402


def test_the_state_and_the_signal_are_a_step(tmp_path):
    policy = Dynamic(init_scale=1024.0)
    path = tmp_path / "run.jsonl"
    state = ls.init(policy)
    with Recorder(path, policy=policy) as recorder:
        for value in (1.0, float("inf"), 1.0):
            stored = [tf.constant(value, tf.float16)]
            _, signal = ls.unscale(stored, state, measure=("nan", "amax", "norm"))
            recorder.record_signal(state, signal, loss=tf.constant(2.5))
            state = ls.update(policy, state, signal)
    found = list(read_run(path).records())
    assert [True, False, True] == [record.applied for record in found]
    assert [1024.0, 1024.0, 512.0] == [record.scale for record in found]
    assert (2.5, 1.0 / 512.0) == pytest.approx((found[2].loss, found[2].amax), rel=1e-5)
