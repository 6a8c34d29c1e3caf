# SPDX-License-Identifier: Apache-2.0
"""`RankGroups`: the process groups that a scaler was given, validated once.

A scaler may be given process groups and device meshes. Every dimension of a mesh is a
process group of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, Union, runtime_checkable

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lossscale.core.validation import format_value
from lossscale.errors import ContextError, SettingError, SettingTypeError


@runtime_checkable
class GroupLike(Protocol):
    """What is needed of a process group; PyTorch's own tests use such objects."""

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def allreduce(self, *arguments: object) -> object:
        """Reduce tensors over the group."""
        ...


# Names as strings: a documentation build has stand-ins for torch, without an `|`.
GroupOrMesh: TypeAlias = Union["ProcessGroup", "DeviceMesh", "GroupLike"]
GroupsOrMeshes: TypeAlias = Union[GroupOrMesh, Sequence[GroupOrMesh]]  # noqa: UP007


class RankGroup(NamedTuple):
    """A process group, and the global ranks of its members."""

    group: "ProcessGroup | GroupLike"
    members: tuple[int, ...]


class RankGroups(NamedTuple):
    """The groups that the caller declared."""

    deciding: tuple[RankGroup, ...] = ()
    """The ranks that skip together and have one scale."""
    sharding: tuple[RankGroup, ...] = ()
    """Those of them that have different shards of gradients that are not DTensors."""
    shards_over_world: bool = False
    """Whether all ranks have shards, once the process group is initialized."""

    def require_none_to_pickle(self) -> None:
        """Raise if there are process groups: they belong to their process."""
        if self.deciding and not self.shards_over_world:
            message = (
                "A scaler that was made with process_groups=, meshes= or shard_groups= "
                "cannot be pickled or copied: process groups belong to their process. "
                "Save scaler.state_dict() and load it into a new one."
            )
            raise ContextError(message)

    def resolve(self) -> "RankGroups":
        """Return the groups, with all ranks among them if they can be known by now."""
        if not self.shards_over_world or self.deciding or not is_running():
            return self
        world = parse_rank_groups(None, None, distributed.group.WORLD)
        return world._replace(shards_over_world=True)


def parse_rank_groups(
    process_groups: GroupsOrMeshes | None,
    meshes: GroupsOrMeshes | None,
    shard_groups: GroupsOrMeshes | Literal["world"] | None,
) -> RankGroups:
    """Return the groups that were declared, or raise.

    Args:
        process_groups: A process group, or several.
        meshes: A device mesh, or several.
        shard_groups: Groups or meshes; or "world" for all ranks, which need not be
            running yet.
    """
    if shard_groups == "world":
        if process_groups is None and meshes is None:
            return RankGroups(shards_over_world=True).resolve()
        shard_groups = distributed.group.WORLD
    if process_groups is None and meshes is None and shard_groups is None:
        return RankGroups()
    if not is_running() and not any(
        map(_is_duck_typed, (process_groups, shard_groups))
    ):
        message = (
            "process_groups=, meshes= and shard_groups= need a running process group. "
            "Call torch.distributed.init_process_group() before making the scaler."
        )
        raise SettingError(message)
    sharding = distinct_groups(_flatten("shard_groups", shard_groups))
    deciding = distinct_groups(
        [
            *_flatten("process_groups", process_groups),
            *_flatten("meshes", meshes),
            *sharding,
        ]
    )
    sharding_members = {group.members for group in sharding}
    deciding_only = [
        group for group in deciding if group.members not in sharding_members
    ]
    # Sharding groups come last: a rank's sum over earlier groups may differ from one
    # pipeline stage to the next.
    return RankGroups((*deciding_only, *sharding), tuple(sharding))


def is_running() -> bool:
    """Whether `init_process_group` was called in this process."""
    return distributed.is_available() and distributed.is_initialized()


def groups_of_mesh(mesh: DeviceMesh) -> list[RankGroup]:
    """Return the group of each dimension of a mesh."""
    if mesh.get_coordinate() is None:  # this rank is not part of it
        return []
    return [_rank_group(group) for group in mesh.get_all_groups()]


def distinct_groups(groups: Iterable[RankGroup]) -> list[RankGroup]:
    """Return the groups of more than one rank, each set of ranks once."""
    by_members: dict[tuple[int, ...], RankGroup] = {}
    for group in groups:
        if len(group.members) > 1:
            by_members.setdefault(group.members, group)
    return list(by_members.values())


def _flatten(name: str, argument: object) -> Iterable[RankGroup]:
    """Yield the process groups of an argument: one of them, or several."""
    if argument is None:
        return
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _flatten(name, item)
    elif isinstance(argument, DeviceMesh):
        yield from groups_of_mesh(argument)
    elif _is_duck_typed(argument) and isinstance(argument, GroupLike):
        yield RankGroup(argument, tuple(range(argument.size())))
    elif argument is distributed.GroupMember.NON_GROUP_MEMBER:
        message = (
            f"{name} contains a group that this rank is not a member of. Pass every "
            "rank the group that it belongs to."
        )
        raise SettingError(message)
    elif isinstance(argument, ProcessGroup):
        yield _rank_group(argument)
    else:
        message = (
            f"{name} must be a process group or a device mesh, or a list of them; got "
            f"{format_value(argument)}. Write torch.distributed.group.WORLD for all "
            "ranks."
        )
        raise SettingTypeError(message)


def _is_duck_typed(argument: object) -> bool:
    """Whether an object has the methods of a process group without being one."""
    return isinstance(argument, GroupLike) and not isinstance(argument, ProcessGroup)


def _rank_group(group: ProcessGroup) -> RankGroup:
    return RankGroup(group, tuple(torch.distributed.get_process_group_ranks(group)))
