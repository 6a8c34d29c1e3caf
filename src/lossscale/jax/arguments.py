# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments: functions, states, argument positions, flags."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.state import Array
from lossscale.core.validation import format_value, require_state
from lossscale.errors import GradientError, SettingError, SettingTypeError


def check_state(state: object) -> None:
    """Raise unless this is a state: arguments of a step are easily swapped."""
    require_state(state, "A step takes it first, as in step(state, params, batch). ")


def check_function(name: str, function: object, expected: str) -> None:
    """Raise unless this can be called, before anything is traced."""
    if not callable(function):
        message = f"{name} must be {expected}, got {format_value(function)}."
        raise SettingTypeError(message)


def normalize_argnums(name: str, argnums: Any) -> int | tuple[int, ...]:
    """Return argument positions as Python integers: one, or a tuple of them."""
    try:
        return operator.index(argnums)
    except TypeError:
        pass
    try:
        return tuple(operator.index(position) for position in argnums)
    except TypeError:
        message = (
            f"{name} must be a position of an argument, such as 0, or several, such "
            f"as (0, 1), got {format_value(argnums)}."
        )
        raise SettingTypeError(message) from None


def get_argument(name: str, args: tuple[Any, ...], position: int) -> Any:
    """Return the argument at a position, or raise."""
    if -len(args) <= position < len(args):
        return args[position]
    message = (
        f"{name}={position}, and the function was called with {len(args)} positional "
        "arguments. Positions count from 0, without the state."
    )
    raise SettingError(message)


def to_flags(finite: Array) -> jax.Array:
    """Return flags as a boolean array, or raise if they have no meaning as flags.

    A step that is mistaken for a finite one is applied, so nothing is guessed: NaN,
    None, text and a whole `Signal` have a truth value in Python, and no meaning here. A
    traced flag of NaN or infinity counts as not finite.
    """
    is_concrete = isinstance(
        finite, (bool, int, float, np.bool_, np.number, np.ndarray)
    )
    if (
        not (is_concrete or isinstance(finite, jax.Array))
        or getattr(jnp.result_type(finite), "kind", "") not in tuple("biuf")
        or (is_concrete and np.isnan(finite).any())
    ):
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    flags = jnp.asarray(finite)
    if flags.dtype == jnp.bool_:
        return flags
    return (flags != 0) & jnp.isfinite(flags)


def to_flag(finite: Array) -> jax.Array:
    """Return one flag as a boolean scalar array, or raise."""
    flags = to_flags(finite)
    if flags.size != 1:
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return flags.reshape(())
