# SPDX-License-Identifier: Apache-2.0
"""Copy a function's name and docstring to a wrapper with an extra `state` argument.

`functools.wraps` alone would copy the signature too, in which `jax.jit` looks up
`static_argnames` and `donate_argnames`: every position would be off by one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


def copy_name(fun: Callable[..., Any]) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that copies name and docstring, and not the signature."""

    def decorate(wrapper: Wrapper) -> Wrapper:
        wraps(fun, updated=())(wrapper)
        del wrapper.__wrapped__  # type: ignore[attr-defined]
        return wrapper

    return decorate
