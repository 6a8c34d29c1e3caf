# SPDX-License-Identifier: Apache-2.0
"""From events to the first one that matters.

What is not finite at the end is traced back to what it was made of. The first event on
the way is the cause, except that masks are filled with infinities on purpose: there it
is the first operator that made something else of them.
"""

from collections.abc import Iterable
from dataclasses import replace

from lossscale.core.explanation.findings import Direction, Finding, Role
from lossscale.torch.explain.events import Event
from lossscale.torch.explain.gradients import GradientWatch
from lossscale.torch.explain.modules import Names


def find_causes(ends: Iterable[Event]) -> tuple[Event | None, Event | None]:
    """Return the first cause of some events, and where a NaN was made of it.

    Args:
        ends: The events that wrote what is not finite at the end.

    Returns:
        The first cause; and the first NaN, unless the cause is one or there is none.
    """
    causes = [event for event in _ancestors(ends) if event.origin is not None]
    strong = [event for event in causes if not event.is_deliberate] or causes
    if not strong:
        return None, None
    first = min(strong, key=_index)
    nans = [event for event in strong if event.kind.nan]
    if first.kind.nan or not nans:
        return first, None
    return first, min(nans, key=_index)


def _ancestors(ends: Iterable[Event]) -> set[Event]:
    """Return events and all that their results were made of."""
    ancestors: set[Event] = set()
    waiting = list(ends)
    while waiting:
        event = waiting.pop()
        if event not in ancestors:
            ancestors.add(event)
            waiting += event.parents
    return ancestors


def _index(event: Event) -> int:
    return event.index


def describe(
    event: Event,
    names: Names,
    gradients: GradientWatch,
    loss: Event | None,
    micro_batches: int,
) -> Finding:
    """Return an event as a finding.

    Args:
        event: The event.
        names: The names of the model.
        gradients: The gradients of its parameters.
        loss: The event that wrote the loss.
        micro_batches: How many losses were scaled.
    """
    role, tensor = _role_of(event, gradients, loss)
    module = None if event.site is None else event.site.module
    direction: Direction = "backward" if event.is_backward else "forward"
    if event.origin in ("batch", "parameter", "buffer"):
        direction = "given"
    finding = Finding(
        direction=direction,
        role=role,
        origin=event.origin or "unknown",
        is_nan=event.kind.nan,
        tensor=tensor,
        module=names.of_module(module),
        module_type=None if module is None else _type_name(module),
        operation=event.operation or None,
        node=event.node,
        dtype=event.dtype,
        magnitude=event.magnitude,
        largest=event.largest,
        line=None if event.site is None else event.site.line,
        micro_batch=event.micro_batch if micro_batches > 1 else None,
    )
    if role == "parameter gradient" and tensor is not None and module is None:
        return replace(finding, module=tensor.rpartition(".")[0])
    return finding


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
        if not current.is_passive or len(current.parents) != 1:
            return False
        if not is_own and current.node not in _COPYING_NODES:
            return False
        current = current.parents[0]
    return True


_COPYING_NODES = ("AccumulateGrad", "ToCopyBackward0", "TBackward0", "ViewBackward0")
"""What is between the operator that makes a parameter's gradient and the parameter."""


def _type_name(module: object) -> str:
    """Return the class of a module; FSDP2 gives it a prefix."""
    return type(module).__name__.removeprefix("FSDP")


def arrived_from_ranks(name: str, is_nan: bool) -> Finding:
    """Return a finding of a gradient that was finite until the ranks added it up."""
    return Finding(
        direction="backward",
        role="parameter gradient",
        origin="another rank",
        tensor=name,
        module=name.rpartition(".")[0],
        is_nan=is_nan,
    )
