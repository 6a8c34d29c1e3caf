# SPDX-License-Identifier: Apache-2.0
"""`GradientInspector`: collect the gradients, measure them, decide over ranks.

One walk over the parameters per inspection. It knows nothing of the stages of a step or
of policies: it receives what to measure and returns an `Inspection`.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from lossscale.torch import native
from lossscale.torch.distributed.consensus import Number
from lossscale.torch.distributed.dtensor import local_shard, redistribute_grads
from lossscale.torch.distributed.rank_groups import RankGroups
from lossscale.torch.distributed.reduction_plan import ReductionPlan, Sharding
from lossscale.torch.inspection import headroom
from lossscale.torch.inspection.groups import FoundInf, GradientGroups, GradientScale
from lossscale.torch.inspection.ranked import RankContext, measure_over_ranks
from lossscale.torch.inspection.request import InspectionRequest
from lossscale.torch.inspection.summary import FACTOR, GradientSummary
from lossscale.torch.parameters import params_of

if TYPE_CHECKING:
    from lossscale.torch.inspection.kernels.launch import Tables


class Collected(NamedTuple):
    """The gradients of an optimizer, ready to be measured."""

    grads: list[torch.Tensor]
    """In the order of the parameters; of DTensors, the shards of this rank."""
    groups: GradientGroups | None
    """`None` if there is no gradient."""
    plan: ReductionPlan | None
    """`None` if this rank decides alone."""


@dataclass(eq=False)
class Inspection:
    """What one inspection of one optimizer's gradients found, on all ranks."""

    summary: GradientSummary
    found_inf: FoundInf
    collected: Collected

    def rescale_(self, *, may_have_moved: bool = False) -> None:
        """Multiply the gradients by clip factor and inverse scale, in place.

        Args:
            may_have_moved: Whether other code ran since the gradients were inspected,
                which may have given them other memory.
        """
        grads, groups, _ = self.collected
        if groups is None:
            return
        if may_have_moved and not groups.layout.check(*grads):
            groups = GradientGroups(grads, groups.kept_tables)
        factor = self.summary.numbers[FACTOR]
        reader = groups.dense_reader
        if reader is not None and isinstance(factor, float):
            reader.multiply_(grads, factor)
        else:
            groups.multiply_(grads, factor)


