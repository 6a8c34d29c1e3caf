# SPDX-License-Identifier: Apache-2.0
"""`ScalerOptions`: the constructor's arguments of `GradScaler`, validated once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias
from weakref import ref

import torch

from lossscale.core import validation
from lossscale.core.data_policies import AutoStart
from lossscale.core.policies import Policy, require_policy
from lossscale.core.validation import format_value
from lossscale.errors import ContextError, SettingError, SettingTypeError
from lossscale.torch.distributed.rank_groups import RankGroups
from lossscale.torch.scaler.param_names import ParamNames
from lossscale.torch.scaler.scale_update import torch_policy
from lossscale.torch.scaler.wrapped_optimizers import unwrap

if TYPE_CHECKING:
    from lossscale.torch.grad_scaler import GradScaler

Names: TypeAlias = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
"""What `model.named_parameters()` returns, or a mapping."""

TorchNumbers: TypeAlias = tuple[float, float, float, int]
"""torch's initial scale, growth factor, back-off factor and growth interval."""

_FIRST_SCALE = 2.0**16
_TORCH_DEFAULTS: TorchNumbers = (_FIRST_SCALE, 2.0, 0.5, 2000)


@dataclass(frozen=True)
class ScalerOptions:
    """How a scaler behaves; nothing of it changes."""

    policy: Policy | None
    """`None` if torch's numbers describe it."""
    names: ParamNames
    ignores_no_gradients: bool
    """Whether a step without any gradient counts as finite."""
    allow_fp16: bool
    measure_norm: bool
    measure_amax: bool
    rank_groups: RankGroups
    model: "ref[torch.nn.Module] | None" = None
    """The module that was given; `explain` runs it."""

    def to_pickle(self) -> "ScalerOptions":
        """Return the options without what cannot be pickled."""
        over_world = self.rank_groups.shards_over_world
        rank_groups = RankGroups(shards_over_world=over_world)
        return replace(self, rank_groups=rank_groups, model=None)


def check_device(device: object) -> None:
    """Raise unless this is a kind of device: it comes first, and is easily left out."""
    hint = "such as 'cuda' or 'cpu'"
    if isinstance(device, (int, float)):
        hint += f"; write GradScaler(init_scale={device!r}) for the first scale"
    elif isinstance(device, torch.nn.Module):
        hint += "; write GradScaler(module=model) for the names of its parameters"
    try:
        if isinstance(device, (str, torch.device)):
            torch.device(device)
            return
    except RuntimeError as error:
        message = f"device must be a kind of device, {hint}, got {device!r}."
        raise SettingError(message) from error
    message = f"device must be a kind of device, {hint}. Got {_describe(device)}."
    raise SettingTypeError(message)


def _describe(value: object) -> str:
    """Return a value in one line: a module or optimizer prints as many."""
    lines = format_value(value).splitlines()
    return lines[0] if len(lines) == 1 else f"a {type(value).__name__}"


def parse_init_scale(init_scale: float | Literal["auto"]) -> float:
    """Return the first scale as a number: torch's own for "auto"."""
    if isinstance(init_scale, Policy):
        message = (
            f"init_scale must be a number, got {_describe(init_scale)}. Write "
            f"policy={type(init_scale).__name__}(...)."
        )
        raise SettingTypeError(message)
    if not isinstance(init_scale, str):
        return init_scale
    if init_scale != "auto":
        message = f'init_scale must be a number or "auto", got {init_scale!r}.'
        raise SettingError(message)
    return _FIRST_SCALE


def parse_policy(
    policy: Policy | None, numbers: TorchNumbers, *, is_auto: bool = False
) -> Policy | None:
    """Return a policy, or raise unless it is one and comes alone.

    Args:
        policy: What was given; `None` for torch's numbers.
        numbers: torch's numbers.
        is_auto: Whether `AutoStart` is to find the first scale.
    """
    if policy is None:
        return AutoStart(torch_policy(*numbers)) if is_auto else None
    require_policy(policy)
    if is_auto or numbers != _TORCH_DEFAULTS:
        message = (
            "policy= was given together with init_scale, growth_factor, backoff_factor "
            "or growth_interval; put these numbers into the policy, such as "
            "policy=Dynamic(init_scale=1024.0)."
        )
        raise SettingError(message)
    return policy


def parse_names(names: Names | None, module: torch.nn.Module | None) -> ParamNames:
    """Return the names that were given, one way or the other."""
    if names is not None and module is not None:
        message = "Pass either names= or module=, not both."
        raise SettingError(message)
    if module is not None:
        if not isinstance(module, torch.nn.Module):
            message = f"module must be a torch.nn.Module, got {format_value(module)}."
            raise SettingTypeError(message)
        return ParamNames(module.named_parameters())
    if isinstance(names, Mapping):
        return ParamNames(names.items())
    return ParamNames(() if names is None else names)


