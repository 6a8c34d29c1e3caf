# SPDX-License-Identifier: Apache-2.0
"""Hooks that cast what goes into a module and what it returns.

They read the dtype that the weights have at the time of the call, so that a model keeps
working after `model.float()` or `model.bfloat16()`.
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from lossscale.torch.half_precision.nested import cast_nested

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NARROW = frozenset({torch.float16, torch.bfloat16})
"""The dtypes of 16 bits."""

UP_TO_FLOAT32 = NARROW | {torch.float32}

UP_TO_FLOAT64 = UP_TO_FLOAT32 | {torch.float64}
"""The floating-point dtypes that are cast; those of 8 bits belong to quantisation."""


class WeightDtype:
    """The dtype of a model's weights, read from one of them at every forward pass.

    A copy of the whole model reads its own weight. A copy of a part, such as PEFT makes
    of a normalisation layer, goes on to read that of the model it was copied from: it
    most likely becomes a part of that. It does not copy the weight.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        name: str,
        fallback: torch.dtype,
        model: torch.nn.Module | None,
    ) -> None:
        """Remember which weight to read.

        Args:
            module: The module that has the parameter; `None` if no module has one.
            name: The name of the parameter there.
            fallback: The dtype if there is no parameter, or no longer.
            model: The whole model.
        """
        self._module, self._name, self._fallback = module, name, fallback
        self._model = None if model is None else ref(model)

    @classmethod
    def of_first(
        cls,
        modules: list[torch.nn.Module],
        dtype: torch.dtype,
        model: torch.nn.Module | None,
    ) -> "WeightDtype":
        """Find the first parameter that has this dtype now.

        Args:
            modules: Where to look for it.
            dtype: The dtype.
            model: The whole model.
        """
        for module in modules:
            for name, param in module.named_parameters(recurse=False):
                if param.dtype == dtype:
                    return cls(module, name, dtype, model)
        return cls(None, "", dtype, model)

    def read(self) -> torch.dtype:
        """Return the dtype that the weight has now."""
        if self._module is None:
            return self._fallback
        param = self._module._parameters.get(self._name)  # noqa: SLF001
        if param is None:
            return self._read_any(self._module)
        return param.dtype if param.dtype in UP_TO_FLOAT64 else self._fallback

    def _read_any(self, module: torch.nn.Module) -> torch.dtype:
        """Return the dtype of any weight of a module, such as one that is pruned.

        Pruning and parametrizations give the parameter another name, or put it into a
        module inside.
        """
        for param in module.parameters():
            if param.dtype in UP_TO_FLOAT64:
                return param.dtype
        return self._fallback

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightDtype":
        """Return one for a copy of the model, or of a part of it."""
        model = None if self._model is None else self._model()
        is_whole = model is not None and id(model) in memo
        module = self._module
        if is_whole:
            module = copy.deepcopy(module, memo)
            model = memo[id(model)]
        elif module is not None:
            module = memo.get(id(module), module)
        return WeightDtype(module, self._name, self._fallback, model)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: no weak reference."""
        return {**vars(self), "_model": None}


class BorderCasts(NamedTuple):
    """The casts around a module that stays in float32 in a model in float16.

    float64 is left alone: code that computes in float64 does so on purpose.
    """

    inside: WeightDtype
    """The dtype of its own weights, to which inputs are cast."""
    outside: WeightDtype
    """The dtype of the rest of the model, to which results are cast."""

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input in the dtype of the module's weights."""
        return self._cast(tensor, self.inside)

    def cast_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result in the dtype of the rest of the model."""
        return self._cast(tensor, self.outside)

    @staticmethod
    def _cast(tensor: torch.Tensor, target: WeightDtype) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) and hasattr(tensor, "to"):
            return tensor.to(target.read())  # a proxy of torch.fx, without a dtype
        return _cast(tensor, UP_TO_FLOAT32, target.read())


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
            takes_narrow: Whether torch computes the module in float32 on a GPU also
                from inputs of 16 bits, so that these need no cast.
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
    results = WeightDtype(None, "", torch.float32, None)
    _register(model, _CastInputs(UP_TO_FLOAT64, weights), _CastOutputs(NARROW, results))


def cast_around_kept(module: torch.nn.Module, casts: BorderCasts) -> None:
    """Cast what goes into a kept module to its own dtype, and its results back."""
    _register(
        module,
        _CastInputs(UP_TO_FLOAT32, casts.inside, _takes_narrow(module)),
        _CastOutputs(UP_TO_FLOAT32, casts.outside),
    )


def mark_by_hook(module: torch.nn.Module, outside: WeightDtype) -> None:
    """Give a module a hook that casts nothing, because its results are cast already.

    torch's encoder computes with the weights of its parts, past their `forward`, unless
    one of them has a hook.
    """
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
