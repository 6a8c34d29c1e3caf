# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that updates the scale by a policy that remembers or measures.

Its source is written from the policy's own step, so that the formula is in one place.
"""

import linecache
from itertools import count

import triton
import triton.language as tl

from lossscale.core.policies import Policy
from lossscale.torch.inspection.kernels.launch import Kernel
from lossscale.torch.inspection.kernels.policy_trace import trace_step
from lossscale.torch.inspection.kernels.scale_update import count_step, note_loss
from lossscale.torch.inspection.summary import AMAX, NAN, NORM

_HEAD = """\
def advance_policy(
    {pointers},
    counters,
    flags,
    held_by_loss_pointer,
    loss_pointer,
    summary,
    measured,
    skipped_at: tl.constexpr,
    too_large_at: tl.constexpr,
    notes_loss: tl.constexpr,
):
    {loads}
    finite = tl.load(flags) == 0.0
    skipped = tl.load(flags + skipped_at) != 0.0
    too_large = tl.load(flags + too_large_at) != 0.0
"""
_LOSS = """\
    loss_finite = tl.load(held_by_loss_pointer) == 0.0
"""
_MEASUREMENTS = f"""\
    nan = tl.load(measured + {NAN}) != 0.0
    amax = tl.load(measured + {AMAX})
    norm = tl.load(measured + {NORM})
"""
_TAIL = """\
    {lines}
    {stores}
    if notes_loss:
        note_loss(loss_pointer, summary)
    count_step(counters, skipped)
"""

_numbers = count()


def write_source(policy: Policy, *, has_loss: bool, has_measurements: bool) -> str:
    """Return the source text of a policy's kernel.

    Its arguments are those of `scale_update.update_scale`, with a pointer for each
    field of the policy's state, and the summary that has the measurements.

    Args:
        policy: The policy.
        has_loss: Whether `held_by_loss_pointer` says whether the loss was finite.
        has_measurements: Whether `measured` has been measured.

    Raises:
        TypeError: If the policy does more than operators and `where` can.
    """
    lines, results = trace_step(
        policy, has_loss=has_loss, has_measurements=has_measurements
    )
    fields = policy.init()._fields
    pointers = [f"{field}_pointer" for field in fields]
    loads = [f"{field} = tl.load({field}_pointer)" for field in fields]
    pairs = zip(pointers, results, strict=True)
    stores = [f"tl.store({pointer}, {result})" for pointer, result in pairs]
    source = _HEAD.format(pointers=",\n    ".join(pointers), loads="\n    ".join(loads))
    source += _LOSS if has_loss else ""
    source += _MEASUREMENTS if has_measurements else ""
    return source + _TAIL.format(
        lines="\n    ".join(lines), stores="\n    ".join(stores)
    )


def make_kernel(policy: Policy, *, has_loss: bool, has_measurements: bool) -> Kernel:
    """Return the kernel of a policy; see `write_source`."""
    source = write_source(policy, has_loss=has_loss, has_measurements=has_measurements)
    # Triton reads the text of a function; Python finds it in this cache, as it does
    # for functions that `dataclasses` and doctest make.
    filename = f"<kernel {next(_numbers)} of {type(policy).__name__}>"
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename
    names = {
        "__name__": __name__,
        "tl": tl,
        "count_step": count_step,
        "note_loss": note_loss,
    }
    exec(compile(source, filename, "exec"), names)  # noqa: S102  # our own text
    return triton.jit(names["advance_policy"])
