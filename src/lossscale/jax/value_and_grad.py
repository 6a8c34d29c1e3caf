# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: JAX's function of that name, with the loss scaled inside.

The scale is an argument and the next scale a result. The gradients are unscaled with
the scale that was passed in, never with the next one.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from lossscale.core import validation
from lossscale.core.measurements import Measurement, check_measurements
from lossscale.core.policies import Policy, require_policy, wanted_measurements
from lossscale.core.state import ScaleState, Signal
from lossscale.core.validation import describe_type, format_value
from lossscale.errors import ContextError, GradientError
from lossscale.jax import functional
from lossscale.jax.arguments import (
    check_function,
    check_state,
    get_argument,
    normalize_argnums,
)
from lossscale.jax.function_names import copy_name
from lossscale.jax.gradient import is_differentiable, is_overwrite_with_gradient
from lossscale.jax.types import AxisName, LeafPredicate, PyTree


class ValueAndGrad(NamedTuple):
    """The result of a function that `value_and_grad` returned.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.ValueAndGrad._fields
        ('value', 'grads', 'signal', 'state')
    """

    value: PyTree
    """What the function returned: the unscaled loss in its own dtype; with `has_aux`
    the pair of the loss and the auxiliary data."""
    grads: PyTree
    """The unscaled gradients, in float32 or wider; `None` for a leaf that cannot be
    differentiated (an integer, a key, a function)."""
    signal: Signal
    """The result of the check; `signal.finite` says whether to apply the step."""
    state: ScaleState
    """The state for the next step."""


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = None,
    measure: Measurement | Iterable[Measurement] = (),
    passthrough: LeafPredicate = is_overwrite_with_gradient,
) -> Callable[..., ValueAndGrad]:
    """Return a function of the state and `fun`'s arguments that differentiates `fun`.

    Call it as `(state, *args, **kwargs)`; it returns a `ValueAndGrad`. The loss is
    scaled in float32 and the gradients are unscaled. Integers, keys and other leaves
    that cannot be differentiated may be part of the arguments: `fun` receives them
    unchanged. `Signal.loss_finite` is always filled.

    Args:
        fun: Returns a loss, or with `has_aux` a pair of a loss and auxiliary data.
        policy: Any policy.
        argnums: Which arguments of `fun` to differentiate: a number, or several.
        has_aux: Whether `fun` returns a pair.
        axis_name: The mapped axes whose devices make one decision; see `unscale`.
        measure: Further fields of the signal to fill, besides those that the policy
            reads; see `unscale`.
        passthrough: Which gradients are not unscaled; see `unscale`.

    Raises:
        SettingTypeError: If `fun` is not a function, `policy` not a policy, `argnums`
            no numbers, or `has_aux` not a boolean.
        SettingError: If a measurement is not known; from the call, if there is no
            argument at `argnums`.
        StateError: From the call, if its first argument is not a `ScaleState`.
        GradientError: From the call, if `fun` does not return a loss of one number, or
            a pair with `has_aux`.
        ContextError: From the call, if an nnx module has state besides parameters,
            which would be lost.

    Example:
        >>> import jax, jax.numpy as jnp, lossscale, lossscale.jax as ls
        >>> policy = lossscale.Dynamic()
        >>> def loss(weight, x):
        ...     return (weight * x) ** 2
        >>> step = jax.jit(ls.value_and_grad(loss, policy))
        >>> value, grads, signal, state = step(ls.init(policy), 3.0, 2.0)
        >>> float(value), float(grads), bool(signal.finite), int(state.good_steps)
        (36.0, 24.0, True, 1)
    """
    check_function("fun", fun, "a function that returns the loss")
    require_policy(policy)
    validation.check_bool("has_aux", has_aux)
    names = check_measurements(measure)
    names = check_measurements(names | set(wanted_measurements(policy)))
    positions = normalize_argnums("argnums", argnums)

    @copy_name(fun)
    def scaled_value_and_grad(
        state: ScaleState, /, *args: Any, **kwargs: Any
    ) -> ValueAndGrad:
        check_state(state)
        value, grads = differentiate_scaled(
            fun, state, args, kwargs, argnums=positions, has_aux=has_aux
        )
        unscaled, signal = functional.unscale(
            grads,
            state,
            measure=names,
            axis_name=axis_name,
            passthrough=passthrough,
            loss=value[0] if has_aux else value,
        )
        next_state = functional.update(policy, state, signal)
        return ValueAndGrad(value, unscaled, signal, next_state)

    return scaled_value_and_grad


