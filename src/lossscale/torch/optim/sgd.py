# SPDX-License-Identifier: Apache-2.0
"""`SGD`, with momentum, dampening and Nesterov's variant."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.optim.eager import (
    HostScale,
    Workspace,
    choose_foreach,
    unscale,
    working_dtype,
)
from lossscale.torch.optim.formulas import Kept, add_by_sgd
from lossscale.torch.optim.masters import MASTER
from lossscale.torch.optim.optimizer import (
    ScaledOptimizer,
    check_options,
    refuse_differentiable,
)
from lossscale.torch.optim.plan import reason_of_group

if TYPE_CHECKING:
    from lossscale.torch.optim.kernels.tables import Row, Tables

BUFFER = "momentum_buffer"


class SGD(ScaledOptimizer, torch.optim.SGD):
    """torch's SGD, which unscales, skips and updates in one pass.

    Example:
        >>> import torch, lossscale.torch.optim as optim
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.item()
        0.5
    """

    kept_names = (BUFFER, MASTER)
    steps_as = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        write_back: bool = False,
    ) -> None:
        """Make an optimizer; torch's arguments mean what they mean in torch.

        Args:
            params: Parameters, named parameters, or groups of them.
            lr: The learning rate; a tensor of one number may be changed in place.
            momentum: The momentum.
            dampening: The dampening of the momentum, from the second step on.
            weight_decay: The weight decay.
            nesterov: Use Nesterov's momentum.
            maximize: Maximize the objective.
            foreach: `True` chooses torch's own step.
            differentiable: Refused, as torch's fused optimizers refuse it.
            fused: `False` chooses torch's own step.
            master_weights: Keep a float32 master of every float16 or bfloat16
                parameter, and update that.
            write_back: Write the unscaled gradients to `.grad`, which is otherwise left
                as it is.
        """
        refuse_differentiable(differentiable)
        self._options = check_options(
            master_weights=master_weights, write_back=write_back
        )
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def _init_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._make_master(param)

    def _structure(self, group: Mapping[str, Any]) -> tuple[object, ...]:
        return bool(group["momentum"]), torch.is_tensor(group["weight_decay"])

    def reason_against(self, group: Mapping[str, Any]) -> str:
        """Return why the kernels cannot update a group; empty if they can."""
        return reason_of_group(group, [group["weight_decay"], group["momentum"]])

    def starts_eagerly(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether torch's functions take the first step: it is never dampened."""
        is_dampened = bool(group["momentum"] and group["dampening"])
        return is_dampened and self.state.get(param, {}).get(BUFFER) is None

    def has_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether everything is there that a row of the kernels' tables needs."""
        state = self.state.get(param, {})
        has_buffer = not group["momentum"] or state.get(BUFFER) is not None
        return has_buffer and (not self.has_master(param) or MASTER in state)

    def make_row(
        self, param: torch.Tensor, number: int, grad_dtype: torch.dtype
    ) -> "Row":
        """Return a parameter's row of the kernels' tables; its state is made here."""
        from lossscale.torch.optim.kernels.tables import Row  # noqa: PLC0415

        self._make_master(param)
        master, buffer = self._rows_tensor(param, MASTER, torch.float32), None
        if self.param_groups[number]["momentum"]:
            if self.state[param].get(BUFFER) is None:
                self.state[param][BUFFER] = torch.zeros_like(
                    param,
                    dtype=self.state_dtype(param),
                    memory_format=torch.preserve_format,
                )
            buffer = self._rows_tensor(param, BUFFER)
        return Row(local_shard(param), grad_dtype, (buffer, master), number)

    def make_tables(self, rows: "list[Row]", params: list[torch.Tensor]) -> "Tables":  # noqa: ARG002
        """Return the kernels' tables."""
        from lossscale.torch.optim.kernels.tables import SgdTables  # noqa: PLC0415

        return SgdTables(rows, len(self.param_groups))

    def compute_update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        kept: Kept,
        count: float,  # noqa: ARG002
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return what a step adds to a weight, before it is rounded."""
        return add_by_sgd(weight, grad, kept, group)

    def _update_group(self, group: dict[str, Any], scale: HostScale) -> None:
        params: list[torch.Tensor] = group["params"]
        for param in params:
            self._make_master(param)
        lists: list[list[Any]] = [[], [], []]
        # torch's own: it checks for `fused` what torch checks.
        is_sparse = self._init_group(group, *lists)  # type: ignore[no-untyped-call]
        work = Workspace()
        weights, grads = list[torch.Tensor](), list[torch.Tensor]()
        buffers: list[torch.Tensor | None] = []
        for number, param in enumerate(params):
            weight = self._weight(param)
            kept = lists[2][number] if group["momentum"] else None
            dtypes = [] if kept is None else [kept.dtype]
            dtype = working_dtype(weight, scale, dtypes)
            weights.append(work.open_weight(weight, dtype))
            grads.append(self._own_grad(param, group, scale, dtype))
            if group["momentum"]:
                buffers.append(None if kept is None else work.open(kept, dtype))
        sgd(
            weights,
            grads,
            buffers,
            has_sparse_grad=is_sparse,
            foreach=choose_foreach(group, weights),
            fused=group["fused"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        work.write()
        # `buffers` is empty without momentum.
        for param, before, buffer in zip(params, lists[2], buffers, strict=False):
            if buffer is not None and before is None:
                self.state[param][BUFFER] = buffer.to(self.state_dtype(param))
        self._round_masters(params)
        self._write_back(params, scale)

    def _own_grad(
        self,
        param: torch.Tensor,
        group: Mapping[str, Any],
        scale: HostScale,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the unscaled gradient of a parameter, to which torch may write.

        torch's foreach step adds Nesterov's momentum to the gradients in place.
        """
        grad: torch.Tensor = param.grad  # type: ignore[assignment]
        own = unscale(grad, scale.inverse, dtype)
        return own.clone() if own is grad and group["nesterov"] else own
