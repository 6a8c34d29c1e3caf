"""jmp's and flax's scalers and their presets, the rule under jit, their states."""

import random
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from helpers.rules import run_rule  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.traces import check_equal_while, replay  # noqa: E402

from lossscale import ScaleState, presets  # noqa: E402
from lossscale.convert import from_library, to_library  # noqa: E402
from lossscale.core.validation import SMALLEST_NORMAL  # noqa: E402


@pytest.mark.parametrize("compiled", [False, True])
def test_the_rule_runs_on_jax_arrays(compiled):
    run_rule(
        array=jnp.asarray,
        dtypes=(jnp.dtype("float32"), jnp.dtype("int32")),
        where=jnp.where,
        compile_rule=jax.jit if compiled else None,
    )


def test_the_preset_takes_jmps_steps():
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")
    rng = random.Random(2)

    @partial(jax.jit, static_argnums=(2, 3))
    def compiled(first, flags, factor, period):
        # jmp loses any floor but 1 under jit, so 1 is what can be compared.
        made = jmp.DynamicLossScale(first, jnp.int32(0), period=period, factor=factor)

        def step(scaler, finite):
            after = scaler.adjust(finite)
            return after, (after.loss_scale, after.counter)

        return jax.lax.scan(step, made, flags)[1]

    def eager(first, flags, factor, period):
        scaler = jmp.DynamicLossScale(first, jnp.int32(0), period=period, factor=factor)
        states = []
        for flag in flags:
            scaler = scaler.adjust(flag)
            states.append((scaler.loss_scale, scaler.counter))
        return zip(*states, strict=True)

    # Under jit XLA multiplies by the reciprocal of a constant divisor: by 3 that is
    # another number, so 3 is compared without jit, on shorter sequences.
    plans = [(compiled, f, p, 64) for f in (2, 4) for p in (1, 2, 3, 5, 10)]
    plans += [(eager, 3, p, 12) for p in (1, 2, 3, 5)]
    for run, factor, period, length in plans:
        for _ in range(75):
            config = draw(rng, init_scale=(1.0, 3.0, 7.3, 2.0**15, 1e30, 3e38))
            flags = overflow_pattern(rng, length)
            first = jnp.float32(config["init_scale"])
            scales, counters = run(first, jnp.array(flags), factor, period)
            expected = list(zip(map(float, scales), map(int, counters), strict=True))
            policy = presets.get(
                "jmp",
                growth_factor=float(factor),
                backoff_divisor=float(factor),
                growth_interval=period,
                **config,
            )
            actual = [(s.scale, s.good_steps) for s in replay(policy, flags)]
            check_equal_while(expected, actual, lambda _: True, (factor, period))


def flax_scale():
    module = pytest.importorskip(
        "flax.training.dynamic_scale", reason="flax is not installed"
    )
    return module.DynamicScale


def test_the_preset_takes_flaxs_steps():
    dynamic_scale = flax_scale()
    rng = random.Random(3)

    @jax.jit
    def step(scaler, finite):
        # flax decides from the gradients that it computes: make them 1 or infinite.
        loss = scaler.value_and_grad(lambda w: w * jnp.where(finite, 1.0, jnp.inf))
        after, _, _, _ = loss(jnp.float32(1.0))
        return after

    @jax.jit
    def run(scaler, flags):
        def body(carry, flag):
            after = step(carry, flag)
            return after, (after.scale, after.fin_steps)

        return jax.lax.scan(body, scaler, flags)[1]

    for growth, backoff in ((2.0, 0.5), (1.7, 0.8), (4.0, 0.25)):
        for interval in (1, 2, 3, 5):
            for _ in range(84):
                config = draw(rng, init_scale=(1.0, 3.0, 65536.0, 1e-30, 2.0**120))
                flags = overflow_pattern(rng, 64)
                scaler = dynamic_scale(
                    growth_factor=growth,
                    backoff_factor=backoff,
                    growth_interval=interval,
                    fin_steps=jnp.int32(0),
                    scale=jnp.float32(config["init_scale"]),
                )
                scales, steps = run(scaler, jnp.array(flags))
                policy = presets.get(
                    "flax",
                    growth_factor=growth,
                    backoff_factor=backoff,
                    growth_interval=interval,
                    **config,
                )
                expected = list(
                    zip(
                        np.array(scales).tolist(), np.array(steps).tolist(), strict=True
                    )
                )
                actual = [(s.scale, s.good_steps) for s in replay(policy, flags)]
                check_equal_while(
                    expected, actual, lambda pair: pair[0] >= SMALLEST_NORMAL, config
                )


