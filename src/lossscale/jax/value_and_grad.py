# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad`: JAX's function of that name, with the loss scaled inside.

The scale comes in as an argument and the next one goes out as a result. What is handed
back was unscaled with the scale that came in, never with the next one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lossscale.core import validation
from lossscale.core.policies import Policy
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.core.validation import format_value
from lossscale.errors import GradientError, SettingTypeError
from lossscale.jax import verbs
from lossscale.jax.leaves import AsIs, overwritten
from lossscale.jax.signatures import named_like


class Differentiated(NamedTuple):
    """What a step that is differentiated with a scaled loss returns.

    Example:
        >>> import lossscale.jax as ls
        >>> ls.Differentiated._fields
        ('value', 'grads', 'signal', 'state')
    """

    value: Any
    """What the function returned: the loss, not scaled, in its own dtype; with
    `has_aux` the pair of loss and the rest."""
    grads: Any
    """The unscaled gradients, in float32 or wider. A leaf that cannot be differentiated
    (an integer, a key, a function) has `None` in its place."""
    signal: Signal
    """What was seen; `signal.finite` says whether the step may be applied."""
    state: ScaleState
    """The state for the next step."""


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: Any = None,
    measure: Iterable[str] = (),
    as_is: AsIs = overwritten,
) -> Callable[..., Differentiated]:
    """Return a function of the state and `fun`'s arguments that differentiates `fun`.

    Call it as `(state, *args, **kwargs)`; it returns a `Differentiated`. The loss is
    scaled in float32 and the gradients are unscaled. Integers, keys and other leaves
    that cannot be differentiated may be part of the arguments: they reach `fun` as they
    are. `Signal.loss_finite` is always filled.

    Args:
        fun: Returns a loss, or with `has_aux` a pair of a loss and anything else.
        policy: Any policy.
        argnums: Which arguments of `fun` to differentiate: a number, or several.
        has_aux: Whether `fun` returns a pair.
        axis_name: The mapped axes whose devices decide together; see `unscale`.
        measure: What else the signal is to hold; see `unscale`.
        as_is: Which gradients are not unscaled; see `unscale`.

    Raises:
        SettingTypeError: If `policy` is not a policy.
        SettingError: If a measurement is not known.

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
    check_policy(policy)
    names = validation.check_measurements(measure)

    @named_like(fun)
    def differentiated(
        state: ScaleState, /, *args: Any, **kwargs: Any
    ) -> Differentiated:
        value, grads = scaled_value_and_grad(
            fun, state, args, kwargs, argnums=argnums, has_aux=has_aux
        )
        unscaled, signal = verbs.unscale(
            grads,
            state,
            measure=names,
            axis_name=axis_name,
            as_is=as_is,
            loss=value[0] if has_aux else value,
        )
        after = verbs.update(policy, state, signal)
        return Differentiated(value, unscaled, signal, after)

    return differentiated


def scaled_value_and_grad(
    fun: Callable[..., Any],
    state: ScaleState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    argnums: int | Sequence[int],
    has_aux: bool,
) -> tuple[Any, Any]:
    """Return what `fun` returns, not scaled, and the gradients, still scaled."""
    places = [argnums] if isinstance(argnums, int) else list(argnums)
    parts = [_Parts(args[place]) for place in places]
    if not any(leaf is not None for part in parts for leaf in part.floats):
        message = (
            f"There is nothing to differentiate in the arguments at argnums={argnums}: "
            f"{format_value(tuple(args[place] for place in places))}. Expected floating-point "
            "arrays."
        )
        raise GradientError(message)

    def scaled(floats: list[list[Any]]) -> tuple[Array, Any]:
        every = list(args)
        for place, part, values in zip(places, parts, floats, strict=True):
            every[place] = part.with_floats(values)
        result = fun(*every, **kwargs)
        loss = result[0] if has_aux else result
        return verbs.scale(loss, state), result

    differentiate = jax.value_and_grad(scaled, has_aux=True)
    (_, value), found = differentiate([part.floats for part in parts])
    grads = [part.tree(values) for part, values in zip(parts, found, strict=True)]
    return value, grads[0] if isinstance(argnums, int) else tuple(grads)


def check_policy(policy: Any) -> None:
    """Raise unless this is a policy, before anything is traced."""
    if isinstance(policy, type) or not isinstance(policy, Policy):
        message = (
            "policy must be a policy, such as lossscale.Dynamic(), got "
            f"{format_value(policy)}."
        )
        raise SettingTypeError(message)


class _Parts:
    """A pytree in two: what can be differentiated, and the rest."""

    def __init__(self, tree: Any) -> None:
        every, self._structure = jax.tree.flatten(tree)
        self.floats = [leaf if is_differentiable(leaf) else None for leaf in every]
        self._rest = [None if is_differentiable(leaf) else leaf for leaf in every]

    def with_floats(self, floats: list[Any]) -> Any:
        """Return the tree with other floats in it."""
        pairs = zip(floats, self._rest, strict=True)
        return self.tree([rest if new is None else new for new, rest in pairs])

    def tree(self, values: list[Any]) -> Any:
        """Return a tree of the same structure."""
        return jax.tree.unflatten(self._structure, values)


def is_differentiable(leaf: Any) -> bool:
    """Whether JAX differentiates with respect to a leaf."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))
