# SPDX-License-Identifier: Apache-2.0
"""A training step in JAX without loss scaling, with ours, and with that of others.

Each is made of a loss, an optimizer, and `apply`, which returns new parameters and a
new optimizer state of the old ones and the gradients.
"""

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

import lossscale  # noqa: E402
import lossscale.jax as ls  # noqa: E402

SCALE = 2.0**10


class Variant(NamedTuple):
    """One way to train: a step over (parameters, optimizer state, scaling)."""

    step: Any
    optimizer: Any
    scaling: Any
    """What the third part of the state is at first."""
    scale: Any
    """Reads the loss scale out of the state."""


def unscaled(loss, optimizer, apply) -> Variant:
    def step(state, batch):
        parameters, inner, _ = state
        value, grads = jax.value_and_grad(loss)(parameters, batch)
        return (*apply((parameters, inner), grads), ()), value

    return Variant(step, optimizer, (), lambda _: SCALE)


def ours_select(loss, optimizer, apply) -> Variant:
    policy = lossscale.Dynamic(init_scale=SCALE)
    differentiate = ls.value_and_grad(loss, policy)

    def step(state, batch):
        *old, scaling = state
        value, grads, signal, scaling = differentiate(scaling, old[0], batch)
        new = ls.select(signal.finite, apply(tuple(old), grads), tuple(old))
        return (*new, scaling), value

    return Variant(step, optimizer, ls.init(policy), lambda state: state[2].scale)


def ours_cond(loss, optimizer, apply) -> Variant:
    policy = lossscale.Dynamic(init_scale=SCALE)
    differentiate = ls.value_and_grad(loss, policy)

    def step(state, batch):
        *old, scaling = state
        value, grads, signal, scaling = differentiate(scaling, old[0], batch)
        new = ls.apply_if_finite(signal.finite, apply, tuple(old), grads)
        return (*new, scaling), value

    return Variant(step, optimizer, ls.init(policy), lambda state: state[2].scale)


def ours_optax(loss, optimizer, apply) -> Variant:
    del apply
    import optax

    from lossscale.optax import get_scale, loss_scaled, scale_loss

    wrapped = loss_scaled(optimizer, lossscale.Dynamic(init_scale=SCALE))

    def step(state, batch):
        parameters, inner, _ = state

        def scaled(parameters):
            value = loss(parameters, batch)
            return scale_loss(value, inner), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(parameters)
        updates, inner = wrapped.update(grads, inner, parameters)
        return (optax.apply_updates(parameters, updates), inner, ()), value

    return Variant(step, wrapped, (), lambda state: get_scale(state[1]))


def flax_select(loss, optimizer, apply) -> Variant:
    from flax.training.dynamic_scale import DynamicScale

    def step(state, batch):
        parameters, inner, scaling = state
        differentiate = scaling.value_and_grad(loss)
        scaling, finite, value, grads = differentiate(parameters, batch)
        old = (parameters, inner)
        new = jax.tree.map(
            lambda first, second: jnp.where(finite, first, second),
            apply(old, grads),
            old,
        )
        return (*new, scaling), value

    # Its defaults are Python numbers, with which the second step is traced again.
    scaling = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
    return Variant(step, optimizer, scaling, lambda state: state[2].scale)


def jmp_select(loss, optimizer, apply) -> Variant:
    import jmp

    def step(state, batch):
        parameters, inner, numbers = state
        scaling = jmp.DynamicLossScale(*numbers)

        def scaled(parameters):
            value = loss(parameters, batch)
            return scaling.scale(value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(parameters)
        grads = scaling.unscale(grads)
        finite = jmp.all_finite(grads)
        old = (parameters, inner)
        new = jmp.select_tree(finite, apply(old, grads), old)
        scaling = scaling.adjust(finite)
        return (*new, (scaling.loss_scale, scaling.counter)), value

    # Its two numbers, because `jit(...).lower` cannot take the class itself.
    numbers = (jnp.float32(SCALE), jnp.int32(0))
    return Variant(step, optimizer, numbers, lambda state: state[2][0])


NONE = "no scaling"
VARIANTS = {
    NONE: (unscaled, None),
    "lossscale.jax, select": (ours_select, None),
    "lossscale.jax, cond": (ours_cond, None),
    "lossscale.optax": (ours_optax, "optax"),
    "flax": (flax_select, "flax.training.dynamic_scale"),
    "jmp": (jmp_select, "jmp"),
}


def missing(module: str | None) -> str | None:
    """Return the package without which a module cannot be imported, if there is one."""
    if module is None:
        return None
    try:
        importlib.import_module(module)
    except ImportError as error:
        return (error.name or module).partition(".")[0]
    return None
