# SPDX-License-Identifier: Apache-2.0
"""What to try, in words: only what follows from what a run shows."""

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING

from lossscale.diagnostics.report.wording import number, percent

if TYPE_CHECKING:
    from lossscale.diagnostics.report.summary import Summary

_MANY = 0.05
_FEW_BITS = 1.0
_NARROW = ("float16", "float8_e5m2", "float8_e4m3")
"""The formats whose range a scale is for."""


def give_advice(run: "Summary") -> Iterator[str]:
    """Yield what to try, the most important first."""
    if not run.steps:
        yield "No step was recorded. Check that the recorder is called after each step."
        return
    parts = (
        *(_about_alarms, _about_nan, _about_skips, _about_underflow, _about_updates),
        _about_scale,
    )
    advice = [text for part in parts for text in part(run)]
    yield from advice or [_nothing_to_change(run)]
    yield from _about_record(run)


def _nothing_to_change(run: "Summary") -> str:
    if not run.skipped:
        return "Nothing to change: no step was skipped."
    were = "was" if run.skipped == 1 else "were"
    times = "once" if run.growths == 1 else f"{run.growths:,} times"
    skipped = f"Nothing to change: {_steps(run.skipped)} {were} skipped"
    if run.growths:
        skipped += f" while the scale grew {times}"
    if run.backoffs or run.growths:
        return f"{skipped}, which is how a dynamic scale finds its limit."
    return f"{skipped} for an overflow."


def _about_alarms(run: "Summary") -> Iterator[str]:
    kinds = list(dict.fromkeys(alarm.kind for alarm in run.alarms))
    good = [a.last_good_step for a in run.alarms if a.last_good_step is not None]
    if good:
        yield (
            f"Keep a checkpoint of step {min(good):,} or earlier: its weights are the "
            "last that are known to be good."
        )
    # What came first led to the rest.
    yield from dict.fromkeys(
        _NAN_LATER if kind == "nan" and index else _ADVICE[kind]
        for index, kind in enumerate(kinds)
    )


_GROWING = (
    "The gradients were growing. Lower the learning rate or lengthen its warm-up, and "
    "clip by the norm; a lower scale only delays the overflow."
)
_LOOK_FOR_NAN = (
    "Look for it in the forward pass: a division by zero, a logarithm or square root "
    "of a number that is not positive, an attention row that is masked completely."
)
_ADVICE = {
    "back-offs": _GROWING,
    "headroom": _GROWING,
    "norm": _GROWING,
    "floor": (
        "The scale cannot go lower, and steps still overflow. Clip the gradients, "
        "lower the learning rate, or keep the layers named below in float32 or "
        "bfloat16."
    ),
    "nan": (
        "NaN without an infinity, or a loss that is not finite, does not come from the "
        f"scale. {_LOOK_FOR_NAN}"
    ),
}
_NAN_LATER = (
    "NaN came after the first alarm: by then the weights were broken, and no scale "
    "could help."
)


def _about_nan(run: "Summary") -> Iterator[str]:
    """Say what a NaN means that no alarm was raised for."""
    if "nan" in {alarm.kind for alarm in run.alarms}:
        return
    if run.last_loss is not None and isnan(run.last_loss):
        yield (
            "The loss was not finite at the end: the weights are broken, and no scale "
            "can help. Go back to a checkpoint from before the first such loss, and "
            "lower the learning rate or look for the cause in the forward pass."
        )
    elif run.causes.get("nan") and _was_ended_by_the_scale(run):
        yield (
            f"{_steps(run.causes['nan'])} had NaN in the gradients, as an overflow "
            "makes it (infinity less infinity). Each time a lower scale ended it, and "
            "the scale has grown since: there is no sign of another cause."
        )
    elif run.causes.get("nan"):
        yield (
            f"{_steps(run.causes['nan'])} had NaN in the gradients. An overflow makes "
            "NaN as well (infinity less infinity), which a lower scale ends. A NaN "
            f"that comes back at lower scales is another. {_LOOK_FOR_NAN}"
        )


