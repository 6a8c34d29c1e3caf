# SPDX-License-Identifier: Apache-2.0
"""Which modules and tensors stay in float32, and why."""

import re
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from lossscale.core.validation import did_you_mean, format_value
from lossscale.errors import SettingError, SettingTypeError

Kept: TypeAlias = str | type[torch.nn.Module]
"""The name of a module, parameter or buffer, or a class of modules."""

CONVERTED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What becomes float16. float64 in a model is there on purpose, and 8 bits are
quantisation."""

NORMALISATIONS: tuple[type[torch.nn.Module], ...] = (
    _NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
)
"""torch's layers that stay in float32, batch and instance normalisation included."""

_NAME = re.compile(
    r"(Layer|R[Mm][Ss]|Batch|Group|Instance)Norm(ali[sz]ation)?(?![a-z])"
)
"""What classes of other packages are called: `LlamaRMSNorm`, `LayerNorm2d`. A lowercase
letter would make it another word: `GroupNormal`."""


class Selection:
    """What stays in float32, and why.

    Args:
        model: The model that is converted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.kept_modules: dict[str, str] = {}
        """Names of modules, and why they are kept. A shared module has several."""
        self.kept_tensors: dict[int, str] = {}
        """Identities of single parameters, gradients and buffers, and why."""
        # A shared module or parameter may be given by any of its names.
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def keep_named(self, keep_float32: Iterable[Kept]) -> None:
        """Keep what the caller has named, or raise."""
        if isinstance(keep_float32, (str, type)):
            keep_float32 = [keep_float32]
        tensors = {
            tensor_name: tensor
            for name, module in self.modules.items()
            for tensor_name, tensor in own_tensors(name, module).items()
        }
        for item in keep_float32:
            if isinstance(item, type) and issubclass(item, torch.nn.Module):
                for name, module in self.modules.items():
                    if isinstance(module, item):
                        reason = f"{item.__name__} is in keep_float32"
                        self.kept_modules.setdefault(name, reason)
            elif not isinstance(item, str):
                message = (
                    "keep_float32 must have names or classes of modules, got "
                    f"{format_value(item)}."
                )
                raise SettingTypeError(message)
            elif item in self.modules:
                self.kept_modules[item] = "named in keep_float32"
            elif item in tensors:
                self._keep_tensor(tensors[item], "named in keep_float32")
            else:
                close = did_you_mean(item, [*self.modules, *tensors])
                message = (
                    f"keep_float32 has the name {item!r}, and the model has no such "
                    f"module, parameter or buffer.{close}"
                )
                raise SettingError(message)
        self._keep_attention()

    def keep_normalisation(self) -> None:
        """Keep normalisation layers."""
        for name, module in self.modules.items():
            if isinstance(module, NORMALISATIONS) or _is_named_normalisation(module):
                self.kept_modules.setdefault(name, "normalisation")

    def keep_float64(self) -> None:
        """Leave float64 alone, or raise if the model has nothing else."""
        inside = self.inside()
        float64_name, has_others = "", False
        for name, module in self.modules.items():
            for tensor_name, tensor in own_tensors(name, module).items():
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                if tensor.dtype == torch.float64:
                    float64_name = tensor_name if is_parameter else float64_name
                    if id(module) not in inside:
                        self._keep_tensor(tensor, "float64 is left alone")
                elif is_parameter and tensor.dtype in CONVERTED:
                    has_others = True
        if float64_name and not has_others:
            message = (
                f"The parameter {float64_name} is float64, which to_float16 leaves "
                "alone, and so are all others. Call model.float() first."
            )
            raise SettingError(message)

    def outermost(self) -> dict[str, torch.nn.Module]:
        """Return the modules that are kept, without parts of others, by their names."""
        return {
            name: module
            for name, module in self.modules.items()
            if name in self.kept_modules
            and self.kept_modules.keys().isdisjoint(outer_names(name))
        }

    def inside(self) -> set[int]:
        """Return the identities of the modules that are kept, with all their parts."""
        outermost = self.outermost().values()
        return {id(part) for module in outermost for part in module.modules()}

    def _keep_attention(self) -> None:
        """Keep the attention whose output projection is kept.

        torch's attention reads the weights of the projection and never calls it, so
        that no hook of it runs.
        """
        for name, module in self.modules.items():
            if isinstance(module, torch.nn.MultiheadAttention):
                projection = f"{name}.out_proj" if name else "out_proj"
                if projection in self.kept_modules:
                    reason = f"it reads the weights of {projection!r}, which is kept"
                    self.kept_modules.setdefault(name, reason)

    def _keep_tensor(self, tensor: torch.Tensor, reason: str) -> None:
        self.kept_tensors.setdefault(id(tensor), reason)
        if tensor.is_leaf and tensor.grad is not None:
            self.kept_tensors.setdefault(id(tensor.grad), reason)


def outer_names(name: str) -> list[str]:
    """Return the names of all modules that contain a module, from the outermost on."""
    keys = name.split(".") if name else []
    return [".".join(keys[:length]) for length in range(len(keys))]


def own_tensors(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a module has itself, by full name."""
    prefix = f"{name}." if name else ""
    own = {**module._parameters, **module._buffers}  # noqa: SLF001  # shared ones too
    return {f"{prefix}{key}": x for key, x in own.items() if x is not None}


def has_forward(module: torch.nn.Module) -> bool:
    """Whether a module can be called; a `ModuleList` or `ParameterDict` cannot."""
    forward = module.forward
    return getattr(forward, "__func__", forward) is not torch.nn.Module.forward


def parts_with_forward(
    module: torch.nn.Module, name: str = ""
) -> dict[str, torch.nn.Module]:
    """Return a module, or the parts of a container that can be called, by name."""
    if has_forward(module):
        return {name: module}
    parts: dict[str, torch.nn.Module] = {}
    for key, child in module.named_children():
        parts |= parts_with_forward(child, f"{name}.{key}" if name else key)
    return parts


def _is_named_normalisation(module: torch.nn.Module) -> bool:
    """Whether a module has the name and the parameters of a normalisation layer.

    `LayerNormLinear` and `EncoderStableLayerNorm` have matrices as well, which float16
    is for. The parameters of a normalisation layer all have one shape.
    """
    if not any(_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    own = {id(param) for param in module.parameters(recurse=False)}
    shapes = {_shape(param) for param in module.parameters() if id(param) in own}
    return len(shapes - {()}) <= 1 and all(
        len(_shape(param)) <= 1 for param in module.parameters() if id(param) not in own
    )


def _shape(param: torch.Tensor) -> tuple[int, ...]:
    """Return the lengths of the axes that have several elements."""
    return () if is_lazy(param) else tuple(size for size in param.shape if size > 1)
