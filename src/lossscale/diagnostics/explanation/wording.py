# SPDX-License-Identifier: Apache-2.0
"""What a record says about a skipped step, in sentences."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lossscale.diagnostics.report.markdown import printable
from lossscale.diagnostics.report.wording import number

if TYPE_CHECKING:
    from lossscale.diagnostics.explanation.evidence import RunExplanation

_FALLING = 1.0
"""How many bits of headroom have to go before a trend is said to fall."""

_FEW = 1.0
"""With fewer bits of headroom, twice the gradient overflows."""

_SHOWN = 5


def describe(case: "RunExplanation") -> list[str]:
    """Return sentences; the last says what the record cannot show."""
    if case.step is None:
        return ["No step of this run was skipped: there is nothing to explain."]
    writers = (_what, _where, _why, _before, _after, _weights, _limits)
    sentences = [text for write in writers for text in write(case)]
    # A name may hold anything: each sentence stays in its line, and is text.
    return [printable(" ".join(text.split())) for text in sentences]


def _what(case: "RunExplanation") -> Iterator[str]:
    text = f"Step {case.step:,} was skipped at a scale of {number(case.scale)}"
    causes = {
        "inf": "a gradient was infinite",
        "nan": "a gradient was NaN",
        "headroom": "a finite gradient was too large for the optimizer to square",
        "loss": "the loss was not finite before it was scaled",
        "not stepped": "the scaler's step was not called for it",
    }
    yield f"{text}: {causes.get(case.cause or '', 'the record does not say why')}."
    if case.first_skipped is not None and case.first_skipped != case.step:
        yield (
            f"It is not the first: of {case.skipped:,} skipped steps the first was "
            f"{case.first_skipped:,}."
        )


def _where(case: "RunExplanation") -> Iterator[str]:
    if not case.nonfinite:
        return
    names = [f"{name} ({kind})" for name, kind in case.nonfinite[-_SHOWN:]][::-1]
    more = len(case.nonfinite) - len(names)
    suffix = f" and {more:,} more" if more else ""
    yield f"Not finite, in the order of the backward pass: {', '.join(names)}{suffix}."
    if case.loss_finite is False:
        return  # the gradients follow from the loss: none of them broke
    if case.nearest_finite is not None:
        yield (
            f"The backward pass still had the gradient of {case.nearest_finite} "
            f"finite, and that of {case.broken_first} no longer: it broke between "
            "these two."
        )
    elif case.at_the_end:
        yield (
            f"{case.broken_first} is the last tensor of the model, next to the loss: "
            "it broke between these two."
        )


def _why(case: "RunExplanation") -> Iterator[str]:
    if case.loss_finite is False:
        yield (
            f"The loss of the step was {_loss(case)}. The scale is not the cause: "
            "look in the batch and in the forward pass."
        )
    elif case.only_nan:
        yield (
            "There was NaN and no infinity. An overflow starts as an infinity, so a "
            "lower scale cannot help: look for a division by zero, or a logarithm or "
            "root outside its domain."
        )
    elif case.cause == "nan" and case.nonfinite:
        yield (
            "There were infinities as well as NaN: NaN can follow from an infinity, "
            "as inf - inf or inf * 0."
        )
    elif case.cause == "headroom":
        yield "The unscaled gradient itself is that large: clip it; no scale helps."


def _loss(case: "RunExplanation") -> str:
    return "not finite" if case.loss is None else number(case.loss)


def _before(case: "RunExplanation") -> Iterator[str]:
    if case.trend is not None:
        trend = case.trend
        fall = trend.first - trend.last
        span = f"from step {trend.first_step:,} to {trend.last_step:,}"
        bits = f"from {trend.first:.1f} to {trend.last:.1f} bits"
        if fall >= _FALLING:
            text = f"The headroom had been falling: {bits}, {span}."
        elif trend.lowest < _FEW:
            text = (
                f"The headroom was small before: {trend.lowest:.1f} bits at the "
                f"least, {span}."
            )
        else:
            text = (
                f"The headroom gave no warning: {bits}, {span}, and "
                f"{trend.lowest:.1f} bits at the least."
            )
        yield text
    if case.sample is not None:
        yield (
            f"At step {case.sample.step:,}, when it was measured last, "
            f"{case.broken_first} had {case.sample.headroom:.1f} bits of headroom."
        )


def _after(case: "RunExplanation") -> Iterator[str]:
    if case.recovery is None:
        yield f"No step was applied after it: {_count(case)} to the end of the record."
        return
    start = (
        f"{_count(case)}, then step {case.recovery.step:,} was applied at a scale of "
        f"{number(case.recovery.scale)}"
    )
    is_beyond_scale = case.only_nan or case.loss_finite is False
    if not case.lower_scale_helped:
        yield f"{start}: the scale was not lower, so the cause was in the batch."
    elif is_beyond_scale:
        yield (
            f"{start}. The scale had been lowered, which does not explain it: it was "
            "another batch."
        )
    else:
        yield f"{start}: with a lower scale, the next batch was finite."
    again = None if is_beyond_scale else case.same_scale_again
    if case.lower_scale_helped and again is not None:
        yield (
            f"Step {again:,} was applied at that scale again, or at a "
            "higher one: the gradients were this large for a while only."
        )


def _count(case: "RunExplanation") -> str:
    if case.skips_in_a_row == 1:
        return "One step was skipped"
    return f"{case.skips_in_a_row:,} steps in a row were skipped"


def _weights(case: "RunExplanation") -> Iterator[str]:
    if case.alarm is not None and case.alarm_step is not None:
        yield f"The run's first alarm is {case.alarm!r}, at step {case.alarm_step:,}."
    if case.last_good_step is None:
        yield "No step before it is known to have left good weights."
    else:
        yield (
            f"The last step before it whose weights are known to be good is "
            f"{case.last_good_step:,}."
        )


def _limits(case: "RunExplanation") -> Iterator[str]:
    missing = []
    if not case.nonfinite and case.cause in ("inf", "nan", "headroom"):
        missing.append("names of tensors (give the recorder names=)")
    if case.trend is None and case.sample is None:
        missing.append("largest magnitudes (measure amax)")
    if case.loss_finite is None:
        missing.append("the loss")
    if missing:
        yield f"The record does not have {_join(missing)}."
    yield (
        "A record cannot show activations, the operation that failed, or whether the "
        "same batch is finite at a lower scale: for these, run the batch again with "
        "the explain function of your framework."
    )


def _join(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
