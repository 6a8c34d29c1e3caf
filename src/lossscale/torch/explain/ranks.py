# SPDX-License-Identifier: Apache-2.0
"""What all ranks saw, collected over the groups that the model is spread over."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import distributed

from lossscale.torch.distributed.dtensor import as_dtensor
from lossscale.torch.distributed.rank_groups import (
    RankGroup,
    RankGroups,
    distinct_groups,
    groups_of_mesh,
    is_running,
    parse_rank_groups,
)

Item = TypeVar("Item")


def find_groups(
    model: torch.nn.Module,
    entered: Iterable[torch.nn.Module],
    declared: RankGroups,
) -> list[RankGroup]:
    """Return the groups of ranks that run this batch together.

    They are those of modules such as DDP, of the meshes of DTensors, and those that the
    scaler was given; none if the model is whole in one process.

    Args:
        model: The model.
        entered: The modules that the batch went through: DDP may be around the model.
        declared: The groups that the scaler was given.
    """
    if not is_running():
        return []
    groups: list[RankGroup] = []
    for module in entered:
        group = getattr(module, "process_group", None)
        if isinstance(group, distributed.ProcessGroup):
            groups += parse_rank_groups(group, None, None).deciding
    # In the order of the parameters, which all ranks share.
    meshes = dict.fromkeys(
        dtensor.device_mesh
        for param in model.parameters()
        if (dtensor := as_dtensor(param)) is not None
    )
    for mesh in meshes:
        groups += groups_of_mesh(mesh)
    return distinct_groups([*groups, *declared.resolve().deciding])


def collect(item: Item, groups: list[RankGroup]) -> dict[int, Item]:
    """Return what every rank has, by rank; a collective if there are groups.

    What a rank knows is passed on along one group after the other, so that it reaches
    every rank of a mesh.
    """
    if not groups:
        return {0: item}
    known = {distributed.get_rank(): item}
    for group in groups:
        parts: list[dict[int, Item]] = [{} for _ in group.members]
        distributed.all_gather_object(parts, known, group=group.group)
        for part in parts:
            known |= part
    return known
