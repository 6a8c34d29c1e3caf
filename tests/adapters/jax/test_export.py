"""`jax.export`: steps over our states are serialized and loaded."""

import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from helpers.trees import check_same  # noqa: E402
from jax import export  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.jax.compat import flax as compat_flax  # noqa: E402
from lossscale.jax.compat import jmp as compat_jmp  # noqa: E402

POLICY = Dynamic(init_scale=8.0)


def compute_loss(weight, x):
    return jnp.sum(weight * x)


DIFFERENTIATE = ls.value_and_grad(compute_loss, POLICY)
STEPS = {
    "value_and_grad": DIFFERENTIATE,
    "with_retries": ls.with_retries(DIFFERENTIATE),
    "accumulate_gradients": ls.accumulate_gradients(compute_loss, POLICY),
    "flags": lambda state, weight, x: (state, ls.leaf_flags(weight * x)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_serialized_step_computes_the_same_step(step):
    arguments = ls.init(POLICY), jnp.ones(2), jnp.arange(4.0).reshape(2, 2)
    data = export.export(jax.jit(step))(*arguments).serialize()
    again = export.deserialize(data)
    check_same(jax.jit(step)(*arguments), again.call(*arguments))


@pytest.mark.parametrize(
    "scaler",
    [
        compat_jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=0.5),
        compat_jmp.StaticLossScale(jnp.float32(8.0)),
        compat_jmp.NoOpLossScale(),
        compat_flax.DynamicScale(scale=8.0, minimum_scale=None),
    ],
    ids=lambda scaler: type(scaler).__name__,
)
def test_the_scales_of_jmp_and_flax_are_serialized_with_their_settings(scaler):
    data = export.export(jax.jit(lambda s, x: (s, x)))(scaler, 1.0).serialize()
    again, _ = export.deserialize(data).call(scaler, 1.0)
    assert scaler == again


def test_another_process_loads_it(tmp_path):
    file = tmp_path / "step.bin"
    arguments = ls.init(POLICY), jnp.ones(2), jnp.full(2, jnp.inf)
    file.write_bytes(export.export(jax.jit(DIFFERENTIATE))(*arguments).serialize())
    program = f"""
import pathlib
import jax.numpy as jnp, lossscale, lossscale.jax as ls
from jax import export
step = export.deserialize(bytearray(pathlib.Path({str(file)!r}).read_bytes()))
state = ls.init(lossscale.Dynamic(init_scale=8.0))
print(step.call(state, jnp.ones(2), jnp.full(2, jnp.inf)).state.scale)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "4.0" == done.stdout.strip()
