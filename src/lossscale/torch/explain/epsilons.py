# SPDX-License-Identifier: Apache-2.0
"""`LostEpsilons`: numbers against a division by 0 that are 0 themselves.

float16 has no positive number below 6e-8: `x + 1e-8` is `x` there.
"""

from typing import Any

import torch

from lossscale.torch.explain.operators import Inputs


class LostEpsilons:
    """Which results had a number added to them that their format rounds to 0."""

    def __init__(self) -> None:
        self._by_address: dict[int, float] = {}

    def note(
        self, name: str, inputs: Inputs, result: torch.Tensor, address: int | None
    ) -> None:
        """Note what an operator wrote that is finite."""
        if address is None:
            return
        epsilon: float | None = None
        if name in _ADDING:
            values = (*inputs.args, *inputs.kwargs.values())
            lost = (abs(number) for number in map(_read_number, values) if number)
            epsilon = next((x for x in lost if x <= _find_limit(result.dtype)), None)
        if epsilon is None and name in _PASSING:
            epsilon = self._find_among(inputs, inputs.read_tensors())
        if epsilon is None:
            self._by_address.pop(address, None)
        else:
            self._by_address[address] = epsilon

    def find(self, name: str, inputs: Inputs) -> float | None:
        """Return the number that was added to what an operator divided by."""
        divisors = inputs.read_tensors()[1 if name == "div" else 0 :]
        return self._find_among(inputs, divisors)

    def _find_among(self, inputs: Inputs, tensors: list[torch.Tensor]) -> float | None:
        found = (
            self._by_address.get(inputs.address_of(tensor) or 0) for tensor in tensors
        )
        return next((epsilon for epsilon in found if epsilon is not None), None)


def _read_number(value: Any) -> float | None:
    """Return an argument as a number, if it is one; tensors of a model are none."""
    if isinstance(value, float):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return float(value) if value.is_floating_point() else None
    return None


def _find_limit(dtype: torch.dtype) -> float:
    """Return the largest number that a format rounds to 0."""
    if not dtype.is_floating_point:
        return 0.0
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2


_ADDING = frozenset({"add", "clamp", "clamp_min", "maximum"})
_PASSING = frozenset({"sqrt", "mul", "to", "clone", "expand", "neg"})
"""Operators whose result is 0 where what they read is."""
