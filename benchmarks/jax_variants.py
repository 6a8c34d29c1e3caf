# SPDX-License-Identifier: Apache-2.0
"""A training step in JAX without loss scaling, with lossscale, and with others.

Each is built from a loss, an optimizer, and `apply`, which computes new parameters and
a new optimizer state from the old ones and the gradients.
"""

import importlib
import sys
from functools import partial
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
    """The initial value of the third part of the state."""
    scale: Any
    """Reads the loss scale from the state."""


def make_unscaled(loss, optimizer, apply) -> Variant:
    def step(state, batch):
        parameters, inner, _ = state
        value, grads = jax.value_and_grad(loss)(parameters, batch)
        return (*apply((parameters, inner), grads), ()), value

    return Variant(step, optimizer, (), lambda _: SCALE)


def make_lossscale_select(loss, optimizer, apply) -> Variant:
    policy = lossscale.Dynamic(init_scale=SCALE)
    differentiate = ls.value_and_grad(loss, policy)

    def step(state, batch):
        *old, scaling = state
        value, grads, signal, scaling = differentiate(scaling, old[0], batch)
        new = ls.select(signal.finite, apply(tuple(old), grads), tuple(old))
        return (*new, scaling), value

    return Variant(step, optimizer, ls.init(policy), lambda state: state[2].scale)


def make_lossscale_cond(loss, optimizer, apply) -> Variant:
    policy = lossscale.Dynamic(init_scale=SCALE)
    differentiate = ls.value_and_grad(loss, policy)

    def step(state, batch):
        *old, scaling = state
        value, grads, signal, scaling = differentiate(scaling, old[0], batch)
        new = ls.apply_if_finite(signal.finite, apply, tuple(old), grads)
        return (*new, scaling), value

    return Variant(step, optimizer, ls.init(policy), lambda state: state[2].scale)


def make_lossscale_optax(loss, optimizer, apply, skip="select") -> Variant:
    del apply
    import optax

    from lossscale.optax import get_scale, loss_scaled, scale_loss

    policy = lossscale.Dynamic(init_scale=SCALE)
    wrapped = loss_scaled(optimizer, policy, skip=skip)

    def step(state, batch):
        parameters, inner, _ = state

        def scaled_loss(parameters):
            value = loss(parameters, batch)
            return scale_loss(value, inner), value

        (_, value), grads = jax.value_and_grad(scaled_loss, has_aux=True)(parameters)
        updates, inner = wrapped.update(grads, inner, parameters)
        return (optax.apply_updates(parameters, updates), inner, ()), value

    return Variant(step, wrapped, (), lambda state: get_scale(state[1]))


def make_flax(loss, optimizer, apply) -> Variant:
    from flax.training.dynamic_scale import DynamicScale

    def step(state, batch):
        parameters, inner, scaling = state
        differentiate = scaling.value_and_grad(loss)
        scaling, finite, value, grads = differentiate(parameters, batch)
        old = (parameters, inner)
        new = jax.tree.map(
            lambda new_leaf, old_leaf: jnp.where(finite, new_leaf, old_leaf),
            apply(old, grads),
            old,
        )
        return (*new, scaling), value

    # Its defaults are Python numbers, with which the second step would be retraced.
    scaling = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
    return Variant(step, optimizer, scaling, lambda state: state[2].scale)


def make_jmp(loss, optimizer, apply) -> Variant:
    import jmp

    def step(state, batch):
        parameters, inner, numbers = state
        scaling = jmp.DynamicLossScale(*numbers)

        def scaled_loss(parameters):
            value = loss(parameters, batch)
            return scaling.scale(value), value

        (_, value), grads = jax.value_and_grad(scaled_loss, has_aux=True)(parameters)
        grads = scaling.unscale(grads)
        finite = jmp.all_finite(grads)
        old = (parameters, inner)
        new = jmp.select_tree(finite, apply(old, grads), old)
        scaling = scaling.adjust(finite)
        return (*new, (scaling.loss_scale, scaling.counter)), value

    # Its two numbers, because `jit(...).lower` does not accept the class itself.
    numbers = (jnp.float32(SCALE), jnp.int32(0))
    return Variant(step, optimizer, numbers, lambda state: state[2][0])


BASELINE = "no scaling"
VARIANTS = {
    BASELINE: (make_unscaled, None),
    "lossscale.jax, select": (make_lossscale_select, None),
    "lossscale.jax, cond": (make_lossscale_cond, None),
    "lossscale.optax": (make_lossscale_optax, "optax"),
    "lossscale.optax, cond": (partial(make_lossscale_optax, skip="cond"), "optax"),
    "flax": (make_flax, "flax.training.dynamic_scale"),
    "jmp": (make_jmp, "jmp"),
}


def find_missing(module: str | None) -> str | None:
    """Return the package that a module needs and that is not installed, or None."""
    if module is None:
        return None
    try:
        importlib.import_module(module)
    except ImportError as error:
        return (error.name or module).partition(".")[0]
    return None
