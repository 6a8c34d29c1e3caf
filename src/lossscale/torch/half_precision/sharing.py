# SPDX-License-Identifier: Apache-2.0
"""Modules and parameters that would be needed in float16 and in float32."""

import torch

from lossscale.errors import SettingError
from lossscale.torch.half_precision.selection import (
    Selection,
    has_forward,
    outer_names,
    own_tensors,
    parts_with_forward,
)


def refuse_shared(selection: Selection) -> None:
    """Raise if a module or a parameter would be needed in both dtypes."""
    _refuse_shared_parameters(selection)
    _refuse_shared_modules(selection)
    if not has_forward(selection.model):
        _refuse_models_in_models(selection)


def _refuse_shared_parameters(selection: Selection) -> None:
    """Raise if a kept module shares a parameter with one that is converted."""
    inside = selection.inside()
    owners: dict[int, tuple[str, bool]] = {}
    for name, module in selection.modules.items():
        is_kept = id(module) in inside
        for param_name, param in own_tensors(name, module).items():
            if id(param) in selection.kept_tensors:
                continue
            to_keep = name or param_name
            first, first_is_kept = owners.setdefault(id(param), (to_keep, is_kept))
            if first_is_kept != is_kept and isinstance(param, torch.nn.Parameter):
                message = (
                    f"The parameter {param_name} is shared by a module that stays in "
                    "float32 and one that is converted. Keep both of them: "
                    f"keep_float32={[first, to_keep]}."
                )
                raise SettingError(message)


def _refuse_shared_modules(selection: Selection) -> None:
    """Raise if a part of a kept module is called from outside of it as well.

    A cast around it would return float16 to the kept module; without one it would be
    given float16 from outside.
    """
    borders: dict[str, torch.nn.Module] = {}
    for name, module in selection.outermost().items():
        borders |= parts_with_forward(module, name)
    inner: dict[int, tuple[str, str]] = {}
    outer: dict[int, str] = {}
    for name, module in selection.modules.items():
        border = next((outer for outer in outer_names(name) if outer in borders), None)
        if border is None:
            outer.setdefault(id(module), name)
        elif has_forward(module):
            inner.setdefault(id(module), (name, border))
    for identity in inner.keys() & outer.keys():
        name, border = inner[identity]
        alias = outer[identity]
        message = (
            f"{name!r} and {alias!r} are the same module: {border!r} is kept in "
            f"float32, and {alias!r} would become float16. Write "
            f"keep_float32=[{alias!r}], or name a module that contains both."
        )
        raise SettingError(message)


def _refuse_models_in_models(selection: Selection) -> None:
    """Raise if a model in a container is a part of another one in there.

    It would return float32 to the other one, which is converted.
    """
    models = parts_with_forward(selection.model)
    names = {id(model): name for name, model in models.items()}
    for name, module in selection.modules.items():
        outer = next((outer for outer in outer_names(name) if outer in models), None)
        if id(module) in names and outer is not None:
            message = (
                f"{names[id(module)]!r} and {name!r} are the same module. Convert "
                f"{outer!r}, and not the container that has both."
            )
            raise SettingError(message)
