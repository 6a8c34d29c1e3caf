# SPDX-License-Identifier: Apache-2.0
"""`Explanation`: what was seen when one batch was run again, as frozen data.

A framework fills in what it can see and leaves the rest `None`: `None` means unknown,
never "no".
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from lossscale.core.explanation.origins import Origin

Direction: TypeAlias = Literal["given", "forward", "backward"]
"""In which pass it was seen; "given" for what was there before the batch was run."""

Role: TypeAlias = Literal[
    "batch",
    "parameter",
    "buffer",
    "constant",
    "input",
    "output",
    "intermediate",
    "loss",
    "parameter gradient",
    "input gradient",
    "output gradient",
    "intermediate gradient",
]
"""What a tensor is to its module."""


@dataclass(frozen=True)
class Finding:
    """One tensor that was not finite, where it was made, and of what.

    Example:
        >>> from lossscale import Finding
        >>> found = Finding(
        ...     direction="forward",
        ...     role="output",
        ...     origin="overflow",
        ...     module="mlp.up",
        ...     module_type="Linear",
        ...     operation="addmm",
        ...     dtype="float16",
        ...     magnitude=131008.0,
        ...     largest=65504.0,
        ... )
        >>> found.ratio
        2.0
        >>> print(found)
        the output of mlp.up (Linear) in the forward pass is infinite: addmm gave a \
result beyond the largest number of its format: 131,008, 2.0 times the largest \
float16 number
    """

    direction: Direction
    role: Role
    origin: Origin
    is_nan: bool = False
    """Whether it has a NaN; otherwise it has an infinity."""
    tensor: str | None = None
    """Its name, such as that of a parameter or of an argument."""
    module: str | None = None
    """The module's name; "" for the whole model, `None` outside any module."""
    module_type: str | None = None
    """The class of the module."""
    operation: str | None = None
    """The framework's name of the operation, such as "div"."""
    node: str | None = None
    """In a backward pass: what was being differentiated, such as "SqrtBackward0"."""
    dtype: str | None = None
    """The format of the result, such as "float16"."""
    magnitude: float | None = None
    """How large the result would be in a wider format; `None` if it is not known."""
    largest: float | None = None
    """The largest number of the format."""
    line: str | None = None
    """The line of the user's code that ran the operation, as "file.py:12"."""
    micro_batch: int | None = None
    """Which of several micro-batches it was in, from 0; `None` if there was one."""
    loss: int | None = None
    """Which of several losses of one batch it belongs to, from 0, in the order in which
    they were scaled; `None` if there was one."""
    lost_epsilon: float | None = None
    """A number that was added against this, and that the format rounds to 0; 0 if it is
    not known which."""
    has_model: bool = True
    """Whether there is a model of modules; a plain function of JAX has none."""

    @property
    def ratio(self) -> float | None:
        """How many times the largest number of its format it is."""
        if self.magnitude is None or not self.largest:
            return None
        ratio = self.magnitude / self.largest
        return ratio if math.isfinite(ratio) else None

    def __str__(self) -> str:
        """Return it as a part of a sentence."""
        from lossscale.core.explanation.wording import describe_finding  # noqa: PLC0415

        return describe_finding(self)


@dataclass(frozen=True)
class Trial:
    """The same batch, run at one scale."""

    scale: float
    finite: bool
    """Whether every gradient was finite."""


@dataclass(frozen=True)
class Explanation:
    """Why one batch gave gradients that are not finite, as data; `str` in sentences.

    Example:
        >>> from lossscale import Explanation
        >>> seen = Explanation(scale=8.0, finite=True, loss_finite=True)
        >>> print(seen)
        At a scale of 8 the loss and all gradients were finite: there is nothing to \
explain.
    """

    scale: float
    """The scale at which the batch was run."""
    finite: bool
    """Whether every gradient was finite."""
    loss_finite: bool | None = None
    """Whether the loss was finite before it was scaled."""
    first: Finding | None = None
    """The first tensor that left its format on the way to the loss or to a gradient."""
    first_nan: Finding | None = None
    """Where a NaN was made of it; `None` if there is none, or if `first` is a NaN."""
    trials: tuple[Trial, ...] = ()
    """The same batch at other scales, in the order in which they were tried."""
    last_finite_gradient: str | None = None
    """The parameter whose gradient was the last to be finite before the first that was
    not, in the order of the backward pass."""
    first_nonfinite_gradient: str | None = None
    """The parameter whose gradient was the first that was not finite."""
    rank: int | None = None
    """Which rank this is about; `None` if there is one process."""
    others: tuple["Explanation", ...] = ()
    """What the other ranks saw."""
    notes: tuple[str, ...] = ()
    """What could not be seen in this run, and why."""

    @property
    def helping_scale(self) -> float | None:
        """The largest scale that was tried and gave finite gradients."""
        return max((trial.scale for trial in self.trials if trial.finite), default=None)

    @property
    def may_depend_on_scale(self) -> bool:
        """Whether lower scales are worth a try: a gradient failed before the loss did.

        The gradients that a gradient penalty is made of fail before their loss.
        """
        is_of_gradients = self.first is not None and self.first.direction == "backward"
        return not self.finite and (self.loss_finite is not False or is_of_gradients)

    @property
    def is_backward_overflow(self) -> bool:
        """Whether it was a gradient that first left its format, by its size."""
        first = self.first
        return first is not None and (first.origin, first.direction) == (
            "overflow",
            "backward",
        )

    @property
    def lower_scale_helps(self) -> bool | None:
        """Whether a lower scale gives finite gradients; `None` if it is not known.

        No scale helps if the loss is not finite before it is scaled, unless it is made
        of gradients that were not.
        """
        if self.finite:
            return None
        if not self.may_depend_on_scale:
            return False
        if not self.trials:
            return None
        return self.helping_scale is not None

    @property
    def advice(self) -> str:
        """What to try, as far as it follows from what was seen."""
        from lossscale.core.explanation.wording import advise  # noqa: PLC0415

        return advise(self)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of plain values, which JSON can write.

        Infinite numbers, which JSON has no word for, are `None`.
        """
        return {key: _to_plain(value) for key, value in asdict(self).items()} | {
            "lower_scale_helps": self.lower_scale_helps,
            "helping_scale": self.helping_scale,
            "text": str(self),
        }

    def __str__(self) -> str:
        """Return it in sentences."""
        from lossscale.core.explanation.wording import describe  # noqa: PLC0415

        return describe(self)


def _to_plain(value: object) -> object:
    """Return a value with lists for tuples and `None` for what JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value
