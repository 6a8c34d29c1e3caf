# SPDX-License-Identifier: Apache-2.0
"""What a record does not show, and on what a backtest rests: in sentences."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from lossscale.diagnostics.unmeasured import explain_unmeasured

if TYPE_CHECKING:
    from lossscale.core.policies import Policy
    from lossscale.diagnostics.backtests.outcome import Material


def list_remarks(
    material: "Material", policies: "Mapping[str, Policy]"
) -> Iterator[str]:
    """Yield what the results are worth, the most important first."""
    yield (
        "The gradients are those of the recorded training. That it would have gone on "
        "otherwise after other skips is not in the record."
    )
    yield from _about_magnitudes(material)
    # Where some are missing they are filled in.
    known = int((~np.isnan(material.limits.magnitudes)).any())
    yield from explain_unmeasured(policies, measured=known, steps=known)
    yield from _about_skips(material)
    yield from _about_lost(material)


def _about_magnitudes(material: "Material") -> Iterator[str]:
    steps, gap = material.steps, material.limits.gap
    finite = int(steps.finite.sum())
    measured = int((steps.finite & ~np.isnan(steps.magnitudes)).sum())
    if not measured:
        yield (
            "No largest magnitude was recorded, so nothing says at which other scales "
            "a step would have overflowed. Steps are taken to overflow at the scale at "
            "which the nearest one did: the result is hardly more than the recorded "
            "run again. Record amax with every step; PyTorch's GradScaler measures "
            "it on a CPU if measure_amax=True is passed."
        )
        return
    if measured < finite:
        yield (
            f"{measured:,} of {finite:,} finite steps have a largest magnitude; the "
            "others are taken to be like those next to them."
        )
    if not gap.overflows:
        yield (
            "No step overflowed, so the record does not show how much less than the "
            "weights' gradients those inside the network leave: they may overflow "
            "first. The likely result is that of the weights' gradients; the bounds "
            "are for gradients inside that overflow "
            f"up to {gap.most:.1f} bits earlier."
        )
    elif gap.likely > 0.0:
        yield (
            f"{gap.explained:,} of {_count(gap.overflows, 'overflow')} occurred where "
            "the largest gradient of the weights was below the maximum of "
            f"{material.dtype}: gradients inside the network overflow first. A step is "
            f"taken to overflow when the largest gradient is within {gap.likely:.1f} "
            f"bits of the maximum ({gap.least:.1f} to {gap.most:.1f})."
        )
    else:
        yield (
            "The overflows agree with the largest gradient of the weights. Gradients "
            f"inside the network that overflow up to {gap.most:.1f} bits earlier "
            "would agree with them too; the bounds allow for them."
        )


def _about_skips(material: "Material") -> Iterator[str]:
    steps = material.steps
    hopeless = int(material.limits.hopeless.sum())
    if hopeless:
        yield (
            f"{_count(hopeless, 'skipped step')} had a loss that was not finite, or "
            "NaN that no back-off ended: no scale helps there, and every policy skips "
            "them."
        )
    held = int(steps.held.sum())
    if held:
        yield (
            f"{_count(held, 'skipped step')} had finite gradients that are too large "
            "for the optimizer: every policy skips them and keeps its scale."
        )
    missed = int(steps.skipped_by("not stepped").sum())
    if missed:
        yield (
            f"{_count(missed, 'step')} whose gradients were finite had no call of "
            "step; they count as finite steps, not as skipped."
        )


def _about_lost(material: "Material") -> Iterator[str]:
    if material.samples:
        yield (
            "Lost values are from the exponents of "
            f"{_count(len(material.samples), 'sampled step')}. Zeros of the record may "
            "be zero indeed or lost there already: with them it is the higher number."
        )
    else:
        yield (
            "Lost values are not known: the record has no statistics of its tensors. "
            "Pass names to the recorder, or record_statistics."
        )


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
