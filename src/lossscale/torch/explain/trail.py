# SPDX-License-Identifier: Apache-2.0
"""`Trail`: the events of a run, and which of them wrote what is at an address.

A tensor is known by the address of its storage: each operator that writes to it renews
what is known of that address, so that no tensor is kept alive. What no operator wrote
was there before, or a collective brought it from other ranks.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from lossscale.core.explanation.findings import Role
from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.torch.explain.events import Event, Site
from lossscale.torch.explain.kinds import address_of
from lossscale.torch.explain.modules import Names


class Arrival(NamedTuple):
    """What a collective wrote, which may not have finished."""

    operation: str
    parents: tuple[Event, ...]
    """What this rank contributed that was not finite."""


class Reading(NamedTuple):
    """A tensor that an operator read and that was not finite."""

    tensor: torch.Tensor
    kind: Kind
    address: int | None


class Moment(NamedTuple):
    """Where the run was."""

    site: Site | None
    is_backward: bool
    loss: int


class Trail:
    """What was not finite, in order, with what it was made of."""

    def __init__(self, model: torch.nn.Module | None, names: Names) -> None:
        self.events: list[Event] = []
        self._names = names
        self._by_address: dict[int, Event] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._gathered: set[int] = set()
        """Addresses of parameters that are collected from all ranks."""
        self._owned: dict[int, tuple[Role, torch.Tensor]] = {}
        """Parameters and buffers by address."""
        if model is not None:
            self._note_owned("buffer", model.buffers())
            self._note_owned("parameter", model.parameters())

    def _note_owned(self, role: Role, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            address = address_of(tensor)
            if address is not None:
                self._owned[address] = role, tensor

    def owner_of(self, tensor: torch.Tensor) -> tuple[Role, str | None] | None:
        """Return whether a tensor is a parameter or a buffer, and its name."""
        owned = self._owned.get(address_of(tensor) or 0)
        if owned is None:
            return None
        role, owner = owned
        return role, self._names.tensors.get(id(owner))

    # -- addresses ---------------------------------------------------------------------

    def find(self, address: int | None) -> Event | None:
        """Return the event that wrote to an address last, if it is known."""
        return None if address is None else self._by_address.get(address)

    def keep(self, event: Event, address: int | None) -> None:
        """Note that an event wrote to an address."""
        if address is not None:
            self._by_address[address] = event

    def forget(self, address: int | None) -> None:
        """Note that what is at an address is finite, or not written yet."""
        if address is not None:
            self._by_address.pop(address, None)
            self._arrivals.pop(address, None)
            self._gathered.discard(address)

    def note_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note buffers into which parameters are collected."""
        self._gathered.update(filter(None, map(address_of, tensors)))

    def note_arrival(self, tensors: Iterable[torch.Tensor], arrival: Arrival) -> None:
        """Note what a collective writes to."""
        for address in filter(None, map(address_of, tensors)):
            self._arrivals[address] = arrival
            self._by_address.pop(address, None)

    # -- what no operator wrote --------------------------------------------------------

    def parent_of(
        self, reading: Reading, moment: Moment, result: int | None = None
    ) -> Event:
        """Return the event that wrote what an operator read.

        Args:
            reading: What was read.
            moment: Where the run was.
            result: The address that the operator wrote to. Backends of collectives copy
                what has arrived from buffers that no operator wrote.
        """
        event = self.find(reading.address)
        if event is None:
            event = self._record_given(reading, moment, result)
            self.events.append(event)
            self.keep(event, reading.address)
        self._name_gathered(event, reading.address, moment)
        return event

    def _record_given(
        self, reading: Reading, moment: Moment, result: int | None
    ) -> Event:
        """Return what no operator of this run wrote, as an event."""
        address = reading.address or 0
        event = Event(
            len(self.events),
            None,
            reading.kind,
            "batch",
            site=moment.site,
            is_backward=moment.is_backward,
            loss=moment.loss,
            role="batch",
            dtype=str(reading.tensor.dtype).removeprefix("torch."),
        )
        arrival = self._arrivals.get(address) or self._arrivals.get(result or 0)
        if address in self._owned:
            event.role, owner = self._owned[address]
            event.origin = _ORIGINS[event.role]
            event.tensor = self._names.tensors.get(id(owner))
            event.site = Site(self._names.owner_of(owner), None)
        elif arrival is not None:
            event.role = "intermediate gradient" if moment.is_backward else "input"
            if address in self._gathered:
                event.role, event.site = "parameter", None
            event.origin = "another rank"
            if arrival.parents:  # not from others alone
                event.operation, event.origin = arrival.operation, None
                event.bad_parents, event.is_passive = arrival.parents, True
        elif reading.tensor.dim() == 0:
            event.origin, event.role = "constant", "constant"
        return event

    def _name_gathered(self, event: Event, address: int | None, moment: Moment) -> None:
        """Note whose parameter was collected: the module that reads it says so."""
        module = None if moment.site is None else moment.site.module
        if module is None:
            return
        while event.origin is None and len(event.bad_parents) == 1:
            (event,) = event.bad_parents
        if event.role != "parameter" or event.tensor is not None:
            return
        for name, param in module.named_parameters(recurse=False):
            if address_of(param) == address:
                event.tensor = self._names.of_parameter(module, name)
                event.site = Site(module, None)


_ORIGINS: dict[Role, Origin] = {"parameter": "parameter", "buffer": "buffer"}
