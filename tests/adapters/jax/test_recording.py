"""Steps recorded in JAX: on the host, and from inside `jit`."""

import jax
import jax.numpy as jnp
import pytest

import lossscale.jax as ls
from lossscale import Dynamic
from lossscale.diagnostics import Recorder, read_run, record_in_jit

POLICY = Dynamic(init_scale=1024.0)
VALUES = (1.0, float("inf"), 1.0, float("nan"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def run_step(recorder, state, value):
    scaled = {"w": jnp.asarray(value, jnp.float16)}
    _, signal = ls.unscale(scaled, state, measure=("nan", "amax", "norm"))
    recorder(state, signal)
    return ls.update(POLICY, state, signal)


def check(path):
    records = list(read_run(path).records())
    assert [True, False, True, False] == [record.applied for record in records]
    assert [None, "inf", None, "nan"] == [record.cause for record in records]
    assert [1024.0, 1024.0, 512.0, 512.0] == [record.scale for record in records]
    assert 1.0 / 1024.0 == pytest.approx(records[0].amax, rel=1e-5)  # six digits


def test_steps_are_recorded_on_the_host(path):
    with Recorder(path, policy=POLICY) as recorder:
        state = ls.init(POLICY)
        for value in VALUES:
            state = run_step(recorder.record_signal, state, value)
    check(path)


def test_steps_are_recorded_inside_jit(path):
    with Recorder(path, policy=POLICY) as recorder:

        def record(state, signal):
            record_in_jit(recorder, state, signal, loss=jnp.float32(2.5))

        step = jax.jit(lambda state, value: run_step(record, state, value))
        state = ls.init(POLICY)
        for value in VALUES:
            state = step(state, jnp.float32(value))
        jax.effects_barrier()
    check(path)
    assert 2.5 == next(read_run(path).records()).loss


def test_steps_of_a_scan_are_recorded_in_order(path):
    with Recorder(path, policy=POLICY) as recorder:

        def body(state, pair):
            index, value = pair

            def record(state, signal):
                record_in_jit(recorder, state, signal, step=index)

            return run_step(record, state, value), None

        pairs = (jnp.arange(1, 5), jnp.asarray(VALUES, jnp.float32))
        jax.jit(lambda state: jax.lax.scan(body, state, pairs))(ls.init(POLICY))
        jax.effects_barrier()
    check(path)


def test_without_a_recorder_jit_has_no_callback():
    def step(state, value):
        return run_step(lambda *_: None, state, value)

    text = str(jax.make_jaxpr(step)(ls.init(POLICY), jnp.float32(1.0)))
    assert "callback" not in text