def test_the_defaults_are_flaxs_and_jmps():
    scaler = flax_scale()()
    policy = presets.get("flax")
    assert (
        scaler.scale,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
        scaler.minimum_scale,
    ) == (
        policy.init_scale,
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval,
        policy.min_scale,
    )
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")
    scaler = jmp.DynamicLossScale(jnp.float32(1.0))
    policy = presets.get("jmp")
    assert (scaler.period, scaler.factor, float(scaler.min_loss_scale)) == (
        policy.growth_interval,
        policy.growth_factor,
        policy.min_scale,
    )


def test_jmp_forgets_its_floor_under_jit():
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")
    floor = jnp.float32(0.25)
    scaler = jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=floor)
    step = jax.jit(lambda s: s.adjust(jnp.bool_(False)))
    assert 0.5 == scaler.adjust(jnp.bool_(False)).loss_scale
    assert 1.0 == step(scaler).loss_scale


def test_flax_grows_one_step_later_than_torch():
    flags = [True] * 12
    changes = {
        name: [
            step
            for step, (before, after) in enumerate(
                zip([1.0, *scales], scales, strict=False), start=1
            )
            if before != after
        ]
        for name in ("torch", "flax", "deepspeed")
        for scales in [
            [
                s.scale
                for s in replay(
                    presets.get(name, init_scale=1.0, growth_interval=4), flags
                )
            ]
        ]
    }
    assert {"torch": [4, 8, 12], "flax": [5, 10], "deepspeed": [5, 9]} == changes


def test_a_jmp_scaler_is_read_and_written():
    jmp = pytest.importorskip("jmp", reason="jmp is not installed")
    scaler = jmp.DynamicLossScale(jnp.float32(8.0), jnp.int32(2), period=5, factor=3)
    values = {
        "loss_scale": scaler.loss_scale,
        "counter": scaler.counter,
        "period": scaler.period,
        "factor": scaler.factor,
        "min_loss_scale": scaler.min_loss_scale,
    }
    policy, state = from_library("jmp", values)
    assert ScaleState(8.0, 2, 0) == state
    assert (5, 3.0, 3.0) == (
        policy.growth_interval,
        policy.growth_factor,
        policy.backoff_divisor,
    )
    written = to_library("jmp", policy, state)
    again = jmp.DynamicLossScale(
        jnp.float32(written.values["loss_scale"]),
        jnp.int32(written.values["counter"]),
        period=written.values["period"],
        factor=int(written.values["factor"]),
    )
    flags = [True] * 3 + [False]
    expected = []
    for flag in flags:
        again = again.adjust(jnp.bool_(flag))
        expected.append(float(again.loss_scale))
    assert expected == [s.scale for s in replay(policy, flags, state)]


def test_a_flax_scaler_is_read_and_written():
    from flax import serialization

    scaler = flax_scale()(
        growth_interval=3, fin_steps=jnp.int32(2), scale=jnp.float32(64.0)
    )
    values = serialization.to_state_dict(scaler)
    policy, state = from_library("flax", values)
    assert ScaleState(64.0, 2, 0) == state
    written = to_library("flax", policy, state).values
    restored = serialization.from_state_dict(
        scaler, {name: written[name] for name in values}
    )
    assert (2, 64.0) == (restored.fin_steps, restored.scale)
