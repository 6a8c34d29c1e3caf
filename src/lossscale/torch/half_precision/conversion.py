# SPDX-License-Identifier: Apache-2.0
"""`to_float16` and `to_float32`: convert a model, and keep what needs float32.

Normalisation layers stay in float32: their statistics do not fit float16. What goes
into such a layer is cast to float32, and its results back to float16, by hooks or by
the layer itself (`mixed_norms.py`). The model itself gets float16 inputs and returns
float32 results, so that the loss is computed in float32.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from lossscale.core.validation import check_bool, format_value
from lossscale.errors import SettingError, SettingTypeError
from lossscale.torch.half_precision.casts import (
    NARROW,
    BorderCasts,
    WeightDtype,
    cast_around_kept,
    cast_around_model,
    has_casts,
    mark_by_hook,
    remove_casts,
)
from lossscale.torch.half_precision.mixed_norms import (
    is_mixed,
    make_mixed,
    make_plain,
)
from lossscale.torch.half_precision.range import keep_out_of_range
from lossscale.torch.half_precision.selection import (
    CONVERTED,
    Kept,
    Selection,
    own_tensors,
    parts_with_forward,
)
from lossscale.torch.half_precision.sharing import refuse_shared


class Conversion(NamedTuple):
    """What `to_float16` did."""

    converted: tuple[str, ...]
    """Modules that have float16 parameters or buffers now."""
    kept: tuple[str, ...]
    """Modules that stay in float32, and single parameters and buffers that stay as they
    are in a module that was converted."""
    reasons: dict[str, str]
    """Why each of them was kept."""


def to_float16(
    model: torch.nn.Module,
    *,
    keep_float32: Iterable[Kept] = (),
    keep_normalisation: bool = True,
) -> Conversion:
    """Convert a model to float16 in place, except for what needs float32.

    Normalisation layers keep float32 weights and compute in float32. The model casts
    its floating-point inputs to float16 and its results to float32: tensors, and those
    inside lists, dictionaries and other mappings, dataclasses and namespaces. Integers,
    complex and float64 parameters and buffers are left alone. `to_float32` reverses all
    of it.

    A module that stays in float32 casts what its `forward` is given and returns. Code
    that calls another of its methods or reads its weights has to cast by itself.

    Args:
        model: The model; `torch.nn.Module.half` would convert all of it.
        keep_float32: What else stays in float32: names of modules, as `named_modules`
            has them, classes of modules, and names of single parameters and buffers,
            around which nothing is cast.
        keep_normalisation: Keep normalisation layers in float32: torch's own, and those
            that have such a name, `LlamaRMSNorm` or `FrozenBatchNorm2d`. torch's layers
            compute in float32 in any case: without it their weights, and the gradients
            of these, are float16 as well, and nothing is cast around other layers.

    Returns:
        Which modules were converted, which were kept, and why.

    Raises:
        SettingError: If nothing has a given name; if float16 cannot hold a parameter,
            or a buffer of a module that has parameters; if a module or parameter would
            be needed in both dtypes; if all parameters are float64; or if the model was
            converted before. The model is then as it was.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> layers = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1)
        >>> model = torch.nn.Sequential(*layers)
        >>> report = ls.to_float16(model)
        >>> report.converted, report.kept, report.reasons
        (('0', '2'), ('1',), {'1': 'normalisation'})
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """
    _check_model("to_float16", model)
    check_bool("keep_normalisation", keep_normalisation)
    selection = Selection(model)
    selection.keep_named(keep_float32)
    if keep_normalisation:
        selection.keep_normalisation()
    if any(has_casts(module) or is_mixed(module) for module in model.modules()):
        message = "The model was converted before. Call to_float32(model) first."
        raise SettingError(message)
    keep_out_of_range(selection)
    selection.keep_float64()
    kept = selection.outermost()
    inside = selection.inside()
    refuse_shared(selection)
    for module in model.modules():
        if id(module) in inside:
            _convert(module, NARROW, torch.float32)
        else:
            _convert(
                module, CONVERTED, torch.float16, except_for=selection.kept_tensors
            )
    _add_casts(model, list(kept.values()), inside)
    return _report(selection, kept)


def to_float32(model: torch.nn.Module) -> None:
    """Convert a model to float32 in place, and remove the casts of `to_float16`.

    float16 and bfloat16 become float32, and float64 is left alone. The weights have the
    numbers that they have in float16. The masters of an optimizer are not rounded: load
    `optimizer.float32_state_dict(model)` to have those.

    Args:
        model: The model.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> model = torch.nn.Linear(2, 1)
        >>> report = ls.to_float16(model)
        >>> ls.to_float32(model)
        >>> model.weight.dtype
        torch.float32
    """
    _check_model("to_float32", model)
    for module in model.modules():
        _convert(module, NARROW, torch.float32)
        remove_casts(module)
        make_plain(module)


def _check_model(function: str, model: object) -> None:
    """Raise unless this is a module."""
    if not isinstance(model, torch.nn.Module):
        message = (
            f"{function}() takes a torch.nn.Module, got {format_value(model)}. Write "
            f"{function}(model)."
        )
        raise SettingTypeError(message)


def _convert(
    module: torch.nn.Module,
    sources: Collection[torch.dtype],
    target: torch.dtype,
    *,
    except_for: Collection[int] = (),
) -> None:
    """Convert the parameters, gradients and buffers that a module has itself."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in sources or id(tensor) in except_for:
            return tensor
        return tensor.to(target)

    module._apply(cast, recurse=False)  # noqa: SLF001  # what Module.half calls


