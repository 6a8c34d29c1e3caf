# SPDX-License-Identifier: Apache-2.0
"""`ReductionPlan`: which ranks decide about the gradients of one optimizer.

The groups are those that the scaler was given and those of the meshes of DTensor
parameters, in an order that all ranks share. The plan also says over which of them each
gradient is sharded: there, squares of norms are added up.
"""

from collections import deque
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from lossscale.torch.distributed.dtensor import as_dtensor
from lossscale.torch.distributed.rank_groups import (
    RankGroup,
    RankGroups,
    distinct_groups,
    groups_of_mesh,
)

Sharding: TypeAlias = tuple[int, ...]
"""The indices of the groups over which a gradient is sharded; empty if it is whole."""

ParamGroup: TypeAlias = dict[str, Any]
"""One of an optimizer's `param_groups`, as torch types it."""


class ReductionPlan:
    """The groups that decide about one optimizer."""

    def __init__(self, declared: RankGroups, params: list[torch.Tensor]) -> None:
        """Make a plan.

        Args:
            declared: The groups that the scaler was given.
            params: The optimizer's parameters. Those without a gradient count as well:
                ranks that have one wait for those that have none.
        """
        self._fingerprint = _fingerprint(params)
        self.late_drift: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        """Whether scales differed, on its way from a device to the host."""
        meshes: dict[DeviceMesh, list[RankGroup]] = {}
        for param in params:
            dtensor = as_dtensor(param)
            if dtensor is not None and dtensor.device_mesh not in meshes:
                meshes[dtensor.device_mesh] = groups_of_mesh(dtensor.device_mesh)
        self.has_dtensors = bool(meshes)
        # The dimensions of a mesh come in its order: a flag that is passed on along one
        # after the other has then reached every rank of the mesh. Declared groups come
        # last and in the order of the declaration, which is the same on ranks that have
        # other parameters.
        declared_members = {group.members for group in declared.deciding}
        of_meshes = [
            group
            for groups in meshes.values()
            for group in groups
            if group.members not in declared_members
        ]
        self.groups = distinct_groups([*of_meshes, *declared.deciding])
        self._index = {group.members: index for index, group in enumerate(self.groups)}
        self._declared_sharding = tuple(
            sorted(self._index[group.members] for group in declared.sharding)
        )
        self._shardings = [self._sharding_of(param, meshes) for param in params]
        self.shardings = sorted({*self._shardings, self._declared_sharding})
        """How gradients may be sharded. The same on all ranks of a group."""
        self.summing = sorted({i for sharding in self.shardings for i in sharding})
        """The groups over which squares are added up."""
        covering = [set(group.members) for group in declared.deciding]
        self.deciding = [
            index
            for index, group in enumerate(self.groups)
            if not any(set(group.members) < members for members in covering)
        ]
        """The groups that are enough for a decision."""

    def fits(self, param_groups: list[ParamGroup]) -> bool:
        """Whether an optimizer still has the parameters that this plan was made for.

        Asked at every step, so it does not inspect every parameter: DTensors replace
        others all at once, or as a group.
        """
        lists = [group["params"] for group in param_groups if group["params"]]
        ends = (id(lists[0][0]), id(lists[-1][-1])) if lists else ()
        return self._fingerprint == (sum(map(len, lists)), *ends)

    def shardings_of_grads(self, params: list[torch.Tensor]) -> list[Sharding]:
        """Return the sharding of each parameter that has a gradient."""
        return [
            sharding
            for param, sharding in zip(params, self._shardings, strict=True)
            if param.grad is not None
        ]

    def _sharding_of(
        self, param: torch.Tensor, meshes: dict[DeviceMesh, list[RankGroup]]
    ) -> Sharding:
        """Return over which groups a parameter is sharded."""
        dtensor = as_dtensor(param)
        if dtensor is None:
            return self._declared_sharding
        groups = meshes[dtensor.device_mesh]
        sharded = {
            self._index[group.members]
            for group, placement in zip(groups, dtensor.placements, strict=False)
            if not placement.is_replicate() and group.members in self._index
        }
        of_mesh = {self._index.get(group.members) for group in groups}
        return tuple(sorted(sharded | (set(self._declared_sharding) - of_mesh)))


def _fingerprint(params: list[torch.Tensor]) -> tuple[int, ...]:
    """Return a cheap fingerprint of a list of parameters."""
    return len(params), *map(id, params[:1] + params[-1:])
