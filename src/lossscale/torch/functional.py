# SPDX-License-Identifier: Apache-2.0
"""The functional API on torch tensors: eager, in `torch.compile`, in `torch.func`.

    init(policy)                    the first state, as tensors
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by it, and what was seen
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones to skip a step

The rule is not restated here: `update` passes `torch.where` to the policy.

Losses and gradients are nested structures of dict, list, tuple and NamedTuple; `None`
passes through. Gradients are dense or sparse COO tensors (which stay sparse) of
float16, bfloat16, float32, float64 or complex numbers; losses are dense and real. All
of it can be differentiated, and nothing that was given is changed.

Nothing here waits for a GPU, except for sparse gradients, whose size only the GPU
knows, and for gradients on the CPU with a state on a GPU. A state on the CPU moves
to the GPU with the first signal from there.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from lossscale.core import trees, validation
from lossscale.core.measurements import Measurement, check_measurements
from lossscale.core.policies import Policy, advance, require_policy
from lossscale.core.portable import check_state
from lossscale.core.state import Array, ScaleState, Signal, list_dtypes
from lossscale.core.trees import map_leaves
from lossscale.core.validation import (
    format_value,
    plain_number,
    require_signal,
    require_state,
)
from lossscale.errors import GradientError, StructureError
from lossscale.torch import gradient
from lossscale.torch.measurements import measure as measure_signal


def init(
    policy: Policy, state: ScaleState | None = None, *, device: Any = None
) -> ScaleState:
    """Return the first state of a policy, as float32, int32 and int32 tensors.

    Args:
        policy: Any policy.
        state: A state to go on from, such as one that `from_portable` returned.
        device: Where its tensors go; torch's default device unless given.

    Raises:
        StateError: If the state is not one that the policy can go on from.

    Example:
        >>> import lossscale, lossscale.torch as ls
        >>> ls.init(lossscale.Dynamic()).scale
        tensor(65536.)
    """
    require_policy(policy)
    first = policy.init() if state is None else check_state(policy, state)
    pairs = zip(first, list_dtypes(first), strict=True)
    # Not torch.tensor, which waits for the device.
    values = [
        torch.full((), value, dtype=_DTYPES[name], device=device)
        for value, name in pairs
    ]
    return type(first)(*values)


_DTYPES = {"float32": torch.float32, "int32": torch.int32}


def scale(loss: Any, state: ScaleState) -> Any:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is upcast first: 65504 is float16's largest number. A Python number
    will do for a loss.

    Raises:
        GradientError: If a loss is not a real floating-point number.

    Example:
        >>> import torch, lossscale, lossscale.torch as ls
        >>> loss = torch.tensor(2.0, dtype=torch.float16)
        >>> ls.scale(loss, ls.init(lossscale.Fixed(1024.0)))
        tensor(2048.)
    """
    require_state(state)
    factor = _tensor(state.scale)

    def multiply(path: str, leaf: Any) -> torch.Tensor:
        # A backward pass starts from a plain 1; an integer tensor is a mistake.
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            leaf = _tensor(leaf, factor.device)
        return gradient.multiply(
            gradient.upcast(gradient.check_loss(path, leaf)), factor
        )

    return map_leaves(multiply, loss)


def unscale(
    grads: Any, state: ScaleState, *, measure: Measurement | Iterable[Measurement] = ()
) -> tuple[Any, Signal]:
    """Multiply gradients by 1 / scale, and say whether all of them are finite.

    float16 and bfloat16 gradients become float32, where small ones do not vanish
    again; float64 stays float64. `Signal.finite` describes the result: an infinity
    stays one when it is unscaled, and a finite gradient may become one. A complex
    gradient is finite if both of its parts are, and is measured as two numbers. A
    gradient that is finite and cannot be squared, as most optimizers do, is
    `Signal.too_large`: `finite` is False, and `update` leaves the scale.

    Args:
        grads: A nested structure of scaled gradients.
        state: The state whose scale was used for the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_fraction" and "subnormal_fraction", and an `AboveEdge`.

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import torch, lossscale, lossscale.torch as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": torch.tensor([8.0, 4.0])}, state)
        >>> grads, bool(signal.finite)
        ({'w': tensor([2., 1.])}, True)
    """
    require_state(state)
    names = check_measurements(measure)
    divisor = _tensor(state.scale)
    unscaled = divide(grads, divisor)
    finite, squarable = _all_finite_and_squarable(unscaled, divisor.device)
    signal = Signal(finite=squarable, too_large=finite & ~squarable)
    if names:
        signal = signal._replace(
            **measure_signal(grads, unscaled, names, divisor.device)
        )
    return unscaled, signal