class GradientInspector:
    """Inspects the gradients of optimizers for one scaler."""

    def __init__(self, rank_groups: RankGroups) -> None:
        self.rank_groups = rank_groups
        self._groups: WeakKeyDictionary[torch.optim.Optimizer, GradientGroups]
        self._groups = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[torch.optim.Optimizer, ReductionPlan]
        self._plans = WeakKeyDictionary()
        self._kept_tables: list[Tables] = []
        """What CUDA graphs read, kept for as long as the scaler is."""

    # -- collecting --------------------------------------------------------------------

    def collect(self, optimizer: torch.optim.Optimizer) -> Collected:
        """Collect and group the gradients of an optimizer."""
        plan, shardings = None, None
        # A DTensor has a mesh, and a mesh has process groups.
        if self.rank_groups.deciding or _has_process_groups():
            new_plan = self._find_plan(optimizer)
            if new_plan is not None and (new_plan.groups or new_plan.has_dtensors):
                params = params_of(optimizer)
                redistribute_grads(params)
                if new_plan.groups:  # none on a mesh of one rank
                    plan, shardings = new_plan, new_plan.shardings_of_grads(params)
            has_shards = new_plan is not None and new_plan.has_dtensors
        else:
            has_shards = False
        grads = read_present_grads(optimizer)
        if has_shards:
            grads = list(map(local_shard, grads))
        if not grads:
            return Collected(grads, None, plan)
        groups = self._find_groups(optimizer, grads, shardings)
        if groups.has_sparse:
            grads = _coalesce_grads(optimizer)
        states_seen = _count_states(optimizer)
        if groups.states_seen != states_seen and not groups.is_foreign:
            # The bounds depend on the dtypes of the state, which the first step makes.
            with_grad = [p for p in params_of(optimizer) if p.grad is not None]
            groups.set_bounds(headroom.find_bounds(optimizer, with_grad))
            groups.states_seen = states_seen
        return Collected(grads, groups, plan)

    def _find_groups(
        self,
        optimizer: torch.optim.Optimizer,
        grads: list[torch.Tensor],
        shardings: list[Sharding] | None,
    ) -> GradientGroups:
        """Return the groups of gradients, those of the step before if they still fit.

        Args:
            optimizer: The optimizer.
            grads: Its gradients; there is one at least.
            shardings: The sharding of each of them, if other ranks have shards of them.
        """
        try:
            groups = self._groups.get(optimizer)
        except TypeError:  # the optimizer has no weak references
            groups = None
        if groups is not None and (
            groups.count != len(grads)
            or groups.shardings != shardings
            or not (
                groups.layout.check(*grads)
                if groups.addressed is None
                else groups.addressed.check_all(grads)
            )
        ):
            groups = None
        if groups is None:
            groups = GradientGroups(grads, self._kept_tables, shardings)
            with suppress(TypeError):
                self._groups[optimizer] = groups
        return groups

    def plan_for(self, optimizer: torch.optim.Optimizer) -> ReductionPlan | None:
        """Return which ranks decide about an optimizer; `None` if this one alone."""
        plan = self._find_plan(optimizer)
        return plan if plan is not None and plan.groups else None

    def _find_plan(self, optimizer: torch.optim.Optimizer) -> ReductionPlan | None:
        """Return the plan of an optimizer; `None` if no rank or DTensor is known."""
        declared = self.rank_groups = self.rank_groups.resolve()
        if not declared.deciding and not _has_process_groups():
            return None
        plan: ReductionPlan | None = None
        with suppress(TypeError):  # the optimizer has no weak references
            plan = self._plans.get(optimizer)
        if plan is None or not plan.fits(optimizer.param_groups):
            plan = ReductionPlan(declared, params_of(optimizer))
            with suppress(TypeError):
                self._plans[optimizer] = plan
        return plan

    # -- measuring ---------------------------------------------------------------------

    def inspect(
        self,
        optimizer: torch.optim.Optimizer,
        collected: Collected,
        gradient_scale: GradientScale,
        request: InspectionRequest,
        of_ranks: Callable[[], RankContext],
    ) -> tuple[Inspection, Number | None]:
        """Measure collected gradients, and decide together with other ranks.

        Args:
            optimizer: Whose gradients they are.
            collected: What `collect` returned; not of a foreign tensor subclass.
            gradient_scale: The scale of the gradients.
            request: What to measure.
            of_ranks: Returns what other ranks must know; called only if there are any.

        Returns:
            The inspection, and whether a loss of any rank was not finite; `None` if
            this rank decides alone.
        """
        grads, groups, plan = collected
        loss_nonfinite: Number | None = None
        if plan is None:
            if groups is None:
                message = "there is no gradient to inspect"
                raise AssertionError(message)
            reader = groups.dense_reader
            if reader is None:
                summary, found_inf = groups.measure(grads, gradient_scale, request)
            else:
                summary, found_inf = reader.measure(
                    grads, gradient_scale, request, groups.bounds
                )
        else:
            summary, found_inf, loss_nonfinite = measure_over_ranks(
                groups, grads, plan, gradient_scale, request, of_ranks()
            )
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if len(grads) != count:
            params = params_of(optimizer)
            summary.param_indices = [
                index for index, param in enumerate(params) if param.grad is not None
            ]
        return Inspection(summary, found_inf, collected), loss_nonfinite


# -- an optimizer's gradients ----------------------------------------------------------


def read_present_grads(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that there are, in the order of the parameters."""
    code = native.code
    if code is None:
        return [
            grad
            for group in optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None
        ]
    return code.read_grads(params_of(optimizer), False)


def _count_states(optimizer: torch.optim.Optimizer) -> int:
    """Return how many parameters have a state.

    Not by `optimizer.state`, where it can be helped: our optimizers compare all of it
    after other code has read that.
    """
    attributes = getattr(optimizer, "__dict__", {})
    if "state" in attributes:
        return len(attributes["state"])
    return len(optimizer.state) if hasattr(optimizer, "state") else 0


def _coalesce_grads(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Add up entries of sparse gradients that have the same index, as optimizers do.

    The sum may be infinite where no summand is.
    """
    params = params_of(optimizer)
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return read_present_grads(optimizer)


_has_process_groups: Callable[[], bool] = (
    torch.distributed.is_initialized if torch.distributed.is_available() else bool
)
