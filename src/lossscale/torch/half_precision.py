# SPDX-License-Identifier: Apache-2.0
"""`to_float16` and `to_float32`: convert a model, and keep what needs float32.

Normalisation layers stay in float32: their statistics do not fit float16. Hooks cast
what goes into such a layer to float32, and its results back to float16. The model
itself gets float16 inputs and returns float32 results, so that the loss is computed in
float32.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from lossscale.core.validation import check_bool, did_you_mean, format_value
from lossscale.errors import SettingError, SettingTypeError

Kept: TypeAlias = str | type[torch.nn.Module]
"""The name of a module, or a class of modules."""

NORMALISATIONS: tuple[type[torch.nn.Module], ...] = (
    _NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
)
"""Layers that stay in float32: these, batch and instance normalisation included, and
modules of other packages with such a name: `LlamaRMSNorm`, `T5LayerNorm`."""

_NAMES = ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm")


class Conversion(NamedTuple):
    """What `to_float16` did: names of modules that have parameters or buffers."""

    converted: tuple[str, ...]
    kept: tuple[str, ...]


class _CastInputs:
    """A hook that casts what goes into a module."""

    def __init__(self, source: torch.dtype, target: torch.dtype) -> None:
        self._source, self._target = source, target

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), self._source, self._target)


class _CastOutputs:
    """A hook that casts what a module returns."""

    def __init__(self, source: torch.dtype, target: torch.dtype) -> None:
        self._source, self._target = source, target

    def __call__(self, _: torch.nn.Module, __: Any, outputs: Any) -> Any:
        return _cast(outputs, self._source, self._target)


def _cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Return nested values with the tensors of one dtype in another."""
    return tree_map_only(
        torch.Tensor, lambda x: x.to(target) if x.dtype == source else x, values
    )


def to_float16(
    model: torch.nn.Module,
    *,
    keep_float32: Iterable[Kept] = (),
    keep_normalisation: bool = True,
) -> Conversion:
    """Convert a model to float16 in place, except for what needs float32.

    Normalisation layers keep float32 weights and compute in float32. The model casts
    its float32 inputs to float16 and its results to float32; inputs that are integers
    are left alone. `to_float32` reverses all of it.

    Args:
        model: The model; `torch.nn.Module.half` would convert all of it.
        keep_float32: What else stays in float32: names of modules, as `named_modules`
            has them, and classes of modules.
        keep_normalisation: Keep normalisation layers in float32. torch's own layers
            compute in float32 in any case: without it their weights, inputs and results
            are float16, which saves the casts.

    Returns:
        Which modules were converted and which were kept.

    Raises:
        SettingError: If no module has a given name, if the model was converted before,
            or if a kept module shares a parameter with one that is converted.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> layers = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1)
        >>> model = torch.nn.Sequential(*layers)
        >>> ls.to_float16(model)
        Conversion(converted=('0', '2'), kept=('1',))
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """
    names, classes = _parse_kept(model, keep_float32)
    endings: tuple[str, ...] = ()
    if check_bool("keep_normalisation", keep_normalisation):
        classes, endings = classes + NORMALISATIONS, _NAMES
    if any(_own_hooks(module) for module in model.modules()):
        message = "The model was converted before. Call to_float32(model) first."
        raise SettingError(message)
    kept_modules = {
        name: module
        for name, module in model.named_modules()
        if name in names
        or isinstance(module, classes)
        or type(module).__name__.endswith(endings)
    }
    outermost = [
        module
        for name, module in kept_modules.items()
        if not any(_is_inside(name, outer) for outer in kept_modules)
    ]
    inside = {id(child) for module in outermost for child in module.modules()}
    _refuse_shared(model, inside)
    for module in model.modules():
        if id(module) not in inside:
            _convert(module, torch.float16)
    for module in outermost:
        if module is not model:
            _add_casts(module, torch.float16, torch.float32)
    if model not in outermost:
        _add_casts(model, torch.float32, torch.float16)
    return _report(model, inside)


def to_float32(model: torch.nn.Module) -> None:
    """Convert a model to float32 in place, and remove the casts of `to_float16`.

    The weights have the numbers that they have in float16. The masters of an optimizer
    are not rounded: load `optimizer.float32_state_dict(model)` to have those.

    Args:
        model: The model.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> model = torch.nn.Linear(2, 1)
        >>> conversion = ls.to_float16(model)
        >>> ls.to_float32(model)
        >>> model.weight.dtype
        torch.float32
    """
    for module in model.modules():
        _convert(module, torch.float32)
        for hooks, key in _own_hooks(module):
            del hooks[key]


def _parse_kept(
    model: torch.nn.Module, keep_float32: Iterable[Kept]
) -> tuple[set[str], tuple[type[torch.nn.Module], ...]]:
    """Return the names and the classes of modules to keep, or raise."""
    if isinstance(keep_float32, (str, type)):
        keep_float32 = [keep_float32]
    modules = dict(model.named_modules())
    names: set[str] = set()
    classes: list[type[torch.nn.Module]] = []
    for item in keep_float32:
        if isinstance(item, type) and issubclass(item, torch.nn.Module):
            classes.append(item)
        elif not isinstance(item, str):
            message = (
                "keep_float32 must have names or classes of modules, got "
                f"{format_value(item)}."
            )
            raise SettingTypeError(message)
        elif item not in modules:
            message = (
                f"keep_float32 has the name {item!r}, and the model has no such "
                f"module.{did_you_mean(item, modules)}"
            )
            raise SettingError(message)
        else:
            names.add(item)
    return names, tuple(classes)


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module is a part of another one, by their names."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _refuse_shared(model: torch.nn.Module, inside: set[int]) -> None:
    """Raise if a parameter would have to be float16 and float32."""
    owners: dict[int, bool] = {}
    for name, module in model.named_modules():
        is_kept = id(module) in inside
        for param_name, param in module.named_parameters(recurse=False):
            if owners.setdefault(id(param), is_kept) != is_kept:
                message = (
                    f"The parameter {name}.{param_name} is shared by a module that "
                    "stays in float32 and one that is converted. Name both of them in "
                    "keep_float32."
                )
                raise SettingError(message)


def _convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters and buffers that a module has itself."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module._apply(cast, recurse=False)  # noqa: SLF001  # what Module.half calls


def _add_casts(
    module: torch.nn.Module, outside: torch.dtype, within: torch.dtype
) -> None:
    """Cast what goes into a module, and its results back."""
    module.register_forward_pre_hook(_CastInputs(outside, within), with_kwargs=True)
    module.register_forward_hook(_CastOutputs(within, outside))


def _own_hooks(module: torch.nn.Module) -> list[tuple[dict[int, Any], int]]:
    """Return the hooks that `_add_casts` has registered, with their keys."""
    hook_dicts = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001
    return [
        (hooks, key)
        for hooks in hook_dicts
        for key, hook in hooks.items()
        if isinstance(hook, (_CastInputs, _CastOutputs))
    ]


def _report(model: torch.nn.Module, inside: set[int]) -> Conversion:
    """Return the names of the modules that have tensors."""
    converted_names: list[str] = []
    kept_names: list[str] = []
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_floating_point() for tensor in tensors):
            (kept_names if id(module) in inside else converted_names).append(name)
    return Conversion(tuple(converted_names), tuple(kept_names))
