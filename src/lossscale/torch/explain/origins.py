# SPDX-License-Identifier: Apache-2.0
"""What an operator did to make a number that is not finite.

The operators are ATen's, after decomposition: what `torch.linalg.norm` or a module ran
arrives here as a few of them. Each question is asked of the operator's own inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin
from lossscale.torch.explain.kinds import kind_of

_PRETTY = {"_to_copy": "to", "lift_fresh": "tensor"}


def plain_name(func: Any) -> str:
    """Return the name of an operator as its users know it."""
    name = str(func._schema.name).rpartition("::")[2]  # noqa: SLF001
    if name in _PRETTY:
        return _PRETTY[name]
    name = name.rstrip("_").lstrip("_")
    return name.removeprefix("native_").removeprefix("foreach_")


def find_origin(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kind: Kind,
    *,
    is_given: bool,
) -> Origin:
    """Return what an operator did.

    Args:
        name: Its plain name.
        args: What it was called with, before it wrote anything.
        kwargs: The same, by name.
        kind: What its result has that is not finite.
        is_given: Whether an input had an infinity, and none a NaN.
    """
    values = [*_flat(args), *_flat(kwargs.values())]
    scalars = [value for value in values if isinstance(value, float)]
    if any(map(math.isnan, scalars)) and kind.nan:
        return "constant"
    if name == "tensor" or (not is_given and any(map(math.isinf, scalars))):
        return "constant"
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if is_given:
        return _find_of_infinities(name, args, tensors)
    if name in _QUESTIONS:
        return _QUESTIONS[name](args, kind) or "unknown"
    if kind.nan and name in _OF_NAN:
        return _OF_NAN[name]
    return _OF_INFINITY.get(name, "unknown")


def _find_of_infinities(
    name: str, args: Sequence[Any], tensors: list[torch.Tensor]
) -> Origin:
    """Return how a NaN was made of an infinity."""
    if name in ("softmax", "log_softmax", "logsumexp"):
        kinds = [kind for kind in map(kind_of, tensors) if kind is not None]
        return "row of -inf" if all(kind.is_mask for kind in kinds) else "inf - inf"
    if name in ("mul", "addcmul", "lerp") or name.endswith("_backward"):
        return "inf * 0"
    if name in ("div", "addcdiv"):
        return "inf / inf"
    if name in BILINEAR:
        return "inf * 0" if _has_zero_partner(name, args) else "inf - inf"
    if name in ("sin", "cos", "tan", "acos", "asin", "fmod", "remainder"):
        return "outside the domain"
    return "inf - inf"


def _has_zero_partner(name: str, args: Sequence[Any]) -> bool:
    """Whether a product multiplied an infinity by 0."""
    first, second = (args[index] for index in BILINEAR[name])
    if name == "convolution":
        return bool((first == 0).any() or (second == 0).any())
    for one, other in ((first, second), (second, first)):
        infinite = torch.isinf(one).float()
        zero = (other == 0).float()
        pair = (infinite, zero) if one is first else (zero, infinite)
        if bool(torch.matmul(*pair).any()):
            return True
    return False


def _classify_division(args: Sequence[Any], kind: Kind) -> Origin | None:
    numerator, divisor = args[0], args[1]
    zero = _as_tensor(divisor) == 0
    if not bool(zero.any()):
        return None
    if kind.nan and bool(((_as_tensor(numerator) == 0) & zero).any()):
        return "0 / 0"
    return "division by zero"


def _classify_reciprocal(args: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "root of a negative number"
    return "division by zero" if bool((args[0] == 0).any()) else None


def _classify_power(args: Sequence[Any], kind: Kind) -> Origin | None:
    if kind.nan:
        return "negative base"
    base, exponent = _as_tensor(args[0]), _as_tensor(args[1])
    is_pole = (base == 0) & (exponent < 0)
    return "division by zero" if bool(is_pole.any()) else None


_QUESTIONS: dict[str, Callable[[Sequence[Any], Kind], Origin | None]] = {
    "div": _classify_division,
    "reciprocal": _classify_reciprocal,
    "rsqrt": _classify_reciprocal,
    "pow": _classify_power,
}
"""What to ask of an operator's inputs if all of them are finite."""

_LOGARITHMS = ("log", "log2", "log10", "log1p")
_OF_A_DOMAIN = (
    "acos",
    "asin",
    "atanh",
    "acosh",
    "erfinv",
    "logit",
    "fmod",
    "remainder",
)
_STATISTICS = ("var", "std", "var_mean", "std_mean", "mean")
_NORMALISATIONS = ("layer_norm", "group_norm", "batch_norm", "fused_rms_norm")
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")

_OF_NAN: dict[str, Origin] = {
    "sqrt": "root of a negative number",
    **dict.fromkeys(_LOGARITHMS, "log of a negative number"),
    **dict.fromkeys(_OF_A_DOMAIN, "outside the domain"),
    **dict.fromkeys(_STATISTICS, "too few values"),
    **dict.fromkeys((*_NORMALISATIONS, *_LOSSES), "0 / 0"),
}
"""What an operator did that made a NaN of finite numbers."""

_OF_INFINITY: dict[str, Origin] = {
    **dict.fromkeys(_LOGARITHMS, "log of 0"),
    **dict.fromkeys(_OF_A_DOMAIN, "outside the domain"),
}
"""What an operator did that made an infinity, but no NaN, of finite numbers."""

BILINEAR = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
    "convolution": (0, 1),
}
"""Which arguments of a product are multiplied."""


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _flat(values: Any) -> list[Any]:
    """Return what nested lists of arguments contain."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += _flat(value)
        else:
            flat.append(value)
    return flat
