# SPDX-License-Identifier: Apache-2.0
"""Which ranks decide together: what the caller declares, and what DTensors say.

A scaler may be given process groups and meshes. Every dimension of a mesh is a process
group of its own. The gradients of DTensor parameters bring the groups of their meshes
along. `Plan` is what comes of it for one optimizer: the groups, in an order that all
ranks share, and over which of them each gradient is spread.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lossscale.core.validation import format_value
from lossscale.errors import SettingError, SettingTypeError
from lossscale.torch.sharding import dtensor_class

Share = tuple[int, ...]
"""The groups of a plan over which a gradient is spread; none if it is whole."""


class Ranks(NamedTuple):
    """A process group, and the global numbers of its ranks."""

    group: Any
    members: tuple[int, ...]


class Declared(NamedTuple):
    """What the caller says about ranks."""

    agreeing: tuple[Ranks, ...] = ()
    """Those that skip together and have one scale."""
    sharded: tuple[Ranks, ...] = ()
    """Those of them that have different parts of what is not a DTensor."""


def declared(process_group: Any, meshes: Any, sharded: Any) -> Declared:
    """Return what was declared, or raise if that is of no use.

    Args:
        process_group: A process group, or several.
        meshes: A device mesh, or several.
        sharded: Groups or meshes.
    """
    if process_group is None and meshes is None and sharded is None:
        return Declared()
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not running and not any(map(_is_group_like, (process_group, sharded))):
        message = (
            "process_group=, meshes= and sharded= need a running process group. Call "
            "torch.distributed.init_process_group() before the scaler is made."
        )
        raise SettingError(message)
    parts = tuple(_flat("sharded", sharded))
    agreeing = [
        *_flat("process_group", process_group),
        *_flat("meshes", meshes),
        *parts,
    ]
    added = _distinct(parts)
    known = {ranks.members for ranks in added}
    rest = [ranks for ranks in _distinct(agreeing) if ranks.members not in known]
    # Those over which norms are added up come last: what a rank has added up before
    # may differ from one pipeline stage to the next.
    return Declared((*rest, *added), tuple(added))


def _flat(name: str, given: Any) -> Iterable[Ranks]:
    """Return the process groups of what was given: one of them, or several."""
    if given is None:
        return
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _flat(name, one)
    elif isinstance(given, torch.distributed.device_mesh.DeviceMesh):
        yield from of_mesh(given)
    elif _is_group_like(given):
        # Not torch's class, as in PyTorch's own tests: it reduces by its own method.
        yield Ranks(given, tuple(range(given.size())))
    elif given is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        message = (
            f"{name} holds a group that this rank is not a member of. Give every rank "
            "the group that it belongs to."
        )
        raise SettingError(message)
    elif isinstance(given, torch.distributed.ProcessGroup):
        yield _ranks(given)
    else:
        message = (
            f"{name} must be a process group or a device mesh, or a list of them; got "
            f"{format_value(given)}. Write torch.distributed.group.WORLD for all ranks."
        )
        raise SettingTypeError(message)


def _is_group_like(given: Any) -> bool:
    """Whether an object has what is needed of a process group, and is none."""
    methods = ("rank", "size", "allreduce")
    has_all = all(callable(getattr(given, method, None)) for method in methods)
    return has_all and not isinstance(given, torch.distributed.ProcessGroup)


def of_mesh(mesh: Any) -> list[Ranks]:
    """Return the group of each dimension of a mesh."""
    if mesh.get_coordinate() is None:  # this rank has no part of it
        return []
    return [_ranks(group) for group in mesh.get_all_groups()]


def _ranks(group: Any) -> Ranks:
    return Ranks(group, tuple(torch.distributed.get_process_group_ranks(group)))


def _distinct(every: Iterable[Ranks]) -> list[Ranks]:
    """Return the groups of more than one rank, each set of ranks once."""
    known: dict[tuple[int, ...], Ranks] = {}
    for ranks in every:
        if len(ranks.members) > 1:
            known.setdefault(ranks.members, ranks)
    return list(known.values())


def _facts(parameters: list[Any]) -> tuple[Any, ...]:
    """Return what tells one list of parameters from another, at a glance."""
    return len(parameters), *map(id, parameters[:1] + parameters[-1:])


class Plan:
    """Over which ranks the gradients of one optimizer are decided on."""

    def __init__(self, declared: Declared, parameters: list[Any]) -> None:
        """Make a plan.

        Args:
            declared: What the caller has said.
            parameters: Of the optimizer. Those without a gradient count as well: the
                ranks that have one wait for those that have none.
        """
        self._fitting = _facts(parameters)
        self.late: deque[tuple[Any, Any]] = deque()
        """Whether the ranks had come apart, on its way from a device to the host."""
        kind = dtensor_class()
        meshes: dict[Any, list[Ranks]] = {}
        for parameter in parameters:
            if kind is not None and isinstance(parameter, kind):
                mesh = parameter.device_mesh
                if mesh not in meshes:
                    meshes[mesh] = of_mesh(mesh)
        spread = [ranks for mesh in meshes.values() for ranks in mesh]
        # The dimensions of one mesh come in its order: what is passed on along them one
        # after the other has then reached every rank of the mesh.
        # What was declared comes last and in the order of the declaration, which is
        # the same on ranks that have other parameters.
        said = {ranks.members for ranks in declared.agreeing}
        known = [ranks for ranks in spread if ranks.members not in said]
        self.groups = _distinct([*known, *declared.agreeing])
        self._places = {ranks.members: at for at, ranks in enumerate(self.groups)}
        self._plain = tuple(
            sorted(self._places[ranks.members] for ranks in declared.sharded)
        )
        self._shares = [
            self._share(parameter, meshes.get(parameter.device_mesh))
            if kind is not None and isinstance(parameter, kind)
            else self._plain
            for parameter in parameters
        ]
        self.kinds = sorted({*self._shares, self._plain})
        """How gradients may be spread. The same on all ranks of a group."""
        self.adding = sorted({at for share in self.kinds for at in share})
        """The groups over which norms are added up."""
        covering = [set(ranks.members) for ranks in declared.agreeing]
        self.deciding = [
            at
            for at, ranks in enumerate(self.groups)
            if not any(set(ranks.members) < whole for whole in covering)
        ]
        """The groups that are enough for a decision."""

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether an optimizer still has the parameters that this was made for.

        Asked at every look, so it does not look at every parameter: DTensors come in
        place of others all at once, or as a group.
        """
        lists = [group["params"] for group in groups if group["params"]]
        count = sum(map(len, lists))
        ends = (id(lists[0][0]), id(lists[-1][-1])) if lists else ()
        return self._fitting == (count, *ends)

    def shares(self, parameters: list[Any]) -> list[Share]:
        """Return over which groups each gradient is spread, of those that are there."""
        return [
            share
            for parameter, share in zip(parameters, self._shares, strict=True)
            if parameter.grad is not None
        ]

    def _share(self, parameter: Any, groups: Any) -> Share:
        """Return over which groups a DTensor is spread."""
        own = {
            self._places[ranks.members]
            for ranks, placement in zip(groups, parameter.placements, strict=False)
            if not placement.is_replicate() and ranks.members in self._places
        }
        inside = {self._places.get(ranks.members) for ranks in groups}
        return tuple(sorted(own | (set(self._plain) - inside)))
