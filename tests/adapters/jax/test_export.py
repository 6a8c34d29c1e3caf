"""`jax.export`: steps over our states are saved, and read again."""

import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from helpers.trees import check_same  # noqa: E402
from jax import export  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.jax import drop_ins  # noqa: E402

POLICY = Dynamic(init_scale=8.0)


def loss_of(weight, x):
    return jnp.sum(weight * x)


DIFFERENTIATE = ls.value_and_grad(loss_of, POLICY)
STEPS = {
    "value_and_grad": DIFFERENTIATE,
    "retrying": ls.retrying(DIFFERENTIATE),
    "accumulating": ls.accumulating(loss_of, POLICY),
    "flags": lambda state, weight, x: (state, ls.leaf_flags(weight * x)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_that_was_saved_takes_the_same_step(step):
    arguments = ls.init(POLICY), jnp.ones(2), jnp.arange(4.0).reshape(2, 2)
    data = export.export(jax.jit(step))(*arguments).serialize()
    again = export.deserialize(data)
    check_same(jax.jit(step)(*arguments), again.call(*arguments))


@pytest.mark.parametrize(
    "scaler",
    [
        drop_ins.DynamicLossScale(jnp.float32(8.0), min_loss_scale=0.5),
        drop_ins.StaticLossScale(jnp.float32(8.0)),
        drop_ins.NoOpLossScale(),
        drop_ins.DynamicScale(scale=8.0, minimum_scale=None),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_names_of_jmp_and_flax_are_saved_with_their_settings(scaler):
    data = export.export(jax.jit(lambda s, x: (s, x)))(scaler, 1.0).serialize()
    again, _ = export.deserialize(data).call(scaler, 1.0)
    assert scaler == again


def test_another_process_reads_it(tmp_path):
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
