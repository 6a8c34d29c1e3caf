# SPDX-License-Identifier: Apache-2.0
"""What our optimizers have in common: the step, masters and state dicts.

An optimizer is called as torch's are. A scaler sets `grad_scale`, by which the
gradients are divided, and `found_inf`, which skips the step; without them it is a
step of torch's class. Gradients are not written to unless `write_back` asks for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from lossscale.core import validation
from lossscale.core.statistics import UpdateStatistics
from lossscale.core.validation import format_value
from lossscale.errors import SettingError
from lossscale.torch import native
from lossscale.torch.devices import disable_compile, is_capturing
from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.optim.eager import HostScale, read_scale, write_weight
from lossscale.torch.optim.formulas import Kept
from lossscale.torch.optim.kept_tensors import KeptTensors, check_kept_tensor, is_held
from lossscale.torch.optim.loaded_state import keep_dtypes
from lossscale.torch.optim.masters import HALF, MASTER, export_weights, load_weights
from lossscale.torch.optim.measurement import EagerUpdate, UpdateMeasurement
from lossscale.torch.optim.plan import (
    StepPlan,
    chooses_torch,
    may_use_kernels,
    warn_of_loaded_choice,
)
from lossscale.torch.parameters import params_of
from lossscale.torch.scaler.param_names import ParamNames

if TYPE_CHECKING:
    from lossscale.torch.optim.kernels.tables import Row, Tables


class Options(NamedTuple):
    """What our optimizers have in addition to torch's arguments."""

    master_weights: bool = False
    """Keep a float32 master of every float16 or bfloat16 parameter."""
    moments_dtype: torch.dtype | None = None
    """The dtype of the moments; `None` for that of the weights."""
    write_back: bool = False
    """Write the unscaled gradients to `.grad`."""


def refuse_differentiable(differentiable: bool) -> None:
    """Raise as torch's fused optimizers do."""
    if differentiable:
        message = "`fused` does not support `differentiable`"
        raise RuntimeError(message)


def check_options(
    *, master_weights: bool, write_back: bool, moments_dtype: torch.dtype | None = None
) -> Options:
    """Return the options, or raise."""
    if moments_dtype not in (None, torch.float32, torch.bfloat16):
        message = (
            "moments_dtype must be torch.float32 or torch.bfloat16, or None for the "
            f"dtype of the weights, got {format_value(moments_dtype)}."
        )
        raise SettingError(message)
    return Options(
        validation.check_bool("master_weights", master_weights),
        moments_dtype,
        validation.check_bool("write_back", write_back),
    )


class ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer that unscales, skips and updates by itself."""

    _step_supports_amp_scaling = True
    """Scalers pass `grad_scale` and `found_inf`."""

    kept_names: ClassVar[tuple[str, ...]]
    """What the kernels may read or write of a parameter's state."""
    steps_as: ClassVar[type[torch.optim.Optimizer]]
    """torch's class of the same update; a scaler reads how it uses the gradients."""

    _options = Options()
    _plan: StepPlan | None = None
    _captured: tuple[object, ...] = ()
    """What CUDA graphs use, also when the next step has other tables and tensors."""
    _state_was_read = True
    """Whether other code may have put tensors of the state elsewhere."""
    _loading: Mapping[str, Any] | None = None
    """The state dict that is being loaded."""
    _requested: UpdateMeasurement | None = None
    """The measurement that the next step is to make."""
    _measured: UpdateMeasurement | None = None
    """The last one that was made."""

    # -- the step ----------------------------------------------------------------------

    @disable_compile
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless a scaler found a gradient that is not finite.

        Args:
            closure: Computes the loss and its gradients again, and returns the loss.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = params_of(self)
        measurement = self._requested
        if measurement is not None:
            measurement = self._begin_measurement(params)
        if may_use_kernels(params):
            self._step_by_kernels(params, measurement)
        else:
            self._step_eagerly(self.param_groups, measurement)
        return loss

    def _step_by_kernels(
        self, params: list[torch.Tensor], measurement: UpdateMeasurement | None
    ) -> None:
        """Update what the kernels can update, and the rest by torch's functions."""
        plan, grads = self._plan, None
        if plan is None or not plan.is_unchanged(self, params):
            grads = native.read_grads(params)
            if plan is None or not plan.fits(self, params, grads):
                if all(grad is None for grad in grads):
                    return
                plan = self._plan = StepPlan(self, params, grads, plan)
        if plan.eager:
            # With the settings that the groups have now.
            self._step_eagerly(
                [
                    {**self.param_groups[number], "params": left}
                    for number, left in plan.eager.items()
                ],
                measurement,
            )
        plan.run(
            self,
            grads,
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            write_back=self._options.write_back,
            measurement=measurement,
        )
        if not plan.is_final:
            self._plan = None

    def copy_settings(self) -> None:
        """Copy changed settings of the groups, such as learning rates, to the device.

        A step does so by itself. Call it before the replay of a CUDA graph, which takes
        the step without Python: `scheduler.step(); optimizer.copy_settings();
        graph.replay()`. A learning rate that is a tensor of the device needs no call.
        """
        if self._plan is not None:
            for plan in self._plan.devices:
                plan.tables.copy_settings(self.param_groups)

    def _step_eagerly(
        self,
        groups: list[dict[str, Any]],
        measurement: UpdateMeasurement | None,
    ) -> None:
        """Update parameters by torch's functions.

        Args:
            groups: The groups, each with the parameters that are to be updated.
            measurement: Given what is added to the weights, if that is measured.
        """
        scale = read_scale(
            getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        )
        if scale.is_skipped:
            return
        for group in groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            group = {**group, "params": params}  # noqa: PLW2901
            if measurement is None:
                self._update_group(group, scale)
            else:
                update = EagerUpdate(self, group, scale, self._positions())
                self._update_group(group, scale)
                update.finish(measurement)

    def _update_group(self, group: dict[str, Any], scale: HostScale) -> None:
        """Update parameters that have gradients."""
        raise NotImplementedError

    def _round_masters(self, params: list[torch.Tensor]) -> None:
        """Write masters, rounded, to their parameters."""
        if self._options.master_weights:
            for param in params:
                weight = self._weight(param)
                if weight is not param:
                    write_weight(param, weight)

    def _write_back(self, params: list[torch.Tensor], scale: HostScale) -> None:
        """Unscale the gradients in place, if that was asked for."""
        if self._options.write_back and scale.inverse is not None:
            for param in params:
                if param.grad is not None:
                    param.grad.mul_(scale.inverse)

    # -- measuring an update -----------------------------------------------------------

    def measure_next_update(self) -> None:
        """Ask the next step to measure what it adds to the weights, once.

        On a GPU the kernels measure while they update, and nothing waits. Elsewhere
        the updates are computed a second time. The weights are the same, bit for bit.
        A step that is captured in a CUDA graph is not measured. A scaler with a
        `Recorder` asks by itself.

        Example:
            >>> import torch, lossscale.torch.optim as optim
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> optimizer = optim.SGD([("weight", weight)], lr=2.0**-12)
            >>> weight.grad = torch.tensor([1.0, 4.0], dtype=torch.float16)
            >>> optimizer.measure_next_update()
            >>> optimizer.step()
            >>> update = optimizer.last_update
            >>> update.names, update.lost  # 1 - 2**-12 is rounded to 1
            (['weight'], [0.5])
        """
        self._requested = UpdateMeasurement()

    @property
    def last_update(self) -> UpdateStatistics | None:
        """What the step that was measured last has added to the weights.

        Reading it waits for the device. `None` if no step was measured, or if that step
        was skipped.
        """
        if self._measured is None:
            return None
        return self._measured.read(partial(ParamNames().name_of, self))

    def take_measurement(self) -> UpdateMeasurement | None:
        """Drop a request, if there is one; return what the step has measured.

        Returns:
            `None` if no step was taken since the request.
        """
        requested, self._requested = self._requested, None
        return self._measured if requested is None else None

    def _begin_measurement(
        self, params: list[torch.Tensor]
    ) -> UpdateMeasurement | None:
        """Return the measurement that was asked for; `None` during a capture."""
        devices = {param.device for param in params}
        captured = any(map(is_capturing, devices))
        self._measured = None if captured else self._requested
        self._requested = None
        return self._measured

    def _positions(self) -> dict[int, int]:
        """Return which of the parameters each is, by its id."""
        params = [param for group in self.param_groups for param in group["params"]]
        return {id(param): index for index, param in enumerate(params)}

    def compute_update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        kept: Kept,
        count: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return what a step adds to a weight, before it is rounded.

        Args:
            weight: The weight.
            grad: Its unscaled gradient.
            kept: What is kept for it, in the same dtype.
            count: How many steps came before.
            group: The settings.
        """
        raise NotImplementedError

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """What is kept for each parameter, in a dictionary, as in torch.

        Reading it is noted: see `kept_tensors.py`.
        """
        try:
            state: defaultdict[torch.Tensor, Any] = vars(self)["state"]
        except KeyError:
            message = f"{type(self).__name__} has no state yet"
            raise AttributeError(message) from None
        # After the dictionary was taken: a thread that takes a step in between counts
        # the references to it.
        self._state_was_read = True
        return state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        vars(self)["state"] = state
        self._state_was_read = True

    def keeps(self, kept: KeptTensors) -> bool:
        """Whether the state is where it was, as far as that must be compared.

        Notes that the state need not be compared from now on, if it was, and if no
        other code has any of it.

        Args:
            kept: Where the tensors of the state were at the step before.
        """
        if not self._state_was_read:
            return kept.are_sampled_in(vars(self)["state"])
        if not kept.are_in(vars(self)["state"]):
            return False
        self._state_was_read = is_held(vars(self))
        return True

    # -- what the plan of a step asks --------------------------------------------------

    def group_key(self, group: Mapping[str, Any]) -> tuple[object, ...]:
        """Return what of a group decides how it is updated."""
        return group["foreach"], group["fused"], *self._structure(group)

    def _structure(self, group: Mapping[str, Any]) -> tuple[object, ...]:
        """Return what of a group decides what is kept for its parameters."""
        raise NotImplementedError

    def reason_against(self, group: Mapping[str, Any]) -> str:
        """Return why the kernels cannot update a group; empty if they can."""
        raise NotImplementedError

    def starts_eagerly(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether torch's functions take the first step of a parameter."""
        return False

    def has_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether everything is there that a row of the kernels' tables needs."""
        raise NotImplementedError

    def keep_for_graph(self, *used: object) -> None:
        """Keep what a CUDA graph reads and writes, for as long as the optimizer is."""
        self._captured = (*self._captured, used)

    def make_row(
        self, param: torch.Tensor, number: int, grad_dtype: torch.dtype
    ) -> "Row":
        """Return a parameter's row of the kernels' tables; its state is made here.

        Args:
            param: The parameter.
            number: The index of its group.
            grad_dtype: The dtype of its gradient.
        """
        raise NotImplementedError

    def make_tables(self, rows: "list[Row]", params: list[torch.Tensor]) -> "Tables":
        """Return the kernels' tables of one device.

        Args:
            rows: The rows.
            params: The parameters that they were made from.
        """
        raise NotImplementedError

    def _rows_tensor(
        self, param: torch.Tensor, name: str, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Return what is kept under a name, where and laid out as the parameter is.

        A loaded state may have other strides, or be where the parameter was before.

        Args:
            param: The parameter.
            name: The name.
            dtype: The dtype that the kernels take it for; `None` for its own.

        Raises:
            StateError: If it is not what the kernels can update.
        """
        value: torch.Tensor | None = self.state.get(param, {}).get(name)
        if value is None:
            return None
        check_kept_tensor(param, name, value)
        dtype = dtype or value.dtype
        is_like_param = (
            value.device == param.device
            and value.dtype == dtype
            and value.stride() == param.stride()
        )
        if not is_like_param:
            value = torch.empty_like(param, dtype=dtype).copy_(value)
            self.state[param][name] = value
        return local_shard(value)

    # -- masters -----------------------------------------------------------------------

    def has_master(self, param: torch.Tensor) -> bool:
        """Whether a parameter is updated through a float32 master."""
        return self._options.master_weights and param.dtype in HALF

    def state_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return the narrowest dtype of what is kept for a parameter."""
        moments = self._options.moments_dtype
        if moments is not None and param.is_floating_point():
            return moments
        return torch.float32 if self.has_master(param) else param.dtype

    def _make_master(self, param: torch.Tensor) -> None:
        """Make the master of a parameter that lacks it."""
        if self.has_master(param) and MASTER not in self.state[param]:
            self.state[param][MASTER] = param.detach().to(torch.float32)

    def _init_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Make the state of a parameter, where torch's would have another dtype."""
        raise NotImplementedError

    def _weight(self, param: torch.Tensor) -> torch.Tensor:
        """Return what is updated: the master, or the parameter itself."""
        weight: torch.Tensor = self.state.get(param, {}).get(MASTER, param)
        return weight

    def master_parameters(self) -> Iterator[torch.Tensor]:
        """Return the float32 weights: masters, and parameters that have none.

        Example:
            >>> import torch, lossscale.torch.optim as optim
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> optimizer = optim.SGD([weight], lr=2.0**-12, master_weights=True)
            >>> weight.grad = torch.ones_like(weight)
            >>> optimizer.step()
            >>> weight.tolist()  # float16 has no number between 1 - 2**-11 and 1
            [1.0, 1.0]
            >>> [master] = optimizer.master_parameters()
            >>> 1.0 - master[0].item() == 2.0**-12
            True
        """
        for group in self.param_groups:
            for param in group["params"]:
                if self.has_master(param):
                    self._init_state(param, group)
                yield self._weight(param)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copy the parameters to their masters.

        Call it after writing to parameters by hand, such as by
        `module.load_state_dict`: a step computes from the masters and would overwrite
        what was written.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if MASTER in self.state.get(param, {}):
                    self.state[param][MASTER].copy_(param)

    @torch.no_grad()
    def float32_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict of a module in float32, with the masters' numbers.

        Code that trains or evaluates in float32 can load it.

        Args:
            module: The module whose parameters this optimizer updates.
        """
        masters = {
            id(param): state[MASTER]
            for param, state in self.state.items()
            if MASTER in state
        }
        return export_weights(module, masters)

    @torch.no_grad()
    def load_float32_state_dict(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any]
    ) -> None:
        """Load float32 weights into a module and, unrounded, into its masters.

        What is beyond the range of a half-precision parameter becomes its largest
        number; a warning names such parameters.

        Args:
            module: The module whose parameters this optimizer updates.
            state_dict: A state dict of the module in float32, with its names.

        Raises:
            StateError: If a parameter with a master is missing from the state dict;
                nothing is changed.
        """
        groups = {
            id(param): group
            for group in self.param_groups
            for param in group["params"]
            if self.has_master(param)
        }

        def open_master(param: torch.Tensor) -> torch.Tensor:
            self._init_state(param, groups[id(param)])
            return self._weight(param)

        load_weights(module, state_dict, groups.keys(), open_master)

    # -- saving ------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned.

        torch casts the state to the dtype of its parameter. Here masters and moments
        keep their own dtypes: those that this optimizer was made with. Masters that the
        state dict lacks are made from the parameters at the next step.

        Raises:
            StateError: If a tensor of the state has another shape than its parameter.
        """

        def remember(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._loading = loaded

        # The last hook: others may replace the state dict.
        handle = self.register_load_state_dict_pre_hook(remember)
        chosen = list(map(chooses_torch, self.param_groups))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None
        loaded = map(chooses_torch, self.param_groups)
        if any(new and not old for new, old in zip(loaded, chosen, strict=True)):
            warn_of_loaded_choice(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied."""
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what was pickled, copied or loaded."""
        loaded = self._loading
        if loaded is not None:
            keep_dtypes(self, state, loaded)
        self._plan = None
        super().__setstate__(state)
