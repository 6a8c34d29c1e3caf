# SPDX-License-Identifier: Apache-2.0
"""`OperatorWatch`: inspects what every operator reads and writes.

It records operators whose results are not finite, and which of them read the results of
which others. A result is known by the address of its storage: each operator that writes
to it renews what is known of that address, so that no tensor is kept alive.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lossscale.core.explanation.findings import Role
from lossscale.core.explanation.origins import Origin
from lossscale.core.headroom import LARGEST
from lossscale.torch.explain import magnitudes
from lossscale.torch.explain.events import Event, Site
from lossscale.torch.explain.kinds import Kind, address_of, is_finite, kind_of
from lossscale.torch.explain.modules import ModuleTracker, Names
from lossscale.torch.explain.operators import (
    Arguments,
    copy_written,
    has_known_results,
    tensors_in,
    written_tensors,
)
from lossscale.torch.explain.origins import find_origin, plain_name
from lossscale.torch.torch_internals import current_node, is_mutable


class OperatorWatch(TorchDispatchMode):
    """Records the operators whose results are not finite."""

    def __init__(
        self, model: torch.nn.Module | None, names: Names, tracker: ModuleTracker
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.micro_batch = 0
        """How many losses were scaled."""
        self._unread: set[str] = set()
        """Operators whose results could not be read."""
        self._names = names
        self._tracker = tracker
        tracker.on_exit = self._mark_outputs
        self._by_address: dict[int, Event] = {}
        self._from_ranks: set[int] = set()
        """Addresses to which a collective wrote; it may not have finished."""
        self._owned: dict[int, tuple[Role, torch.Tensor]] = {}
        """Parameters and buffers by address."""
        if model is not None:
            self._note_owned("buffer", model.buffers())
            self._note_owned("parameter", model.parameters())

    def _note_owned(self, role: Role, tensors: Any) -> None:
        for tensor in tensors:
            address = address_of(tensor)
            if address is not None:
                self._owned[address] = role, tensor

    def notes(self) -> tuple[str, ...]:
        """Return what could not be seen."""
        if not self._unread:
            return ()
        names = ", ".join(sorted(self._unread))
        return (f"The results of these operators could not be read: {names}.",)

    def event_of(self, tensor: torch.Tensor) -> Event | None:
        """Return the event that wrote a tensor, or that found it."""
        if is_finite(tensor):
            return None
        address = address_of(tensor)
        event = None if address is None else self._by_address.get(address)
        return event or self._record_given(tensor, kind_of(tensor), None)

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
        if _is_capturing() or func.__name__.startswith(_OF_OPTIMIZERS):
            return func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            results = func(*args, **kwargs)
            self._note_collective((args, kwargs, results))
            return results
        before = args, kwargs
        if is_mutable(func):
            with torch.no_grad():
                before = copy_written(func, args, kwargs)
        results = func(*args, **kwargs)
        if not has_known_results(func):
            try:
                with torch.no_grad():
                    self._inspect(func, before, results, node, is_backward=is_backward)
            # A tensor of a kind that cannot be read must not stop a training.
            except (RuntimeError, TypeError, NotImplementedError):
                self._unread.add(plain_name(func))
        return results

    def _note_collective(self, values: Any) -> None:
        for tensor in tensors_in(values):
            address = address_of(tensor)
            if address is not None:
                self._from_ranks.add(address)
                self._by_address.pop(address, None)

    def _inspect(
        self,
        func: Any,
        before: tuple[Arguments, dict[str, Any]],
        results: Any,
        node: Any,
        *,
        is_backward: bool,
    ) -> None:
        """Record an event if a result is not finite."""
        flat, _ = tree_flatten(results)
        if is_mutable(func) and not flat:
            flat = written_tensors(func, before[0], before[1])
        event: Event | None = None
        for index, tensor in enumerate(flat):
            if not isinstance(tensor, torch.Tensor):
                continue
            kind = kind_of(tensor)
            address = address_of(tensor)
            if kind is None:
                # A part of the storage may still hold what another operator wrote.
                if address is not None and not is_mutable(func):
                    self._by_address.pop(address, None)
                    self._from_ranks.discard(address)
                continue
            if event is None:
                event = self._record(
                    func, before, tensor, kind, index, node, is_backward=is_backward
                )
            if address is not None:
                self._by_address[address] = event

    def _record(
        self,
        func: Any,
        before: tuple[Arguments, dict[str, Any]],
        result: torch.Tensor,
        kind: Kind,
        index: int,
        node: Any,
        *,
        is_backward: bool,
    ) -> Event:
        """Record what an operator wrote that was not finite."""
        args, kwargs = before
        bad_inputs = [
            (tensor, input_kind)
            for tensor in tensors_in(before)
            if (input_kind := kind_of(tensor)) is not None
        ]
        name = plain_name(func)
        site = self._site(node, is_backward=is_backward)
        # Backends copy what has arrived from buffers that no operator wrote.
        has_arrived = address_of(result) in self._from_ranks
        parents = [
            self._parent(tensor, input_kind, site, has_arrived=has_arrived)
            for tensor, input_kind in bad_inputs
        ]
        origin: Origin | None = None
        magnitude = None
        if not bad_inputs or (
            kind.nan and not any(input_kind.nan for _, input_kind in bad_inputs)
        ):
            origin = find_origin(name, args, kwargs, kind, is_given=bool(bad_inputs))
            if not bad_inputs and origin in ("unknown", "0 / 0"):
                magnitude = magnitudes.measure_wide(func, args, kwargs, index)
                origin = _judge(origin, name, magnitude)
        event = Event(
            len(self.events),
            name,
            kind,
            origin,
            tuple(dict.fromkeys(parents)),
            site,
            node=_name_node(node) if is_backward else None,
            node_number=_number_node(node) if is_backward else None,
            is_backward=is_backward,
            is_passive=name in _PASSIVE,
            micro_batch=self._micro_batch(),
            dtype=_name_dtype(result),
            largest=LARGEST.get(_name_dtype(result)),
        )
        if origin == "overflow":
            is_known = magnitude is not None and magnitude > (event.largest or 0.0)
            event.magnitude = magnitude if is_known else None
        if is_backward:
            is_input = self._tracker.leaves_module(node, site)
            event.role = "input gradient" if is_input else "intermediate gradient"
        elif name == "to":
            self._describe_cast(event, before)
        self.events.append(event)
        return event

    def _describe_cast(self, event: Event, before: Any) -> None:
        """Say what was cast: autocast casts the inputs of a layer, and its weights."""
        source = next(iter(tensors_in(before)))
        owned = self._owned.get(address_of(source) or 0)
        if owned is None:
            event.role = "input"
        else:
            event.role = owned[0]
            event.tensor = self._names.tensors.get(id(owned[1]))

    def _micro_batch(self) -> int:
        """Return which micro-batch is run: a backward pass is that of the last loss."""
        if self._tracker.is_backward:
            return max(0, self.micro_batch - 1)
        return self.micro_batch

    def _site(self, node: Any, *, is_backward: bool) -> Site | None:
        """Return where the forward pass ran what this is part of."""
        if not is_backward:
            return self._tracker.here()
        variable = getattr(node, "variable", None)
        if variable is not None:
            return Site(self._names.owner_of(variable), None)
        return self._tracker.site_of(node)

    # -- what no operator wrote --------------------------------------------------------

    def _parent(
        self,
        tensor: torch.Tensor,
        kind: Kind,
        site: Site | None,
        *,
        has_arrived: bool,
    ) -> Event:
        """Return the event that wrote an input."""
        address = address_of(tensor)
        event = None if address is None else self._by_address.get(address)
        return event or self._record_given(tensor, kind, site, has_arrived=has_arrived)

    def _record_given(
        self,
        tensor: torch.Tensor,
        kind: Kind | None,
        site: Site | None,
        *,
        has_arrived: bool = False,
    ) -> Event:
        """Record a tensor that no operator of this run wrote."""
        address = address_of(tensor) or 0
        role: Role = "batch"
        owned: torch.Tensor | None = None
        if address in self._owned:
            role, owned = self._owned[address]
        origin: Origin = "batch"
        if role == "parameter":
            origin = "parameter"
        elif role == "buffer":
            origin = "buffer"
        elif has_arrived or address in self._from_ranks:
            origin = "another rank"
        if owned is not None:
            site = Site(self._names.owner_of(owned), None)
        event = Event(
            len(self.events),
            "",
            kind or Kind(nan=False, plus=True, minus=False),
            origin,
            site=site,
            is_backward=self._tracker.is_backward,
            micro_batch=self._micro_batch(),
            role=role,
            tensor=None if owned is None else self._names.tensors.get(id(owned)),
            dtype=_name_dtype(tensor),
        )
        self.events.append(event)
        if address:
            self._by_address[address] = event
        return event

    def _mark_outputs(self, module: torch.nn.Module, outputs: Any) -> None:
        """Note which events wrote the outputs of a module."""
        if not self.events:
            return
        for tensor in tensors_in(outputs):
            event = self._by_address.get(address_of(tensor) or 0)
            if event is None or event.site is None or event.is_backward:
                continue
            if event.site.module is module and event.role == "intermediate":
                event.role = "output"


def _judge(origin: Origin, name: str, magnitude: float | None) -> Origin:
    """Return the origin, now that it is known what float64 gives."""
    if magnitude is not None and magnitude < float("inf"):
        return "overflow"
    if name in _GROWING:
        return "overflow"
    return origin


def _name_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name_node(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


def _number_node(node: Any) -> int:
    return int(node._sequence_nr())  # noqa: SLF001


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_OF_OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")
"""Operators that check gradients and update weights, after the backward pass."""

_PASSIVE = frozenset(
    {"to", "clone", "copy", "sum", "add", "detach", "view", "reshape", "stack", "cat"}
)
"""Operators by which the gradient of a parameter reaches it unchanged, or in a sum."""

_GROWING = frozenset(
    {"exp", "exp2", "expm1", "sinh", "cosh", "square", "mul", "pow", "cumprod", "prod"}
)
"""Operators that can leave float64 as well."""
