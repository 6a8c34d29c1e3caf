# SPDX-License-Identifier: Apache-2.0
"""`RunExplanation`: what a record has about one skipped step."""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lossscale.diagnostics.records.steps import Nonfinite

EXPLANATION_FORMAT = "lossscale-explanation/1"
"""The format of `lossscale explain --format json`."""


class Trend(NamedTuple):
    """The headroom of the applied steps before the skipped one, in bits."""

    first_step: int
    first: float
    """The mean of the first quarter of these steps."""
    last_step: int
    last: float
    """The mean of their last quarter."""
    lowest: float


class Recovery(NamedTuple):
    """The first step that was applied after the skipped one."""

    step: int
    scale: float


class Sample(NamedTuple):
    """The last statistics of the tensor that broke first, before it did."""

    step: int
    headroom: float
    """How many bits its largest number was below the format's."""


@dataclass(frozen=True)
class RunExplanation:
    """What a record has about one skipped step; `None` where it has nothing.

    Example:
        >>> from lossscale.diagnostics.explanation import RunExplanation
        >>> seen = RunExplanation(title="run", step=None, dtype="float16", skipped=0)
        >>> print(seen)
        No step of this run was skipped: there is nothing to explain.
    """

    title: str
    step: int | None
    """The step that is explained; `None` if none was skipped."""
    dtype: str
    """The format in which gradients were stored."""
    skipped: int
    """How many steps of the run were skipped."""
    first_skipped: int | None = None
    """The first of them."""
    scale: float | None = None
    cause: str | None = None
    """Why it was skipped, one of `CAUSES`."""
    loss: float | None = None
    """The unscaled loss of the step."""
    nonfinite: Nonfinite = ()
    """The tensors that were not finite, in the model's order."""
    nearest_finite: str | None = None
    """The tensor before those, in the order of the backward pass."""
    at_the_end: bool = False
    """Whether the tensor that broke first is the last of the model."""
    skips_in_a_row: int = 1
    """How many steps were skipped from this one on."""
    recovery: Recovery | None = None
    """The next step that was applied; `None` if there was none."""
    same_scale_again: int | None = None
    """The first later step that was applied at this scale or a higher one."""
    trend: Trend | None = None
    sample: Sample | None = None
    last_good_step: int | None = None
    """The last step whose weights are known to be good."""
    alarm: str | None = None
    """The kind of the run's first alarm."""
    alarm_step: int | None = None

    @property
    def broken_first(self) -> str | None:
        """The tensor that broke first in the backward pass."""
        return self.nonfinite[-1][0] if self.nonfinite else None

    @property
    def only_nan(self) -> bool:
        """Whether there was NaN and no infinity: a lower scale cannot help."""
        return self.cause == "nan" and all(kind == "nan" for _, kind in self.nonfinite)

    @property
    def loss_finite(self) -> bool | None:
        """Whether the loss was finite; `None` if the record does not say."""
        if self.cause == "loss":
            return False
        return None if self.loss is None else math.isfinite(self.loss)

    @property
    def lower_scale_helped(self) -> bool | None:
        """Whether a later batch was finite at a lower scale; `None` if not known."""
        if self.step is None or self.recovery is None or self.scale is None:
            return None
        return self.recovery.scale < self.scale

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of plain values, which JSON can write.

        Infinite numbers, which JSON has no word for, are `None`.
        """
        values = asdict(self)
        for name in ("recovery", "trend", "sample"):
            value = getattr(self, name)
            values[name] = None if value is None else value._asdict()
        values = {key: _finite_or_none(value) for key, value in values.items()}
        return {
            "format": EXPLANATION_FORMAT,
            **values,
            "nonfinite": [list(pair) for pair in self.nonfinite],
            "broken_first": self.broken_first,
            "only_nan": self.only_nan,
            "loss_finite": self.loss_finite,
            "lower_scale_helped": self.lower_scale_helped,
            "text": str(self),
        }

    def __str__(self) -> str:
        """Return it in sentences, one in each line."""
        from lossscale.diagnostics.explanation.wording import describe  # noqa: PLC0415

        return "\n".join(describe(self))


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
