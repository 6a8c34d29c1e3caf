# SPDX-License-Identifier: Apache-2.0
"""Keeps AutoGraph out of lossscale.

`tf.function` rewrites the control flow of what it traces. Ours is Python's, decided
while tracing; rewriting it would cost time and, for lambdas, warn.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])


def skip_autograph(function: Function) -> Function:
    """Return a function that AutoGraph does not rewrite, nor what it calls."""
    return cast("Function", tf.autograph.experimental.do_not_convert(function))


def skip_autograph_in(*names: str) -> Callable[[Class], Class]:
    """Decorate a class: AutoGraph rewrites none of these methods, inherited or not."""

    def decorate(cls: Class) -> Class:
        for name in names:
            setattr(cls, name, skip_autograph(getattr(cls, name)))
        return cls

    return decorate
