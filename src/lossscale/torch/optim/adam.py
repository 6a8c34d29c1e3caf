# SPDX-License-Identifier: Apache-2.0
"""`Adam` and `AdamW`."""

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.optim import host
from lossscale.torch.optim.eager import (
    HostScale,
    Workspace,
    choose_foreach,
    unscale,
    working_dtype,
)
from lossscale.torch.optim.formulas import Kept, add_by_adam
from lossscale.torch.optim.kept_tensors import check_kept_tensor
from lossscale.torch.optim.masters import HALF, MASTER
from lossscale.torch.optim.optimizer import (
    Options,
    ScaledOptimizer,
    check_options,
    refuse_differentiable,
)
from lossscale.torch.optim.plan import reason_of_group

if TYPE_CHECKING:
    from lossscale.torch.optim.kernels.tables import Row, Tables


class _AdamStep(ScaledOptimizer):
    """The step of Adam, with either kind of weight decay."""

    kept_names = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", MASTER)
    steps_as = torch.optim.Adam

    @property
    def _rounds_stochastically(self) -> bool:
        """Whether second moments are rounded so that their mean is exact."""
        return self._options.moments_dtype == torch.bfloat16

    def _init_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        dtype = self.state_dtype(param)
        if "step" not in state:
            on_device = group["capturable"] or group["fused"]
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if on_device else "cpu"
            )
        names = ["exp_avg", "exp_avg_sq"]
        if group["amsgrad"]:
            names.append("max_exp_avg_sq")
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
        self._make_master(param)

    def _structure(self, group: Mapping[str, Any]) -> tuple[object, ...]:
        return group["amsgrad"], any(map(torch.is_tensor, group["betas"]))

    def reason_against(self, group: Mapping[str, Any]) -> str:
        """Return why the kernels cannot update a group; empty if they can."""
        return reason_of_group(group, group["betas"])

    def make_row(
        self, param: torch.Tensor, number: int, grad_dtype: torch.dtype
    ) -> "Row":
        """Return a parameter's row of the kernels' tables; its state is made here."""
        from lossscale.torch.optim.kernels.tables import Row  # noqa: PLC0415

        group = self.param_groups[number]
        self._init_state(param, group)
        state = self.state[param]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        for name in names:
            check_kept_tensor(param, name, state[name])
        # The kernels take the moments of a parameter for one dtype.
        dtypes = {state[name].dtype for name in names}
        dtype = reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None
        moments = [self._rows_tensor(param, name, dtype) for name in names]
        largest = moments[2] if group["amsgrad"] else None
        master = self._rows_tensor(param, MASTER, torch.float32)
        kept = (*moments[:2], largest, master)
        step = state["step"].reshape(())
        return Row(local_shard(param), grad_dtype, kept, number, step)

    def has_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether everything is there that a row of the kernels' tables needs."""
        names = {"step", "exp_avg", "exp_avg_sq"}
        names |= {"max_exp_avg_sq"} if group["amsgrad"] else set()
        names |= {MASTER} if self.has_master(param) else set()
        return names.issubset(self.state.get(param, {}))

    def make_tables(self, rows: "list[Row]", params: list[torch.Tensor]) -> "Tables":
        """Return the kernels' tables; they have the step counts from now on."""
        from lossscale.torch.optim.kernels.tables import AdamTables  # noqa: PLC0415

        groups = len(self.param_groups)
        tables = AdamTables(rows, groups, stochastic=self._rounds_stochastically)
        for param, step in zip(params, tables.steps, strict=True):
            self.state[param]["step"] = step
        return tables

    def compute_update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        kept: Kept,
        count: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return what a step adds to a weight, before it is rounded."""
        return add_by_adam(weight, grad, kept, count, group)

    def _update_group(self, group: dict[str, Any], scale: HostScale) -> None:
        if not self._update_on_host(group, scale):
            self._update_by_torch(group, scale)
        self._write_back(group["params"], scale)

    def _update_on_host(self, group: dict[str, Any], scale: HostScale) -> bool:
        """Update a group that `host.update` can take; whether it could."""
        params = group["params"]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        try:
            states = list(map(self.state.__getitem__, params))
            kept = [[state[name] for state in states] for name in names]
            steps = [state["step"] for state in states]
        except KeyError:
            return False  # torch's own function makes what is kept
        weights = params
        if self._options.master_weights:
            pairs = zip(states, params, strict=True)
            weights = [state.get(MASTER, param) for state, param in pairs]
            if any(weight.dtype in HALF for weight in weights):
                return False  # a master is missing
        grads = [param.grad for param in params]
        largest = kept[2] if group["amsgrad"] else []
        columns = host.Columns(weights, grads, kept[0], kept[1], largest, params)
        if not host.can_update(group, columns):
            return False
        host.update(columns, steps, group, scale.inverse)
        return True

    def _update_by_torch(self, group: dict[str, Any], scale: HostScale) -> None:
        """Update a group by torch's function, which makes the state that is missing."""
        params = group["params"]
        if self._options != Options():
            for param in params:
                is_dense = param.is_floating_point() and not param.grad.is_sparse
                if is_dense and self.state_dtype(param) != param.dtype:
                    self._init_state(param, group)
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        # torch's own: it makes the state that is missing, and refuses what torch does.
        has_complex = self._init_group(group, *lists)  # type: ignore[attr-defined]
        weights, grads, means, squares, largest, steps = lists
        work = Workspace()
        if scale != HostScale(False, None) or self._options != Options():
            for number, param in enumerate(params):
                weight = self._weight(param)
                kept = [means[number].dtype]
                dtype = working_dtype(weight, scale, kept)
                is_noisy = self._rounds_stochastically and kept == [torch.bfloat16]
                if is_noisy and dtype == torch.bfloat16:
                    dtype = torch.float32
                weights[number] = work.open_weight(weight, dtype)
                grads[number] = unscale(grads[number], scale.inverse, dtype)
                if is_noisy:
                    step, square = steps[number], squares[number]
                    squares[number] = work.open_square(square, dtype, step)
                for moments in filter(None, (means, squares, largest)):
                    moments[number] = work.open(moments[number], dtype)
        beta1, beta2 = group["betas"]
        adam(
            weights,
            grads,
            means,
            squares,
            largest,
            steps,
            foreach=choose_foreach(group, weights),
            capturable=group["capturable"],
            fused=group["fused"],
            has_complex=has_complex,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        work.write()
        self._round_masters(params)


class Adam(_AdamStep, torch.optim.Adam):
    """torch's Adam, which unscales, skips and updates in one pass.

    Example:
        >>> import torch, lossscale.torch.optim as optim
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = optim.Adam([weight], lr=0.5)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(weight.item(), 3)
        0.5
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
        moments_dtype: torch.dtype | None = None,
        write_back: bool = False,
    ) -> None:
        """Make an optimizer; torch's arguments mean what they mean in torch.

        Args:
            params: Parameters, named parameters, or groups of them.
            lr: The learning rate; a tensor of one number may be changed in place.
            betas: The decay rates of the two moments.
            eps: What is added to the denominator.
            weight_decay: The weight decay.
            amsgrad: Divide by the largest second moment so far.
            foreach: `True` chooses torch's own step.
            maximize: Maximize the objective.
            capturable: As in torch. The kernels can be captured without it.
            differentiable: Refused, as torch's fused optimizers refuse it.
            fused: `False` chooses torch's own step.
            decoupled_weight_decay: Decay the weights as AdamW does.
            master_weights: Keep a float32 master of every float16 or bfloat16
                parameter, and update that.
            moments_dtype: The dtype of the moments: torch.bfloat16 halves their size.
                `None` for the dtype of the weights.
            write_back: Write the unscaled gradients to `.grad`, which is otherwise left
                as it is.
        """
        refuse_differentiable(differentiable)
        self._options = check_options(
            master_weights=master_weights,
            write_back=write_back,
            moments_dtype=moments_dtype,
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch's AdamW, which unscales, skips and updates in one pass.

    Example:
        >>> import torch, lossscale.torch as ls, lossscale.torch.optim as optim
        >>> model = torch.nn.Linear(2, 1).half()
        >>> optimizer = optim.AdamW(model.parameters(), master_weights=True)
        >>> scaler = ls.GradScaler("cpu")
        >>> loss = model(torch.ones(2, dtype=torch.float16)).float().sum()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.reason  # 65,536 is infinite in float16: it was skipped
        'inf'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        moments_dtype: torch.dtype | None = None,
        write_back: bool = False,
    ) -> None:
        """Make an optimizer; torch's arguments mean what they mean in torch.

        Args:
            params: Parameters, named parameters, or groups of them.
            lr: The learning rate; a tensor of one number may be changed in place.
            betas: The decay rates of the two moments.
            eps: What is added to the denominator.
            weight_decay: The weight decay.
            amsgrad: Divide by the largest second moment so far.
            foreach: `True` chooses torch's own step.
            maximize: Maximize the objective.
            capturable: As in torch. The kernels can be captured without it.
            differentiable: Refused, as torch's fused optimizers refuse it.
            fused: `False` chooses torch's own step.
            master_weights: Keep a float32 master of every float16 or bfloat16
                parameter, and update that.
            moments_dtype: The dtype of the moments: torch.bfloat16 halves their size.
                `None` for the dtype of the weights.
            write_back: Write the unscaled gradients to `.grad`, which is otherwise left
                as it is.
        """
        refuse_differentiable(differentiable)
        self._options = check_options(
            master_weights=master_weights,
            write_back=write_back,
            moments_dtype=moments_dtype,
        )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
