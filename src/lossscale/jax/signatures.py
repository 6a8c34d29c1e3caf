# SPDX-License-Identifier: Apache-2.0
"""The name of a function for one that takes the state as well.

`functools.wraps` alone would hand on the signature too, in which `jax.jit` looks up
`static_argnames` and `donate_argnames`: every place would be one off.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Result = TypeVar("Result")


def named_like(
    fun: Callable[..., Any],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that copies name and docstring, and not the signature."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        named: Any = wraps(fun, updated=())(function)
        del named.__wrapped__
        renamed: Callable[..., Result] = named
        return renamed

    return decorate
