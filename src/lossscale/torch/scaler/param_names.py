# SPDX-License-Identifier: Apache-2.0
"""Names of parameters, for reports and errors."""

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lossscale.core.validation import format_value
from lossscale.errors import SettingTypeError


class ParamNames:
    """The names of parameters, as far as they are known; keeps no parameter alive."""

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._names = WeakIdKeyDictionary()
        self.add(pairs)

    def add(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add names, such as those of `model.named_parameters()`."""
        try:
            checked_pairs: list[tuple[object, object]] = [
                (name, param) for name, param in pairs
            ]
        except (TypeError, ValueError):
            checked_pairs = [("", None)]
        for name, param in checked_pairs:
            if not isinstance(name, str) or not isinstance(param, torch.Tensor):
                message = (
                    "names must be pairs of a name and a parameter, such as "
                    f"model.named_parameters(); got {format_value(pairs)}."
                )
                raise SettingTypeError(message)
            self._names[param] = name

    def __reduce__(self) -> tuple[type["ParamNames"], tuple[()]]:
        """Pickle no names: they belong to the parameters of this process."""
        return ParamNames, ()

    def list_trained(self) -> list[str]:
        """Return the names of the parameters that are trained, as they were given."""
        return [name for param, name in self._names.items() if param.requires_grad]

    def name_of(self, optimizer: torch.optim.Optimizer | None, index: int) -> str:
        """Return the name of an optimizer's parameter; if it has none, its position."""
        if optimizer is None:
            return f"parameter {index} of an optimizer that is gone"
        position = index
        for number, group in enumerate(optimizer.param_groups):
            params = group["params"]
            if position >= len(params):
                position -= len(params)
                continue
            name: str | None = self._names.get(params[position])
            if name is not None:
                return name
            if group.get("param_names") is not None:
                return str(group["param_names"][position])
            shape = tuple(params[position].shape)
            return f"param_groups[{number}]['params'][{position}] of shape {shape}"
        return f"parameter {index}, which the optimizer no longer has"
