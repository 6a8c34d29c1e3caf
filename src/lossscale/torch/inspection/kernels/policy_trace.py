# SPDX-License-Identifier: Apache-2.0
"""The step of a policy, written down as lines of a Triton kernel.

A policy computes with operators and `where` alone, whatever the framework. Called with
`Number`s, which note each operation instead of computing it, its step becomes a list of
assignments. Triton cannot parse the policies themselves: they are dataclasses.
"""

from typing import TypeAlias

from lossscale.core.policies import Policy, advance
from lossscale.core.state import Signal
from lossscale.core.validation import as_float32

Operand: TypeAlias = "Number | float"
"""A number of the kernel, or a constant; constants are Python's."""


class Number:
    """A number of the kernel, by its name there."""

    def __init__(self, lines: list[str], name: str) -> None:
        """Name a number.

        Args:
            lines: Where operations on it are noted.
            name: Its name.
        """
        self._lines = lines
        self._name = name

    def __str__(self) -> str:
        """Return the name."""
        return self._name

    def __bool__(self) -> bool:
        """Raise: there is no value to ask for."""
        message = "A number of a kernel has no value yet; choose by `where`."
        raise TypeError(message)

    __hash__ = None  # type: ignore[assignment]  # it compares as numbers do

    def note(self, expression: str) -> "Number":
        """Return the number that an expression gives."""
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {expression}")
        return Number(self._lines, name)

    def __add__(self, other: Operand) -> "Number":
        """Note a sum."""
        return self.note(f"{self} + {write(other)}")

    def __radd__(self, other: Operand) -> "Number":
        """Note a sum."""
        return self.note(f"{write(other)} + {self}")

    def __sub__(self, other: Operand) -> "Number":
        """Note a difference."""
        return self.note(f"{self} - {write(other)}")

    def __rsub__(self, other: Operand) -> "Number":
        """Note a difference."""
        return self.note(f"{write(other)} - {self}")

    def __mul__(self, other: Operand) -> "Number":
        """Note a product."""
        return self.note(f"{self} * {write(other)}")

    def __rmul__(self, other: Operand) -> "Number":
        """Note a product."""
        return self.note(f"{write(other)} * {self}")

    # In float32 Triton's `/` is an approximation. A quotient that is computed in
    # float64 and rounded is exact.
    def __truediv__(self, other: Operand) -> "Number":
        """Note a quotient."""
        return self.note(f"({self}.to(tl.float64) / {write(other)}).to(tl.float32)")

    def __rtruediv__(self, other: Operand) -> "Number":
        """Note a quotient."""
        return self.note(f"({write(other)} / {self}.to(tl.float64)).to(tl.float32)")

    def __lt__(self, other: Operand) -> "Number":
        """Note a comparison."""
        return self.note(f"{self} < {write(other)}")

    def __le__(self, other: Operand) -> "Number":
        """Note a comparison."""
        return self.note(f"{self} <= {write(other)}")

    def __gt__(self, other: Operand) -> "Number":
        """Note a comparison."""
        return self.note(f"{self} > {write(other)}")

    def __ge__(self, other: Operand) -> "Number":
        """Note a comparison."""
        return self.note(f"{self} >= {write(other)}")

    def __eq__(self, other: Operand) -> "Number":  # type: ignore[override]
        """Note a comparison."""
        return self.note(f"{self} == {write(other)}")


def write(operand: Operand) -> str:
    """Return an operand as source text; a float rounded to float32, as tensors do."""
    if isinstance(operand, float):
        return repr(as_float32(operand))
    if isinstance(operand, (Number, int)):
        return str(operand)
    message = f"a kernel takes numbers, got {operand!r}."
    raise TypeError(message)


def trace_step(
    policy: Policy, *, has_loss: bool, has_measurements: bool
) -> tuple[list[str], list[str]]:
    """Return the step of a policy as assignments, and its results by field.

    The assignments read the fields of the state by their names, and the flags `finite`,
    `too_large`, `loss_finite`, `nan`, `amax` and `norm`.

    Args:
        policy: The policy.
        has_loss: Whether it is known that the loss was finite.
        has_measurements: Whether `nan`, `amax` and `norm` were measured.

    Raises:
        TypeError: If the policy does more than operators and `where` can.

    Example:
        >>> from lossscale import Saturation
        >>> lines, results = trace_step(
        ...     Saturation(), has_loss=False, has_measurements=True
        ... )
        >>> lines[0], len(results)
        ('v0 = good_steps + 1', 3)
    """
    lines: list[str] = []

    def name(text: str) -> Number:
        return Number(lines, text)

    def where(condition: Operand, first: Operand, second: Operand) -> Operand:
        if not isinstance(condition, Number):
            return first if condition else second
        return condition.note(f"tl.where({condition}, {write(first)}, {write(second)})")

    fields = policy.init()._fields
    state = type(policy.init())(*map(name, fields))
    signal = Signal(finite=name("finite"), too_large=name("too_large"))
    if has_loss:
        signal = signal._replace(loss_finite=name("loss_finite"))
    if has_measurements:
        measured = {field: name(field) for field in ("nan", "amax", "norm")}
        signal = signal._replace(**measured)
    after = advance(policy, state, signal, where=where)
    return lines, [write(value) for value in after]