def _was_ended_by_the_scale(run: "Summary") -> bool:
    """Whether NaN came with overflows, each of which a lower scale ended.

    A NaN of the forward pass comes back at every scale, so that the scale falls.
    """
    infinite, nan = (run.causes.get(cause, 0) for cause in ("inf", "nan"))
    lowered = run.skipped <= run.backoffs <= run.growths
    return nan <= infinite and lowered and not run.alarms


def _about_skips(run: "Summary") -> Iterator[str]:
    if run.causes.get("loss") and "nan" not in {alarm.kind for alarm in run.alarms}:
        yield (
            f"{_steps(run.causes['loss'])} had a loss that was not finite before it "
            "was scaled, so the scale is not the cause: check the batch and the "
            "forward pass."
        )
    if run.causes.get("headroom"):
        yield (
            f"{_steps(run.causes['headroom'])} had gradients that are finite and too "
            "large for the optimizer to square: clip them."
        )
    if run.causes.get("not stepped"):
        yield (
            f"{_steps(run.causes['not stepped'])} had finite gradients, and the "
            "optimizer did not step: it was not called, or it raised."
        )
    overflows = run.causes.get("inf", 0)
    if overflows > _MANY * run.steps and overflows > run.backoffs:
        yield (
            f"{overflows / run.steps:.1%} of the steps overflowed. Each of them costs "
            "a batch: start from a lower scale, or lengthen the growth interval."
        )
    if run.tensors and (run.alarms or run.skipped_share > _MANY):
        yield from _about_tensors(run)


def _about_tensors(run: "Summary") -> Iterator[str]:
    worst = run.tensors[0]
    text = f"{worst.name} was not finite most often, in {_steps(worst.inf + worst.nan)}"
    if run.bracket is not None:
        step, broken, finite = run.bracket
        text += (
            f". At step {step:,} the backward pass had {finite} finite, and {broken} "
            "no longer: look between these two"
        )
    yield f"{text}."


def _about_underflow(run: "Summary") -> Iterator[str]:
    if run.dtype not in _NARROW or (run.lost_share or 0.0) <= _MUCH:
        return
    text = (
        f"{percent(run.lost_share or 0.0)} of the stored gradients were zero or "
        "subnormal when they were measured last"
    )
    if run.largest_magnitude == 0.0:
        text += ", and no gradient was above zero in any step: nothing was learned"
    fixed = run.policy.get("kind") == "fixed"
    way = "use a dynamic scale, or a higher fixed one" if fixed else "start higher"
    yield f"{text}. Raise the scale: {way}."


_MUCH = 0.5


def _about_updates(run: "Summary") -> Iterator[str]:
    updates = run.updates
    if updates is None or updates.worst is None:
        return
    worst, others = updates.worst, updates.unkept - 1
    also = ""
    if others:
        tensors = "1 other tensor" if others == 1 else f"{others:,} other tensors"
        also = f", and more than half of {tensors}"
    # What to do comes first: Markdown cuts long lines.
    yield (
        f"Use master_weights=True: the update of step {updates.step:,} was rounded "
        f"away in {worst.dtype} for {percent(worst.lost)} of {worst.name}{also}."
    )


def _about_scale(run: "Summary") -> Iterator[str]:
    fixed = run.policy.get("kind") == "fixed"
    low = run.lowest_headroom
    unused = run.dtype in _NARROW and low is not None and low > 4 * _FEW_BITS
    if not run.skipped and fixed and unused:
        yield (
            f"The largest gradient left {low:.1f} bits of headroom throughout: a scale "
            f"{number(2.0 ** (int(low or 0) - 1))} times higher would lose less to "
            "underflow."
        )
    infinite = run.causes.get("inf", 0) > run.skipped / 2
    if infinite and run.last_scale is not None and run.last_scale < 1.0 and not fixed:
        yield (
            f"The scale ended at {number(run.last_scale)}. Below 1 it no longer "
            "protects small gradients: those of this run are too large for their "
            "format."
        )


def _about_record(run: "Summary") -> Iterator[str]:
    if run.largest_magnitude is None:
        yield (
            "Headroom is not shown because no largest magnitude was recorded: pass "
            "amax, or ask the scaler to measure it."
        )


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