def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step; its tensors keep their dtypes.

    A state on the CPU goes to the device of the signal: the way back would wait.

    Raises:
        GradientError: If `signal` is not a `Signal`, or its flag is not boolean.

    Example:
        >>> import lossscale, lossscale.torch as ls
        >>> policy = lossscale.Dynamic()
        >>> ls.update(policy, ls.init(policy), lossscale.Signal(finite=False)).scale
        tensor(32768.)
    """
    require_policy(policy)
    require_state(state)
    require_signal(signal)
    if not isinstance(state.scale, torch.Tensor):
        state = init(policy, state)  # a policy's own first state: Python numbers
    finite = _booleans(signal.finite)
    if finite.shape not in ((), state.scale.shape):
        message = (
            "finite must be one boolean, or one for each scale, got "
            f"{format_value(signal.finite)}. Use the signal that unscale returns."
        )
        raise GradientError(message)
    device = gradient.common_device([state.scale, finite], state.scale.device)
    before = type(state)(*(gradient.move(value, device) for value in state))
    flags = signal._replace(finite=gradient.move(finite, device))
    if flags.too_large is not None:
        too_large = gradient.move(_booleans(flags.too_large), device)
        flags = flags._replace(too_large=too_large)
    if flags.amax is not None:
        flags = flags._replace(amax=_to_float32(flags.amax, device))
    if flags.above_edge is not None:
        flags = flags._replace(above_edge=_to_float32(flags.above_edge, device))
    after = advance(policy, before, flags, where=torch.where)
    pairs = zip(after, before, strict=True)
    return type(before)(*(new.to(old.dtype) for new, old in pairs))


def _to_float32(amax: Any, device: torch.device) -> torch.Tensor:
    """Return a magnitude in float32; one beyond it as its largest number."""
    amax_tensor = _tensor(amax, device)
    return gradient.move(amax_tensor, device).clamp(max=validation.FLOAT32_MAX).float()


def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was finite, else `old`.

    With a Python boolean one of the two comes back as it is. With a tensor every leaf
    is a new tensor, chosen on its device (sparse leaves excepted: there the choice
    waits for the flag); a leaf that is no tensor must then be the same in both.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        new: A nested structure of tensors; with a Python boolean, of anything.
        old: A structure of the same shape.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        StructureError: If the two do not have the same structure, or if two leaves
            cannot replace each other.

    Example:
        >>> import torch, lossscale.torch as ls
        >>> new, old = {"step": torch.tensor(7)}, {"step": torch.tensor(6)}
        >>> ls.select(torch.tensor(False), new, old)
        {'step': tensor(6)}
    """
    if not isinstance(finite, torch.Tensor):
        applied = _boolean(finite)
        trees.check_same_structure(new, old)
        return new if applied else old
    chosen = flag(finite)
    trees.check_same_structure(new, old)
    old_leaves = dict(trees.leaves(old))
    return map_leaves(
        lambda path, leaf: _choose(path, chosen, leaf, old_leaves[path]), new
    )


def divide(grads: Any, loss_scale: Any) -> Any:
    """Return gradients times 1 / scale, without checking the result."""
    inverse = 1.0 / _tensor(loss_scale)
    # The reciprocal of an infinite scale is 0, and so is that of one above 2**126 where
    # subnormal numbers are taken for zero: every gradient would be 0 and every step
    # finite. NaN makes the step an overflow, which lowers the scale.
    inverse = torch.where(inverse == 0, torch.nan, inverse)

    def multiply(path: str, leaf: Any) -> torch.Tensor:
        upcast_grad = gradient.upcast(gradient.check(path, leaf))
        return gradient.multiply(gradient.coalesce(upcast_grad), inverse)

    return map_leaves(multiply, grads)


