# SPDX-License-Identifier: Apache-2.0
"""Hooks that cast what goes into a module and what it returns.

They read the dtype that the weights have at the time of the call, so that a model keeps
working after `model.float()` or `model.bfloat16()`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lossscale.torch.half_precision.nested import cast_nested

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NARROW = frozenset({torch.float16, torch.bfloat16})
"""The dtypes of 16 bits."""

UP_TO_FLOAT32 = NARROW | {torch.float32}

UP_TO_FLOAT64 = UP_TO_FLOAT32 | {torch.float64}
"""The floating-point dtypes that are cast; those of 8 bits belong to quantisation."""


class WeightDtype(NamedTuple):
    """The dtype that a parameter has at the time of the call."""

    module: torch.nn.Module | None
    """The module that has the parameter, or `None` if no module has one."""
    name: str
    fallback: torch.dtype
    """The dtype if there is no parameter, or no longer."""

    @classmethod
    def of_first(
        cls, modules: list[torch.nn.Module], dtype: torch.dtype
    ) -> "WeightDtype":
        """Find the first parameter that has this dtype now."""
        for module in modules:
            for name, param in module.named_parameters(recurse=False):
                if param.dtype == dtype:
                    return cls(module, name, dtype)
        return cls(None, "", dtype)

    def read(self) -> torch.dtype:
        """Return the dtype."""
        if self.module is None:
            return self.fallback
        # An attribute may be computed: torch.nn.utils.parametrize makes it a property.
        param = self.module._parameters.get(self.name)  # noqa: SLF001
        if param is None or param.dtype not in UP_TO_FLOAT64:  # such as quantised
            return self.fallback
        return param.dtype


class BorderCasts(NamedTuple):
    """The casts around a module that stays in float32."""

    inside: WeightDtype
    """The dtype of its own weights."""
    outside: WeightDtype
    """The dtype of the weights around it."""

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype of the module."""
        return _cast(tensor, UP_TO_FLOAT32, self.inside.read())

    def cast_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype outside."""
        return _cast(tensor, UP_TO_FLOAT32, self.outside.read())


class _CastInputs:
    """A hook that casts what goes into a module."""

    def __init__(
        self,
        sources: frozenset[torch.dtype],
        target: WeightDtype,
        takes_narrow: bool = False,
    ) -> None:
        """Remember the dtypes.

        Args:
            sources: What is cast.
            target: What it is cast to.
            takes_narrow: Whether a GPU needs no cast of 16 bits to float32.
        """
        self._sources, self._target = sources, target
        self._takes_narrow = takes_narrow
        self.handle: RemovableHandle | None = None

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        target = self._target.read()
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            if (
                self._takes_narrow
                and args[0].is_cuda
                and args[0].dtype in NARROW
                and target is torch.float32
            ):
                return args, kwargs
            # Most layers; walking through what may be nested takes twice as long.
            return (_cast(args[0], self._sources, target),), kwargs
        return cast_nested((args, kwargs), self._sources, target)


class _CastOutputs:
    """A hook that casts what a module returns."""

    def __init__(self, sources: frozenset[torch.dtype], target: WeightDtype) -> None:
        self._sources, self._target = sources, target
        self.handle: RemovableHandle | None = None

    def __call__(self, _: torch.nn.Module, __: Any, outputs: Any) -> Any:
        target = self._target.read()
        if type(outputs) is torch.Tensor:
            return _cast(outputs, self._sources, target)
        return cast_nested(outputs, self._sources, target)


def _cast(
    tensor: torch.Tensor, sources: frozenset[torch.dtype], target: torch.dtype
) -> torch.Tensor:
    return tensor.to(target) if tensor.dtype in sources else tensor


def cast_around_model(model: torch.nn.Module, weights: WeightDtype) -> None:
    """Cast what goes into a model to the dtype of its weights, and results to float32.

    Results in float64 are left alone.
    """
    results = WeightDtype(None, "", torch.float32)
    _register(model, _CastInputs(UP_TO_FLOAT64, weights), _CastOutputs(NARROW, results))


def cast_around_kept(module: torch.nn.Module, casts: BorderCasts) -> None:
    """Cast what goes into a kept module to its own dtype, and its results back.

    float64 is left alone: code in there that computes in float64 does so on purpose.
    """
    _register(
        module,
        _CastInputs(UP_TO_FLOAT32, casts.inside, _takes_narrow(module)),
        _CastOutputs(UP_TO_FLOAT32, casts.outside),
    )


def cast_outputs(module: torch.nn.Module, outside: WeightDtype) -> None:
    """Cast what a kept module returns."""
    hook = _CastOutputs(UP_TO_FLOAT32, outside)
    hook.handle = module.register_forward_hook(hook)


def _takes_narrow(module: torch.nn.Module) -> bool:
    """Whether torch computes a layer in float32 from inputs of 16 bits, on a GPU."""
    return type(module) in (
        torch.nn.BatchNorm1d,
        torch.nn.BatchNorm2d,
        torch.nn.BatchNorm3d,
    )


def _register(
    module: torch.nn.Module, inputs: _CastInputs, outputs: _CastOutputs
) -> None:
    # A module that another process loads brings its hooks, and torch would give their
    # numbers to new hooks, which replace them. A handle that is loaded prevents that.
    inputs.handle = module.register_forward_pre_hook(inputs, with_kwargs=True)
    outputs.handle = module.register_forward_hook(outputs)


def has_casts(module: torch.nn.Module) -> bool:
    """Whether a module has the hooks of this file."""
    return bool(_own_hooks(module))


def remove_casts(module: torch.nn.Module) -> None:
    """Remove the hooks of this file from a module."""
    for hooks, key in _own_hooks(module):
        del hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)  # noqa: SLF001


def _own_hooks(module: torch.nn.Module) -> list[tuple[dict[int, Any], int]]:
    """Return the dictionaries that have a hook of this file, with its key."""
    hook_dicts = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001
    return [
        (hooks, key)
        for hooks in hook_dicts
        for key, hook in hooks.items()
        if isinstance(hook, (_CastInputs, _CastOutputs))
    ]
