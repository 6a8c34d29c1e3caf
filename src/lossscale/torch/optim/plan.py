# SPDX-License-Identifier: Apache-2.0
"""`StepPlan`: which parameters the kernels update and which torch's functions do.

A plan is made when parameters, gradients or groups change, and kept as long as they
stay: asking whether they did must cost little, because it is asked at every step. The
kernels take real float32, float16 and bfloat16 tensors without gaps, on a device where
they run; everything else is left to torch, and on a GPU a warning says so once.
"""

import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lossscale.errors import ContextError
from lossscale.torch import native
from lossscale.torch.devices import is_capturing
from lossscale.torch.distributed.dtensor import as_dtensor, local_shard
from lossscale.torch.inspection import kernel_backend
from lossscale.torch.inspection.layout_cache import Placement, layout_of, version_of
from lossscale.torch.optim.identity import are_identical
from lossscale.torch.optim.kept_tensors import UPDATED_DTYPES, KeptTensors
from lossscale.torch.optim.measurement import UpdateMeasurement, describe_weight

if TYPE_CHECKING:
    from lossscale.torch.optim.kernels.tables import Row, Tables
    from lossscale.torch.optim.optimizer import ScaledOptimizer

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Member(NamedTuple):
    """A parameter that the kernels update."""

    param: torch.Tensor
    group: int
    grad_dtype: torch.dtype
    """The dtype of its gradient."""


class DevicePlan(NamedTuple):
    """What the kernels of one device do."""

    tables: "Tables"
    members: list[Member]
    """The parameters of the tables, in their order."""
    signatures: dict[int, object]
    """For each of them, by its id, what its row was made from."""
    positions: list[int | None]
    """For each of them, which of all gradients is its own; `None` if it has none."""
    has_all: bool
    """Whether each of them has a gradient."""
    is_whole: bool
    """Whether the gradients of the tables are all gradients, in their order."""


def may_use_kernels(params: Sequence[torch.Tensor]) -> bool:
    """Whether there is anything that kernels might update."""
    return kernel_backend.is_interpreted() or any(param.is_cuda for param in params)


