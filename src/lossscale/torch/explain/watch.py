# SPDX-License-Identifier: Apache-2.0
"""`OperatorWatch`: inspects what every operator reads and writes.

It records operators whose results are not finite, and which of them read the results of
which others.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.core.headroom import LARGEST
from lossscale.torch.explain import magnitudes
from lossscale.torch.explain.epsilons import LostEpsilons
from lossscale.torch.explain.events import Event, Site
from lossscale.torch.explain.kinds import address_of, covers_storage, kind_of
from lossscale.torch.explain.losses import LossCount
from lossscale.torch.explain.modules import ModuleTracker, Names
from lossscale.torch.explain.operators import (
    Arguments,
    Inputs,
    collective_inputs,
    has_known_results,
    is_allocation,
    keep_inputs,
    tensors_in,
    written_tensors,
)
from lossscale.torch.explain.origins import BILINEAR, find_origin, plain_name
from lossscale.torch.explain.trail import Arrival, Moment, Reading, Trail
from lossscale.torch.torch_internals import current_node, is_mutable


class OperatorWatch(TorchDispatchMode):
    """Records the operators whose results are not finite."""

    def __init__(
        self, model: torch.nn.Module | None, names: Names, tracker: ModuleTracker
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.losses = LossCount()
        self._trail = Trail(model, names)
        self._epsilons = LostEpsilons()
        self._unread: set[str] = set()
        """Operators whose results could not be read."""
        self._names = names
        self._tracker = tracker
        tracker.on_exit = self._mark_outputs
        tracker.on_enter_outermost = self.losses.note_module

    def notes(self) -> tuple[str, ...]:
        """Return what could not be seen."""
        if not self._unread:
            return ()
        names = ", ".join(sorted(self._unread))
        return (f"The results of these operators could not be read: {names}.",)

    def event_of(self, tensor: torch.Tensor) -> Event | None:
        """Return the event that wrote a tensor, or that found it."""
        kind = kind_of(tensor)
        if kind is None:
            return None
        reading = Reading(tensor, kind, address_of(tensor))
        return self._trail.parent_of(reading, self._moment_of_given(None))

    # -- one operator ------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and inspect its results."""
        kwargs = kwargs or {}
        node = current_node()
        is_backward = self._tracker.enter_operator(node)
        if is_backward:
            self.losses.note_backward()
        if _is_capturing() or func.__name__.startswith(_OF_OPTIMIZERS):
            return func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            return self._run_collective(func, args, kwargs)
        with torch.no_grad():
            inputs = keep_inputs(func, args, kwargs)
        results = func(*args, **kwargs)
        if is_allocation(func):
            for tensor in tensors_in(results):
                self._trail.forget(address_of(tensor))
        elif not has_known_results(func):
            written = results
            if is_mutable(func) and not tensors_in(results):
                written = written_tensors(func, args, kwargs)
            try:
                with torch.no_grad():
                    self._inspect(func, inputs, written, node, is_backward=is_backward)
            except _UNREADABLE:
                self._unread.add(plain_name(func))
        return results

    def _run_collective(
        self, func: Any, args: Arguments, kwargs: dict[str, Any]
    ) -> Any:
        """Run a collective, and note what it read: what it writes is made of that."""
        name = plain_name(func)
        if name == "wait_tensor":
            return func(*args, **kwargs)
        parents: tuple[Event, ...] = ()
        try:
            with torch.no_grad():
                found = map(self.event_of, collective_inputs(func, args, kwargs))
                parents = tuple(event for event in found if event is not None)
        except _UNREADABLE:
            self._unread.add(name)
        results = func(*args, **kwargs)
        self._trail.note_arrival(
            tensors_in((args, kwargs, results)), Arrival(name, parents)
        )
        return results

    def _inspect(
        self,
        func: Any,
        inputs: Inputs,
        results: Any,
        node: Any,
        *,
        is_backward: bool,
    ) -> None:
        """Record an event if a result is not finite."""
        event: Event | None = None
        for index, tensor in enumerate(tree_flatten(results)[0]):
            if not isinstance(tensor, torch.Tensor):
                continue
            kind = kind_of(tensor)
            address = address_of(tensor)
            if kind is None:
                # A part of the storage may still hold what another operator wrote.
                if not is_mutable(func) or covers_storage(tensor):
                    self._trail.forget(address)
                self._epsilons.note(plain_name(func), inputs, tensor, address)
                continue
            if event is None:
                event = self._record(
                    func, inputs, tensor, kind, index, node, is_backward=is_backward
                )
            self._trail.keep(event, address)
        if func.__name__.startswith("all_gather_copy_in"):
            self._trail.note_gathered(tensors_in(results))

    def _record(
        self,
        func: Any,
        inputs: Inputs,
        result: torch.Tensor,
        kind: Kind,
        index: int,
        node: Any,
        *,
        is_backward: bool,
    ) -> Event:
        """Record what an operator wrote that was not finite."""
        given = [
            Reading(tensor, found, inputs.address_of(tensor))
            for tensor in inputs.read_tensors()
            if (found := kind_of(tensor)) is not None
        ]
        name = plain_name(func)
        site = self._site(node, is_backward=is_backward)
        address = address_of(result)
        moment = self._moment_of_given(site)
        parents = [self._trail.parent_of(one, moment, address) for one in given]
        before = self._trail.find(address)
        if is_mutable(func) and before is not None and not covers_storage(result):
            parents.append(before)  # of the rest of the storage
        origin: Origin | None = None
        magnitude = None
        dtype = _name_dtype(result)
        largest = LARGEST.get(dtype)
        if kind.nan and name == "sub" and any(map(_is_masked_row, parents)):
            origin = "row of -inf"
        elif not given or (kind.nan and not any(one.kind.nan for one in given)):
            origin = find_origin(
                name, inputs.args, inputs.kwargs, kind, is_given=bool(given)
            )
            if not given and origin in ("unknown", "0 / 0"):
                magnitude = magnitudes.measure_wide(
                    func, inputs.args, inputs.kwargs, index
                )
                origin = _judge(origin, name, kind, magnitude, largest or 0.0)
        event = Event(
            len(self._trail.events),
            name,
            kind,
            origin,
            tuple(dict.fromkeys(parents)),
            site,
            node=_name_node(node) if is_backward else None,
            node_number=_number_node(node) if is_backward else None,
            is_backward=is_backward,
            is_passive=name in _PASSIVE,
            loss=moment.loss,
            dtype=dtype,
            largest=largest,
        )
        if origin == "overflow":
            is_known = magnitude is not None and magnitude > (largest or 0.0)
            event.magnitude = magnitude if is_known else None
        if origin in ("division by zero", "0 / 0", "log of 0"):
            event.lost_epsilon = self._epsilons.find(name, inputs)
        if is_backward:
            is_input = self._tracker.leaves_module(node, site)
            event.role = "input gradient" if is_input else "intermediate gradient"
        elif name == "to" and not self._tracker.is_users_cast():
            self._describe_cast(event, inputs)
        self._trail.events.append(event)
        return event

    def _describe_cast(self, event: Event, inputs: Inputs) -> None:
        """Say what was cast: autocast casts the inputs of a layer, and its weights."""
        source = next(iter(inputs.read_tensors()))
        owner = self._trail.owner_of(source)
        if owner is None:
            event.role = "input"
        else:
            event.role, event.tensor = owner

    def _moment_of_given(self, site: Site | None) -> Moment:
        """Return where the run is, for what no operator of it wrote."""
        number = self.losses.position(is_backward=current_node() is not None)
        return Moment(site, self._tracker.is_backward, number)

    def _site(self, node: Any, *, is_backward: bool) -> Site | None:
        """Return where the forward pass ran what this is part of."""
        if not is_backward:
            return self._tracker.here()
        variable = getattr(node, "variable", None)
        if variable is not None:
            return Site(self._names.owner_of(variable), None)
        return self._tracker.site_of(node)

    def _mark_outputs(self, module: torch.nn.Module, outputs: Any) -> None:
        """Note which events wrote the outputs of a module."""
        if not self._trail.events:
            return
        for tensor in tensors_in(outputs):
            event = self._trail.find(address_of(tensor))
            if event is None or event.site is None or event.is_backward:
                continue
            if event.site.module is module and event.role == "intermediate":
                event.role = "output"