def parse_options(
    *,
    policy: Policy | None,
    names: Names | None,
    module: torch.nn.Module | None,
    on_no_gradients: str,
    allow_fp16: bool,
    measure_norm: bool,
    measure_amax: bool,
    rank_groups: RankGroups,
) -> ScalerOptions:
    """Return the options that the constructor's arguments describe, or raise.

    Args:
        policy: What `parse_policy` returned.
        names: The names of parameters, if they were given.
        module: The module that has them, if it was given.
        on_no_gradients: "raise" or "ignore".
        allow_fp16: As for the constructor.
        measure_norm: As for the constructor.
        measure_amax: As for the constructor.
        rank_groups: What `parse_rank_groups` returned.
    """
    validation.check_choice("on_no_gradients", on_no_gradients, ("raise", "ignore"))
    return ScalerOptions(
        policy=policy,
        names=parse_names(names, module),
        ignores_no_gradients=on_no_gradients == "ignore",
        allow_fp16=validation.check_bool("allow_fp16", allow_fp16),
        measure_norm=validation.check_bool("measure_norm", measure_norm),
        measure_amax=validation.check_bool("measure_amax", measure_amax),
        rank_groups=rank_groups,
        model=None if module is None else ref(module),
    )


MODEL_IS_GONE = (
    "explain() needs the model, and the one that the scaler was made with is gone: the "
    "scaler keeps no model alive. Keep a reference to it: models = "
    "nn.ModuleList([generator, discriminator]), then GradScaler(module=models)."
)


def make_watch(
    on_collapse: object, scaler: "GradScaler", module: torch.nn.Module | None
) -> Callable[[], None] | None:
    """Return what watches the batch after the alarm; `None` unless that was asked for.

    Raises:
        SettingError: If it was asked for without the module.
    """
    if on_collapse != "explain":
        return None
    if module is None:
        message = (
            'on_collapse="explain" needs the model whose batch it explains. Write '
            'GradScaler(module=model, on_collapse="explain").'
        )
        raise SettingError(message)
    reference, model = ref(scaler), ref(module)

    def watch() -> None:
        from lossscale.torch.explain.collapse import watch_next_batch  # noqa: PLC0415

        watch_next_batch(reference, model)

    return watch


def refuse_unknown_steps(scaler: object) -> NoReturn:
    """Raise, because a subclass keeps from its base class which steps were applied."""
    message = (
        f"{type(scaler).__name__} overrides update() and never calls GradScaler's, so "
        "its steps are not known. Call super().update() in it, or scheduler.step()."
    )
    raise ContextError(message)


def refuse_factor(name: str, policy: Policy) -> NoReturn:
    """Raise, because torch's numbers are not the settings of a scaler with a policy."""
    message = (
        f"This scaler has a policy of its own, {policy!r}; make a new GradScaler with "
        f"a policy that has another {name}."
    )
    raise SettingError(message)


def refuse_optimizer(method: str, optimizer: object) -> NoReturn:
    """Raise, because a method was given something that is not an optimizer."""
    arguments = {"clip_grad_norm_": "optimizer, 1.0", "step_all": "*optimizers"}
    message = (
        f"{method}() takes the optimizer, got {_describe(optimizer)} "
        f"({type(optimizer).__name__}). Write "
        f"scaler.{method}({arguments.get(method, 'optimizer')})."
    )
    raise SettingTypeError(message)


def refuse_repeated(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer is there twice: its gradients would be applied twice."""
    if len({id(unwrap(optimizer)) for optimizer in optimizers}) < len(optimizers):
        message = (
            "step_all() was given an optimizer twice. Pass each optimizer once: "
            "scaler.step_all(generator_optimizer, discriminator_optimizer)."
        )
        raise SettingError(message)


def refuse_module_as_inputs(module: torch.nn.Module) -> NoReturn:
    """Raise, because gradients are taken with respect to tensors."""
    message = (
        f"inputs must be a tensor or several, got a {type(module).__name__}. Write "
        "scaler.grad(outputs, list(model.parameters()))."
    )
    raise SettingTypeError(message)


def check_new_scale(new_scale: object, device: str) -> float | torch.Tensor:
    """Validate the `new_scale` argument of `update()`."""
    if isinstance(new_scale, float):
        return validation.as_float32(validation.check_scale("new_scale", new_scale))
    expected = (
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
        "torch.FloatTensor with requires_grad=False."
    )
    if not isinstance(new_scale, torch.Tensor):
        message = f"{expected} Got {format_value(new_scale)}; write a float."
        raise AttributeError(message)  # noqa: TRY004  # which is what torch raises
    kind = torch.device(device).type
    if (
        new_scale.device.type != kind
        or new_scale.numel() != 1
        or new_scale.requires_grad
    ):
        raise AssertionError(expected)
    if kind == "cpu":
        validation.check_scale("new_scale", float(new_scale))
    return new_scale