def differentiate_scaled(
    fun: Callable[..., Any],
    state: ScaleState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    argnums: int | tuple[int, ...],
    has_aux: bool,
) -> tuple[PyTree, PyTree]:
    """Return the unscaled result of `fun`, and the gradients, still scaled."""
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    arguments = [get_argument("argnums", args, position) for position in positions]
    _refuse_stateful_modules(arguments)
    trees = [_PartitionedTree(argument) for argument in arguments]
    if not any(leaf is not None for tree in trees for leaf in tree.floats):
        message = (
            f"There is nothing to differentiate in the arguments at argnums={argnums}: "
            f"{format_value(tuple(arguments))}. Expected floating-point arrays."
        )
        raise GradientError(message)

    def compute_scaled_loss(floats: list[list[Any]]) -> tuple[jax.Array, PyTree]:
        all_args = list(args)
        for position, tree, leaves in zip(positions, trees, floats, strict=True):
            all_args[position] = tree.merge(leaves)
        result = fun(*all_args, **kwargs)
        loss = _extract_loss(result, has_aux=has_aux)
        return functional.scale(loss, state), result

    differentiate = jax.value_and_grad(compute_scaled_loss, has_aux=True)
    (_, value), leaf_grads = differentiate([tree.floats for tree in trees])
    grads = [
        tree.unflatten(leaves) for tree, leaves in zip(trees, leaf_grads, strict=True)
    ]
    return value, grads[0] if isinstance(argnums, int) else tuple(grads)


def _extract_loss(result: PyTree, *, has_aux: bool) -> PyTree:
    """Return the loss from the result of a loss function, or raise."""
    if not has_aux and not isinstance(result, tuple):
        return _check_one_number(result)
    if has_aux and isinstance(result, tuple) and len(result) == _PAIR:
        return _check_one_number(result[0])
    size = f" of {len(result)}" if isinstance(result, tuple) else ""
    message = (
        f"The function returned {describe_type(result)}{size}. With has_aux=True it "
        "must return a pair of the loss and auxiliary data; without, the loss alone."
    )
    raise GradientError(message)


_PAIR = 2


def _check_one_number(loss: PyTree) -> PyTree:
    """Return a loss unless it is an array of several numbers, or a container."""
    shape = getattr(loss, "shape", ())
    if shape != ():
        message = (
            f"The function returned a loss of shape {shape}, expected one number. "
            "Return its mean or its sum, such as jnp.mean(loss)."
        )
        raise GradientError(message)
    if not jax.tree_util.all_leaves([loss]):
        message = (
            f"The function returned {describe_type(loss)}, expected the loss: one "
            "number. Return other results as auxiliary data, with has_aux=True."
        )
        raise GradientError(message)
    return loss


def _refuse_stateful_modules(arguments: list[PyTree]) -> None:
    """Raise if an nnx module has state that a call would change and lose.

    JAX differentiates a copy of the module. Batch statistics and random counters would
    be written into the copy.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    for argument in arguments:
        nodes = jax.tree.leaves(argument, is_leaf=lambda n: isinstance(n, nnx.Module))
        for node in nodes:
            if isinstance(node, nnx.Module) and jax.tree.leaves(
                nnx.state(node, nnx.Not(nnx.Param))
            ):
                message = (
                    f"The nnx module {type(node).__name__} has state besides its "
                    "parameters, such as batch statistics or random counters, which "
                    "would be lost. Split it and return that state: "
                    "graphdef, params, rest = nnx.split(model, nnx.Param, ...); in the "
                    "loss function, model = nnx.merge(graphdef, params, rest, "
                    "copy=True), and return loss, nnx.state(model, "
                    "nnx.Not(nnx.Param)) with has_aux=True."
                )
                raise ContextError(message)


class _PartitionedTree:
    """A pytree, split into leaves that can be differentiated and the others."""

    def __init__(self, tree: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self.floats = [leaf if is_differentiable(leaf) else None for leaf in leaves]
        self._others = [None if is_differentiable(leaf) else leaf for leaf in leaves]

    def merge(self, floats: list[Any]) -> PyTree:
        """Return the tree with other differentiable leaves."""
        pairs = zip(floats, self._others, strict=True)
        return self.unflatten(
            [constant if new is None else new for new, constant in pairs]
        )

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """Return a tree of the same structure."""
        return jax.tree.unflatten(self._structure, leaves)
