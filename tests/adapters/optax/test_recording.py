"""Steps of `loss_scaled` recorded from the optimizer's states before and after."""

import jax
import jax.numpy as jnp
import optax
import pytest

import lossscale.optax as ls
from lossscale import Dynamic, Signal
from lossscale.diagnostics import Recorder, read_run

POLICY = Dynamic(init_scale=1024.0)
VALUES = (1.0, float("inf"), 1.0, float("nan"))


@pytest.mark.parametrize("chained", [False, True])
def test_steps_are_recorded_from_the_states_of_the_optimizer(tmp_path, chained):
    optimizer = ls.loss_scaled(optax.sgd(0.1), POLICY)
    if chained:
        optimizer = optax.chain(optimizer, optax.ema(0.9))
    weight = jnp.float32(2.0)
    after = optimizer.init(weight)
    step = jax.jit(optimizer.update)
    with Recorder(tmp_path / "run.jsonl", policy=POLICY) as recorder:
        for value in VALUES:
            before = after
            _, after = step(jnp.float32(value), before, weight)
            (state,) = ls.find_states(after)
            signal = Signal(state.last_finite, too_large=state.last_too_large)
            recorder.record_signal(ls.get_scale_state(before), signal, loss=2.5)
    records = list(read_run(tmp_path / "run.jsonl").records())
    assert [True, False, True, False] == [record.applied for record in records]
    assert [1024.0, 1024.0, 512.0, 512.0] == [record.scale for record in records]
    assert [2.5] * 4 == [record.loss for record in records]


def test_a_gradient_that_cannot_be_squared_is_recorded_as_headroom(tmp_path):
    optimizer = ls.loss_scaled(optax.adam(0.1), POLICY)
    weight = jnp.float32(2.0)
    before = optimizer.init(weight)
    _, after = optimizer.update(jnp.float32(1e30), before, weight)
    with Recorder(tmp_path / "run.jsonl", policy=POLICY) as recorder:
        signal = Signal(after.last_finite, too_large=after.last_too_large)
        recorder.record_signal(before.scale_state, signal)
    (record,) = read_run(tmp_path / "run.jsonl").records()
    assert (False, "headroom") == (record.applied, record.cause)