def all_finite(grads: Any, device: torch.device) -> torch.Tensor:
    """Return whether every leaf is finite, on `device`; True if there is none."""
    return all_true(
        [gradient.is_finite(leaf) for _, leaf in trees.leaves(grads)], device
    )


def _all_finite_and_squarable(
    grads: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether all numbers are finite, and whether their squares are too."""
    flags = [
        gradient.is_within(leaf, math.inf, math.sqrt(torch.finfo(leaf.dtype).max))
        for _, leaf in trees.leaves(grads)
    ]
    finite, squarable = zip(*flags, strict=True) if flags else ((), ())
    return all_true(list(finite), device), all_true(list(squarable), device)


def all_true(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return whether all flags are set; without any that is True, on `device`."""
    if not flags:
        return torch.ones((), dtype=torch.bool, device=device)
    common_device = gradient.common_device(flags, device)
    return torch.stack([gradient.move(flag, common_device) for flag in flags]).all()


def flag(finite: Any) -> torch.Tensor:
    """Return one flag as a boolean tensor of no dimension; else raise."""
    flags = _booleans(finite)
    if flags.numel() != 1:
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return flags.reshape(())


def _booleans(finite: Any) -> torch.Tensor:
    """Return flags as a boolean tensor; what has no meaning as a flag is an error."""
    if not isinstance(finite, torch.Tensor):
        return torch.full((), _boolean(finite), dtype=torch.bool, device="cpu")
    if finite.is_complex() or finite.layout is not torch.strided:
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    if finite.dtype is torch.bool:
        return finite
    # A check for NaN would wait for the device. A flag of NaN or infinity counts as not
    # finite.
    return (finite != 0) & torch.isfinite(finite)


def _boolean(finite: Any) -> bool:
    """Return a flag that is no tensor as a boolean; anything else is an error.

    A step that is taken for finite by mistake is applied, so nothing is guessed: NaN,
    None, text and a whole `Signal` have a truth value in Python, and no meaning here.
    """
    number = plain_number(finite)
    if not isinstance(number, (bool, int, float)) or number != number:  # noqa: PLR0124
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return bool(number)


def _tensor(number: Any, device: torch.device | None = None) -> torch.Tensor:
    """Return a number as a float32 tensor; a tensor as it is."""
    if isinstance(number, torch.Tensor):
        return number
    # Beyond float32 torch refuses, and Python beyond float64.
    value = float("inf") if number > validation.FLOAT32_MAX else number
    value = float("-inf") if number < -validation.FLOAT32_MAX else value
    return torch.full((), value, dtype=torch.float32, device=device)


def _choose(path: str, chosen: torch.Tensor, new: Any, old: Any) -> Array:
    """Return one of two leaves; the other's NaN does not matter."""
    if new is old:
        return new
    location = path or "the top"
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        if type(new) is type(old) and isinstance(new, _PLAIN) and new == old:
            return new
        message = (
            f"The two leaves at {location} are {format_value(new)} and "
            f"{format_value(old)}. A tensor "
            "can only choose between tensors: make tensors of them, or pass "
            "bool(finite), which waits for the device."
        )
        raise StructureError(message)
    alike = (new.dtype, new.layout, new.device) == (old.dtype, old.layout, old.device)
    if not alike or new.shape != old.shape:
        message = f"The two leaves at {location} differ: {_kind(new)} and {_kind(old)}."
        raise StructureError(message)
    if new.layout is not torch.strided:
        return new if bool(chosen) else old
    return torch.where(gradient.move(chosen, new.device), new, old)


def _kind(tensor: torch.Tensor) -> str:
    """Say which kind of tensor this is."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout} {tuple(tensor.shape)} on {tensor.device}"


_PLAIN = (bool, int, float, str, bytes)
"""Leaves that can be compared without asking a device."""