def _is_masked_row(event: Event) -> bool:
    """Whether it is the maximum of rows of which one is -inf entirely."""
    return event.operation in ("amax", "max") and event.kind.is_mask


def _judge(
    origin: Origin, name: str, kind: Kind, magnitude: float | None, largest: float
) -> Origin:
    """Return the origin, now that it is known what float64 gives."""
    size = math.nan if magnitude is None else magnitude
    is_finite = math.isfinite(size)
    if kind.nan and not largest < size < math.inf:
        # Sums that overflowed in both directions on the way.
        return "inf - inf" if is_finite and name in _SUMMING else origin
    return "overflow" if is_finite or name in _GROWING else origin


def _name_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name_node(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


def _number_node(node: Any) -> int:
    return int(node._sequence_nr())  # noqa: SLF001


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_UNREADABLE = (RuntimeError, TypeError, NotImplementedError)
"""A tensor of a kind that cannot be read must not stop a training."""

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_OF_OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")
"""Operators that check gradients and update weights, after the backward pass."""

_PASSIVE = frozenset(
    {
        *("to", "clone", "copy", "sum", "add", "detach", "view", "reshape", "stack"),
        *("cat", "chunk_cat"),
    }
)
"""Operators by which the gradient of a parameter reaches it unchanged, or in a sum."""

_GROWING = frozenset(
    {"exp", "exp2", "expm1", "sinh", "cosh", "square", "mul", "pow", "cumprod", "prod"}
)
"""Operators that can leave float64 as well."""

_SUMMING = frozenset({*BILINEAR, "sum", "mean", "cumsum", "add"})
"""Operators that add up numbers that may have overflowed before."""