def _add_casts(
    model: torch.nn.Module, kept: list[torch.nn.Module], inside: set[int]
) -> None:
    """Cast around the model, and around each module that stays in float32."""
    converted = [module for module in model.modules() if id(module) not in inside]
    weights = WeightDtype.of_first(converted, torch.float16, model)
    models = dict.fromkeys(parts_with_forward(model).values())
    for part in models:
        if id(part) not in inside:
            cast_around_model(part, weights)
    parts_of_encoders = {
        id(part)
        for module in model.modules()
        if isinstance(module, torch.nn.TransformerEncoderLayer)
        for part in module.children()
    }
    borders = [part for module in kept for part in parts_with_forward(module).values()]
    for part in dict.fromkeys(borders):
        if part not in models:
            own = WeightDtype.of_first(list(part.modules()), torch.float32, part)
            casts = BorderCasts(own, weights)
            if not make_mixed(part, casts):
                cast_around_kept(part, casts)
            elif id(part) in parts_of_encoders:
                mark_by_hook(part, casts.outside)


def _report(selection: Selection, kept: dict[str, torch.nn.Module]) -> Conversion:
    """Return the names of what was converted and what was kept."""
    whole: dict[int, str] = {}
    for outer_name, outer in kept.items():
        for part in outer.modules():
            reason = selection.kept_modules[outer_name]
            if part is not outer:
                reason = f"part of {outer_name!r}: {reason}"
            whole.setdefault(id(part), reason)
    converted: list[str] = []
    reasons: dict[str, str] = {}
    for name, module in selection.model.named_modules():
        tensors = own_tensors(name, module)
        if not any(tensor.is_floating_point() for tensor in tensors.values()):
            continue
        if id(module) in whole:
            reasons[name] = whole[id(module)]
            continue
        if any(
            tensor.dtype == torch.float16 and id(tensor) not in selection.kept_tensors
            for tensor in tensors.values()
        ):
            converted.append(name)
        for tensor_name, tensor in tensors.items():
            if id(tensor) in selection.kept_tensors:
                reasons[tensor_name] = selection.kept_tensors[id(tensor)]
    return Conversion(tuple(converted), tuple(reasons), reasons)
