# SPDX-License-Identifier: Apache-2.0
"""Normalisation layers with float32 weights, inside a model in float16.

`to_float16` gives torch's own layers these classes instead of hooks that cast around
them. On a GPU they read and write float16 directly. Elsewhere, and where code is
compiled or traced, they cast as the hooks do.
"""

import torch

from lossscale.torch.half_precision.casts import BorderCasts
from lossscale.torch.half_precision.row_norm import (
    Operands,
    PreparedNorm,
    RowNorm,
    prepare,
)


class MixedLayerNorm(torch.nn.LayerNorm):
    """torch's `LayerNorm` in float32, between layers in float16."""

    casts: BorderCasts | None = None
    """`None` after `to_float32`."""
    _prepared: PreparedNorm | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalize; the result has the dtype of the rest of the model."""
        casts = self.casts
        if casts is None:
            return super().forward(input)
        if not torch.compiler.is_compiling():
            operands = Operands(input, self.weight, self.bias)
            norm = RowNorm(self.normalized_shape, float(self.eps), has_mean=True)
            prepared = _prepare(self, operands, norm, casts)
            if prepared is not None:
                return prepared.normalize(operands)
        return casts.cast_output(super().forward(casts.cast_input(input)))


class MixedRMSNorm(torch.nn.RMSNorm):
    """torch's `RMSNorm` in float32, between layers in float16."""

    casts: BorderCasts | None = None
    """`None` after `to_float32`."""
    _prepared: PreparedNorm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize; the result has the dtype of the rest of the model."""
        casts = self.casts
        if casts is None:
            return super().forward(x)
        if not torch.compiler.is_compiling():
            operands = Operands(x, self.weight, None)
            # Without an epsilon torch takes that of the dtype it computes in.
            epsilon = _EPSILON if self.eps is None else float(self.eps)
            norm = RowNorm(self.normalized_shape, epsilon, has_mean=False)
            prepared = _prepare(self, operands, norm, casts)
            if prepared is not None:
                return prepared.normalize(operands)
        return casts.cast_output(super().forward(casts.cast_input(x)))


_EPSILON = torch.finfo(torch.float32).eps


def _prepare(
    module: MixedLayerNorm | MixedRMSNorm,
    operands: Operands,
    norm: RowNorm,
    casts: BorderCasts,
) -> PreparedNorm | None:
    """Return the module's normalisation by the kernels; `None` if it is for casts.

    Args:
        module: The module; it keeps what was prepared for the next call.
        operands: What it is called with.
        norm: What it computes.
        casts: The casts at its border.
    """
    prepared, dtype = module._prepared, casts.outside.read()  # noqa: SLF001
    if prepared is not None and prepared.fits(operands, norm, dtype):
        return prepared
    prepared = prepare(operands, norm, dtype)
    if prepared is not None:
        vars(module)["_prepared"] = prepared
    return prepared


_MIXED: dict[type[torch.nn.Module], type[MixedLayerNorm | MixedRMSNorm]] = {
    torch.nn.LayerNorm: MixedLayerNorm,
    torch.nn.RMSNorm: MixedRMSNorm,
}
"""The class of this file for each of torch's."""


def make_mixed(module: torch.nn.Module, casts: BorderCasts) -> bool:
    """Change the class of a layer of torch's to that of this file.

    Layers of other classes are left as they are: a subclass may compute anything.

    Args:
        module: The layer.
        casts: The casts at its border.

    Returns:
        Whether the class was changed.
    """
    mixed = _MIXED.get(type(module))
    if mixed is None or "forward" in vars(module):
        return False
    module.__class__ = mixed
    module.casts = casts  # type: ignore[assignment]
    return True


def is_mixed(module: object) -> bool:
    """Whether a layer has a class of this file, and casts."""
    if isinstance(module, (MixedLayerNorm, MixedRMSNorm)):
        return module.casts is not None
    return False


def make_plain(module: torch.nn.Module) -> None:
    """Change the class of a layer back to torch's.

    Where that cannot be, the layer computes as torch's does: FSDP2 and parametrizations
    have made a subclass, or other code has wrapped `forward`, which calls this class.
    """
    if not is_mixed(module):
        return
    del module.casts
    vars(module).pop("_prepared", None)
    for plain, mixed in _MIXED.items():
        if type(module) is mixed and "forward" not in vars(module):
            module.__class__ = plain  # type: ignore[assignment]