class StepPlan:
    """Who updates which parameter, until something changes."""

    def __init__(
        self,
        optimizer: "ScaledOptimizer",
        params: list[torch.Tensor],
        grads: list[torch.Tensor | None],
        previous: "StepPlan | None",
    ) -> None:
        """Divide the parameters among the kernels and torch.

        Args:
            optimizer: The optimizer.
            params: All of its parameters.
            grads: Their gradients.
            previous: The plan before; its tables are used again if they have a row for
                every parameter.
        """
        self._params = list(params)
        self._present = [i for i, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        self._grads_layout = layout_of(present)
        self._keys = _keys_of(optimizer)
        self._has_shards = any(as_dtensor(param) is not None for param in params)
        self._placement = Placement(self._local(params))
        self._version: int | None = None
        """What `version_of` said of the gradients at the last step."""
        self._grads_record: bytes | None = None
        """Where the gradients are, when they have not moved for two steps."""
        self.eager: dict[int, list[torch.Tensor]] = {}
        """The parameters that torch updates, by the index of their group."""
        self.is_final = True
        """Whether the next step can go by the same plan."""
        members = self._group_by_device(optimizer)
        self.devices = [
            _plan_device(optimizer, device_members, params, previous)
            for device_members in members.values()
        ]
        updated = [member.param for plan in self.devices for member in plan.members]
        self._kept = KeptTensors(optimizer.state, updated, optimizer.kept_names)

    def _group_by_device(
        self, optimizer: "ScaledOptimizer"
    ) -> dict[torch.device, list[Member]]:
        """Return what the kernels update, by device; the rest is for torch."""
        members: dict[torch.device, list[Member]] = {}
        counts = Counter(map(id, self._params))
        repeated = {param_id for param_id, count in counts.items() if count > 1}
        for number, group in enumerate(optimizer.param_groups):
            left = []
            chosen = optimizer.reason_against(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not chosen and optimizer.starts_eagerly(param, group):
                    self.is_final = False
                    left.append(param)
                elif id(param) in repeated:
                    _warn_once(param, "the optimizer has it more than once")
                    left.append(param)
                elif reason := chosen or _reason_against(param):
                    _warn_once(param, reason)
                    left.append(param)
                else:
                    member = Member(param, number, param.grad.dtype)
                    members.setdefault(param.device, []).append(member)
            if left:
                self.eager[number] = left
        return members

    def fits(
        self,
        optimizer: "ScaledOptimizer",
        params: list[torch.Tensor],
        grads: list[torch.Tensor | None],
    ) -> bool:
        """Whether everything is as it was when this plan was made.

        The gradients may be elsewhere, of the same layout.
        """
        if not are_identical(params, self._params):
            return False
        present = grads
        if len(self._present) < len(grads):
            present = [grads[index] for index in self._present]
            missing = len(grads) - len(present)
            if sum(map(operator.is_, grads, repeat(None))) != missing:
                return False
        if version_of(self._grads_layout) is None and any(
            map(operator.is_, present, repeat(None))
        ):
            return False  # torch's guard raises for what is no tensor
        return (
            self._grads_layout.check(*present)  # type: ignore[arg-type]
            and self._has_settings_and_state(optimizer, params)
        )

    def is_unchanged(
        self, optimizer: "ScaledOptimizer", params: list[torch.Tensor]
    ) -> bool:
        """Whether the plan fits and the gradients have not moved for two steps.

        The tables have their addresses then, and `run` needs no list of them.
        """
        code, record = native.code, self._grads_record
        return (
            code is not None
            and record is not None
            and not any(is_capturing(plan.tables.device) for plan in self.devices)
            and are_identical(params, self._params)
            and code.compare_grads(params, record) == native.SAME
            and self._has_settings_and_state(optimizer, params)
        )

    def _has_settings_and_state(
        self, optimizer: "ScaledOptimizer", params: list[torch.Tensor]
    ) -> bool:
        """Whether parameters, settings and state are those of this plan.

        Args:
            optimizer: The optimizer.
            params: The parameters of this plan; their memory is compared.
        """
        return (
            self._keys == _keys_of(optimizer)
            and self._placement.is_same(self._local(params))
            and optimizer.keeps(self._kept)
        )

    def _note_grads(self, grads: list[torch.Tensor | None]) -> None:
        """Record gradients whose addresses the tables have, if they have not moved."""
        version = version_of(self._grads_layout)
        if version is not None and version == self._version and native.code is not None:
            self._grads_record = native.code.record(grads)
        self._version = version

    def _local(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters, of DTensors the shards of this rank."""
        return list(map(local_shard, params)) if self._has_shards else params

    def run(
        self,
        optimizer: "ScaledOptimizer",
        grads: list[torch.Tensor | None] | None,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        *,
        write_back: bool,
        measurement: UpdateMeasurement | None,
    ) -> None:
        """Update what the kernels update.

        Args:
            optimizer: The optimizer.
            grads: The gradients of all parameters; `None` if `is_unchanged` was true.
            grad_scale: What divides them, if they are scaled.
            found_inf: 1.0 to skip the step, else 0.0.
            write_back: Whether to write the unscaled gradients.
            measurement: Given what is added to the weights, if that is measured.
        """
        last_version, is_captured = self._version, False
        if grads is not None:
            # What is recorded must be what the tables have, also after an exception.
            self._version = self._grads_record = None
        for plan in self.devices:
            device_grads = grads
            if grads is not None and not plan.is_whole:
                device_grads = [
                    None if index is None else grads[index] for index in plan.positions
                ]
            if device_grads is not None and self._has_shards:
                device_grads = [
                    None if grad is None else local_shard(grad) for grad in device_grads
                ]
            measured = plan.tables.apply(
                device_grads,
                optimizer.param_groups,
                grad_scale,
                found_inf,
                has_all=plan.has_all,
                version=version_of(self._grads_layout),
                write_back=write_back,
                measure=measurement is not None,
            )
            if measurement is not None and measured is not None:
                pairs = zip(plan.members, plan.positions, strict=True)
                weights = [
                    None
                    if index is None
                    else describe_weight(optimizer, member.param, index)
                    for member, index in pairs
                ]
                measurement.add(weights, *measured)
            if is_capturing(plan.tables.device):
                is_captured = True  # and the addresses are in tables of the graph
                kept = [
                    value
                    for member in plan.members
                    for value in optimizer.state.get(member.param, {}).values()
                ]
                optimizer.keep_for_graph(plan.tables, kept)
        if grads is not None and not is_captured:
            self._version = last_version
            self._note_grads(grads)


def _keys_of(optimizer: "ScaledOptimizer") -> list[object]:
    """Return what of each group decides who updates it."""
    return [
        (*optimizer.group_key(group), len(group["params"]))
        for group in optimizer.param_groups
    ]


def _reason_against(param: torch.Tensor) -> str:
    """Return why the kernels cannot update a parameter; empty if they can."""
    grad = param.grad
    if grad is None or not kernel_backend.is_available(param.device):
        return "there are no kernels for its device"
    local_param, local_grad = local_shard(param), local_shard(grad)
    if type(local_param) not in _PLAIN or type(local_grad) not in _PLAIN:
        return f"it is a {type(local_param).__name__}"
    if local_param.dtype not in UPDATED_DTYPES or local_grad.dtype not in (
        local_param.dtype,
        torch.float32,
    ):
        return f"it is {local_param.dtype} and its gradient {local_grad.dtype}"
    if not kernel_backend.can_read(local_grad) or not kernel_backend.can_read(
        local_param
    ):
        return "it or its gradient is sparse or has gaps"
    has_shape = local_param.shape == local_grad.shape  # else torch's function raises
    if not has_shape or _strides(local_param) != _strides(local_grad):
        return "its gradient has other strides"
    return ""


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that matter: those of dimensions of more than one element."""
    return [
        stride
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ]


def _warn_once(param: torch.Tensor, reason: str) -> None:
    """Say on a GPU that a parameter is updated by torch's functions."""
    if param.is_cuda and reason not in _warned and reason != _CHOSEN:
        _warned.add(reason)
        message = (
            f"A parameter of shape {tuple(param.shape)} on {param.device} is updated "
            f"by torch's functions, which wait for the device: {reason}."
        )
        warnings.warn(message, stacklevel=2)


_warned: set[str] = set()

_CHOSEN = "foreach=True or fused=False was chosen"


def chooses_torch(group: Mapping[str, Any]) -> bool:
    """Whether a group's settings choose torch's own functions."""
    return bool(group["foreach"]) or group["fused"] is False


def warn_of_loaded_choice(groups: Sequence[Mapping[str, Any]]) -> None:
    """Say once that a state dict has chosen torch's functions where kernels run."""
    params = [param for group in groups for param in group["params"]]
    if may_use_kernels(params) and _LOADED not in _warned:
        _warned.add(_LOADED)
        message = (
            "The state dict that was loaded has foreach=True or fused=False: torch's "
            "functions update its groups from now on, and wait for the device. To have "
            "the kernels update them, set foreach and fused of each group of "
            "optimizer.param_groups to None."
        )
        warnings.warn(message, stacklevel=3)


_LOADED = "a state dict has chosen torch's functions"


def reason_of_group(group: Mapping[str, Any], numbers: Sequence[object]) -> str:
    """Return why the kernels cannot update any parameter of a group.

    Args:
        group: The group.
        numbers: Those of its settings that must be numbers.
    """
    if chooses_torch(group):
        return _CHOSEN
    if any(isinstance(number, torch.Tensor) for number in numbers):
        return "a setting other than the learning rate is a tensor"
    return ""


def _plan_device(
    optimizer: "ScaledOptimizer",
    members: list[Member],
    params: list[torch.Tensor],
    previous: StepPlan | None,
) -> DevicePlan:
    """Return the plan of one device, with the tables of the plan before if they fit."""
    device = members[0].param.device
    if is_capturing(device):
        message = (
            "The first step of an optimizer, or one with other parameters or gradients "
            "than the step before, cannot be captured in a CUDA graph. Take one such "
            "step before the capture."
        )
        raise ContextError(message)
    groups = len(optimizer.param_groups)
    indices = {id(param): index for index, param in enumerate(params)}
    with_grad = {id(member.param) for member in members}
    before = next(
        (
            x
            for x in (previous.devices if previous else ())
            if x.tables.device == device
        ),
        None,
    )
    if before is not None:
        members = members + _find_members_without_grad(optimizer, before, with_grad)
    signatures = _signatures_of(optimizer, members, groups)
    if before is not None and signatures == before.signatures:
        tables, members, signatures, *_ = before
    else:
        rows = [optimizer.make_row(*member) for member in members]
        tables = optimizer.make_tables(rows, [member.param for member in members])
        signatures = _signatures_of(optimizer, members, groups)
    positions = [
        indices[id(member.param)] if id(member.param) in with_grad else None
        for member in members
    ]
    has_all = None not in positions
    is_whole = positions == list(range(len(params)))
    return DevicePlan(tables, members, signatures, positions, has_all, is_whole)


def _find_members_without_grad(
    optimizer: "ScaledOptimizer", before: DevicePlan, with_grad: set[int]
) -> list[Member]:
    """Return members without a gradient: they keep their rows, for the next time.

    Args:
        optimizer: The optimizer.
        before: The plan before.
        with_grad: The ids of the members that have a gradient.
    """
    groups = optimizer.param_groups
    numbers = {
        id(param): number
        for number, group in enumerate(groups)
        for param in group["params"]
    }
    resting = []
    for param, _, grad_dtype in before.members:
        number = numbers.get(id(param))
        if number is None or id(param) in with_grad:
            continue
        local_param = local_shard(param)
        if (
            local_param.device == before.tables.device
            and local_param.dtype in UPDATED_DTYPES
            # A row would make what is missing: state that torch makes with a gradient.
            and optimizer.has_state(param, groups[number])
        ):
            resting.append(Member(param, number, grad_dtype))
    return resting


def _signatures_of(
    optimizer: "ScaledOptimizer", members: list[Member], groups: int
) -> dict[int, object]:
    """Return what the row of each member is made from, by the id of its parameter."""
    return {
        id(member.param): signature_of(optimizer.make_row(*member), groups)
        for member in members
    }


def signature_of(row: "Row", groups: int) -> object:
    """Return what a row of the tables is made from: addresses, dtypes and group.

    Args:
        row: The row.
        groups: How many groups there are.
    """
    tensors = (row.param, *row.kept, row.step)
    return (row.group, groups, row.grad_dtype), tuple(
        None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape)
        for tensor in tensors
    )
