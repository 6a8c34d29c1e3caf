# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers with numbers that float16 does not have."""

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lossscale.errors import SettingError
from lossscale.torch.distributed.dtensor import local_shard
from lossscale.torch.half_precision.selection import (
    CONVERTED,
    Selection,
    has_forward,
    own_tensors,
)

_FIRST_TOO_LARGE = 65520.0
"""What is below it rounds to 65504, the largest number of float16."""

_MOST_EXAMPLES = 3


def keep_out_of_range(selection: Selection) -> None:
    """Keep modules with such buffers, or raise if a module has parameters too.

    A module without parameters, such as a table of positions, computes in float32 with
    casts around it. One with parameters might multiply a float16 result by the float32
    buffer, and only its author knows.
    """
    inside = selection.inside()
    examples: list[str] = []
    to_keep: dict[str, None] = {}
    for name, module in selection.model.named_modules():
        if id(module) in inside:
            continue
        for tensor_name, tensor in own_tensors(name, module).items():
            largest = _largest_lost(tensor)
            if largest is None or id(tensor) in selection.kept_tensors:
                continue
            has_parameters = next(module.parameters(), None) is not None
            if name and has_forward(module) and not has_parameters:
                reason = f"float16 cannot hold {largest:.8g} of buffer {tensor_name!r}"
                selection.kept_modules.setdefault(name, reason)
                continue
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            kind = "parameter" if is_parameter else "buffer"
            examples.append(f"{kind} {tensor_name!r} ({largest:.8g})")
            to_keep[_name_to_keep(name, module, tensor_name)] = None
    if examples:
        more = len(examples) - _MOST_EXAMPLES
        message = (
            "float16 holds numbers up to 65504, and the model has larger ones: "
            f"{', '.join(examples[:_MOST_EXAMPLES])}"
            f"{f' and {more} more' if more > 0 else ''}. Keep them in float32 with "
            f"keep_float32={list(to_keep)}."
        )
        raise SettingError(message)


def _name_to_keep(name: str, module: torch.nn.Module, tensor_name: str) -> str:
    """Return what to write in keep_float32: a module with casts, or a tensor."""
    # The weights that torch computes are those of the layer, where they are needed.
    layer, found, _ = f".{name}".partition(".parametrizations.")
    if found:
        return layer[1:]
    return name if name and has_forward(module) else tensor_name


def _largest_lost(tensor: torch.Tensor) -> float | None:
    """Return the largest finite number that would become infinite, or `None`."""
    if tensor.dtype not in CONVERTED - {torch.float16} or is_lazy(tensor):
        return None
    shard = local_shard(tensor.detach())
    if shard.is_meta or shard.layout != torch.strided or shard.numel() == 0:
        return None
    if is_traceable_wrapper_subclass(shard):  # has no numbers of its own
        return None
    low, high = (float(bound) for bound in torch.aminmax(shard))
    largest = low if -low > high else high
    if -_FIRST_TOO_LARGE < largest < _FIRST_TOO_LARGE:
        return None
    # Infinities and NaN are the same in float16: a mask may have them.
    finite = shard[shard.isfinite() & (shard.abs() >= _FIRST_TOO_LARGE)]
    return float(finite[finite.abs().argmax()]) if finite.numel() else None
