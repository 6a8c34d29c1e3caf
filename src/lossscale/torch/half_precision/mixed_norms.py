# SPDX-License-Identifier: Apache-2.0
"""Normalisation layers with float32 weights, inside a model in float16.

`to_float16` gives torch's own layers these classes instead of hooks that cast around
them. On a GPU they read and write float16 directly. Elsewhere, and where code is
compiled or traced, they cast as the hooks do.
"""

from typing import Any

import torch

from lossscale.torch.half_precision.casts import BorderCasts
from lossscale.torch.half_precision.row_norm import PreparedNorm, RowNorm, prepare


class MixedLayerNorm(torch.nn.LayerNorm):
    """torch's `LayerNorm` in float32, between layers in float16."""

    casts: BorderCasts | None = None
    """`None` after `to_float32`."""
    _prepared: PreparedNorm | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalize; the result has the dtype of the weights outside."""
        casts, prepared = self.casts, self._prepared
        if casts is None:
            return super().forward(input)
        if not torch.compiler.is_compiling():
            weight, bias = self.weight, self.bias
            if prepared is None or not prepared.fits(input, weight, bias, self.eps):
                norm = RowNorm(self.normalized_shape, self.eps, has_mean=True)
                prepared = prepare(input, weight, bias, norm, casts.outside)
                self._prepared = prepared
            if prepared is not None:
                return prepared.normalize(input, weight, bias)
        return casts.cast_output(super().forward(casts.cast_input(input)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: not what was compiled."""
        return _without_prepared(self)


class MixedRMSNorm(torch.nn.RMSNorm):
    """torch's `RMSNorm` in float32, between layers in float16."""

    casts: BorderCasts | None = None
    """`None` after `to_float32`."""
    _prepared: PreparedNorm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize; the result has the dtype of the weights outside."""
        casts, prepared = self.casts, self._prepared
        if casts is None:
            return super().forward(x)
        if not torch.compiler.is_compiling():
            weight = self.weight
            # Without an epsilon torch takes that of the dtype it computes in.
            epsilon = _EPSILON if self.eps is None else self.eps
            if prepared is None or not prepared.fits(x, weight, None, epsilon):
                norm = RowNorm(self.normalized_shape, epsilon, has_mean=False)
                prepared = prepare(x, weight, None, norm, casts.outside)
                self._prepared = prepared
            if prepared is not None:
                return prepared.normalize(x, weight, None)
        return casts.cast_output(super().forward(casts.cast_input(x)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: not what was compiled."""
        return _without_prepared(self)


def _without_prepared(module: torch.nn.Module) -> dict[str, Any]:
    return {key: x for key, x in vars(module).items() if key != "_prepared"}


_EPSILON = torch.finfo(torch.float32).eps

_MIXED: dict[type[torch.nn.Module], type[MixedLayerNorm | MixedRMSNorm]] = {
    torch.nn.LayerNorm: MixedLayerNorm,
    torch.nn.RMSNorm: MixedRMSNorm,
}


def make_mixed(module: torch.nn.Module, casts: BorderCasts) -> bool:
    """Give a layer of torch's its class from this file; whether there is one.

    A subclass may compute anything, and a parametrization makes one.

    Args:
        module: The layer.
        casts: The casts at its border.
    """
    mixed = _MIXED.get(type(module))
    if mixed is None or "forward" in vars(module):
        return False
    module.__class__ = mixed
    module.casts = casts  # type: ignore[assignment]
    return True


def is_mixed(module: torch.nn.Module) -> bool:
    """Whether a layer has such a class, and casts."""
    return isinstance(module, tuple(_MIXED.values())) and module.casts is not None


def make_plain(module: torch.nn.Module) -> None:
    """Give a layer the class back that it had."""
    if not is_mixed(module):
        return
    del module.casts
    vars(module).pop("_prepared", None)
    for plain, mixed in _MIXED.items():
        if type(module) is mixed:  # FSDP2 makes a subclass of its own
            module.__class__ = plain  # type: ignore[assignment]
