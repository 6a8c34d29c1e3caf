# SPDX-License-Identifier: Apache-2.0
"""Attributes that are computed, and that a subclass may replace by its own."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class computed(Generic[Value]):  # noqa: N801  # used as a decorator, as property is
    """A property without a setter that does not forbid an attribute of the same name.

    Scalers are subclassed by training codes that count `self.steps` or keep a
    `self.state` of their own; a property would raise where they set it.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: Any) -> "computed[Value]": ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Value: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        """Return the computed value; on the class, the attribute itself."""
        return self if instance is None else self._compute(instance)
