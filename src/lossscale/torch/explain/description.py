# SPDX-License-Identifier: Apache-2.0
"""What is said of an event: it becomes a finding."""

from dataclasses import replace

from lossscale.core.explanation.causes import find_causes
from lossscale.core.explanation.findings import Direction, Finding, Role
from lossscale.torch.distributed.rank_groups import is_running
from lossscale.torch.explain.events import Event
from lossscale.torch.explain.gradients import GradientWatch, LateGradient
from lossscale.torch.explain.losses import LossCount
from lossscale.torch.explain.modules import Names
from lossscale.torch.half_precision.mixed_norms import is_mixed


def describe(
    event: Event,
    names: Names,
    gradients: GradientWatch,
    loss: Event | None,
    count: LossCount,
) -> Finding:
    """Return an event as a finding.

    Args:
        event: The event.
        names: The names of the model.
        gradients: The gradients of its parameters.
        loss: The event that wrote the loss.
        count: How many losses there were.
    """
    role, tensor = _role_of(event, gradients, loss)
    module = None if event.site is None else event.site.module
    direction: Direction = "backward" if event.is_backward else "forward"
    if event.operation is None and (role in _GIVEN or event.origin in _GIVEN):
        direction = "given"
    finding = Finding(
        direction=direction,
        role=role,
        origin=event.origin or "unknown",
        is_nan=event.kind.nan,
        tensor=tensor,
        module=names.of_module(module),
        module_type=None if module is None else _type_name(module),
        operation=event.operation,
        node=event.node,
        dtype=event.dtype,
        magnitude=event.magnitude,
        largest=event.largest,
        line=None if event.site is None else event.site.line,
        lost_epsilon=event.lost_epsilon,
    )
    if count.count > 1:
        number = min(event.loss, count.count - 1)
        is_part = count.are_micro_batches
        finding = (
            replace(finding, micro_batch=number)
            if is_part
            else replace(finding, loss=number)
        )
    if role == "parameter gradient" and tensor is not None and module is None:
        return replace(finding, module=tensor.rpartition(".")[0])
    return finding


_GIVEN = ("batch", "parameter", "buffer", "constant")
"""What was there before the batch was run."""


def _role_of(
    event: Event, gradients: GradientWatch, loss: Event | None
) -> tuple[Role, str | None]:
    """Return what the tensor of an event is, and its name."""
    if event is loss and event.origin != "batch":
        return "loss", None
    if not event.is_backward:
        return event.role, event.tensor
    for name, end in gradients.nonfinite.items():
        if end is not None and _is_passed_to(event, end):
            return "parameter gradient", name
    return event.role, event.tensor


def _is_passed_to(event: Event, end: Event) -> bool:
    """Whether what one event wrote became a gradient by copies and sums alone.

    The sums are those of one node, as for the gradient of a bias.
    """
    current = end
    while current is not event:
        is_own = current.node_number == event.node_number
        if not current.is_passive or len(current.bad_parents) != 1:
            return False
        if not is_own and current.node not in _COPYING_NODES:
            return False
        current = current.bad_parents[0]
    return True


_COPYING_NODES = ("AccumulateGrad", "ToCopyBackward0", "TBackward0", "ViewBackward0")
"""What is between the operator that makes a parameter's gradient and the parameter."""


def _type_name(module: object) -> str:
    """Return the class of a module; FSDP2 and `to_float16` give it prefixes."""
    name = type(module).__name__.removeprefix("FSDP")
    return name.removeprefix("Mixed") if is_mixed(module) else name


def describe_late(name: str, late: LateGradient) -> Finding:
    """Return a finding of a gradient that was finite when it was made.

    The ranks added it up, or a hook or the caller's code changed it.
    """
    finding = Finding(
        direction="backward",
        role="parameter gradient",
        origin="another rank",
        tensor=name,
        module=name.rpartition(".")[0],
        is_nan=late.has_nan,
    )
    cause, _ = find_causes([late.event] if late.event else [])
    is_local = cause is not None and cause.operation is not None
    if is_running() and not is_local:
        return finding
    finding = replace(finding, origin="changed afterwards")
    if cause is None or not is_local:
        return finding
    return replace(
        finding,
        operation=cause.operation,
        dtype=cause.dtype,
        line=None if cause.site is None else cause.site.line,
    )
