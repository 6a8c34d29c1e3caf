# SPDX-License-Identifier: Apache-2.0
"""The functional API on NumPy arrays: the reference for the other adapters.

    init(policy)                    the first state, in the framework's arrays
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by it, and a Signal
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones to skip a step

The rule is not restated here: `update` passes `np.where` to the policy.

Losses and gradients are nested structures of dict, list, tuple and NamedTuple; `None`
passes through. Leaves are float16, float32 or float64 arrays or scalars; a loss may be
a Python number. Integer, boolean, complex, masked and other arrays are a
`GradientError` that names the leaf.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lossscale.core import trees, validation
from lossscale.core.headroom import largest_square
from lossscale.core.measurements import (
    AboveEdge,
    Measurement,
    check_measurements,
    find_edge,
    list_fields,
)
from lossscale.core.policies import Policy, advance, require_policy
from lossscale.core.portable import check_state
from lossscale.core.state import Array, ScaleState, Signal, list_dtypes
from lossscale.core.validation import format_value, require_signal, require_state
from lossscale.errors import GradientError, MissingPackageError

if np.lib.NumpyVersion(np.__version__) < "2.0.0":
    # Before 2, np.where made float64 of a float32 scale and a Python number.
    _message = (
        f"lossscale.numpy needs NumPy 2.0 or newer, this is {np.__version__}. Install "
        "it with: pip install 'lossscale[numpy]'"
    )
    raise MissingPackageError(_message)


def init(policy: Policy, state: ScaleState | None = None) -> ScaleState:
    """Return the first state of a policy, as NumPy scalars.

    Args:
        policy: Any policy.
        state: A state to continue from, such as one that `from_portable` returned.

    Raises:
        SettingTypeError: If `policy` is not a policy.
        StateError: If the policy cannot continue from the state.

    Example:
        >>> import lossscale, lossscale.numpy as ls
        >>> ls.init(lossscale.Dynamic()).scale
        np.float32(65536.0)
    """
    require_policy(policy)
    first = policy.init() if state is None else check_state(policy, state)
    return _to_arrays(first, list_dtypes(first))


def scale(loss: Any, state: ScaleState) -> Any:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is converted to float32 first: 65504 is float16's largest number.

    Raises:
        GradientError: If a loss is not a floating-point number.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> ls.scale(np.float16(2.0), ls.init(lossscale.Fixed(1024.0)))
        np.float32(2048.0)
    """
    require_state(state)

    def multiply(path: str, leaf: Any) -> Any:
        # A backward pass starts from a plain 1; an integer array is a mistake.
        with np.errstate(all="ignore"):
            if isinstance(leaf, int) and not isinstance(leaf, bool):
                # Beyond float64 Python refuses; beyond float32 it is infinite anyway.
                leaf = np.float32(max(-_BEYOND, min(leaf, _BEYOND)))
            return upcast("loss", path, leaf) * state.scale

    return trees.map_leaves(multiply, loss)


def unscale(
    grads: Any, state: ScaleState, *, measure: Measurement | Iterable[Measurement] = ()
) -> tuple[Any, Signal]:
    """Multiply gradients by 1 / scale, and say whether all of them are finite.

    float16 gradients become float32, where small ones do not vanish again; float64
    stays float64. `Signal.finite` describes the result: an infinity stays one when it
    is unscaled, and a finite gradient may become one. A gradient that is finite and
    cannot be squared, as most optimizers do, is `Signal.too_large`: `finite` is False,
    and `update` leaves the scale.

    Args:
        grads: A nested structure of scaled gradients.
        state: The state whose scale was used for the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_fraction" and "subnormal_fraction", and an `AboveEdge`.

    Raises:
        GradientError: If a gradient is not floating-point.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": np.array([8.0, 4.0])}, state)
        >>> grads, bool(signal.finite)
        ({'w': array([2., 1.])}, True)
    """
    names = check_measurements(measure)
    require_state(state)
    with np.errstate(all="ignore"):
        inverse = np.float32(1.0) / np.float32(state.scale)

    def multiply(path: str, leaf: Any) -> Any:
        with np.errstate(all="ignore"):
            return upcast("gradient", path, leaf) * inverse

    unscaled = trees.map_leaves(multiply, grads)
    finite, squarable = all_finite_and_squarable(unscaled)
    signal = Signal(finite=squarable, too_large=finite & ~squarable)
    if names:
        signal = signal._replace(**_measurements(grads, unscaled, names))
    return unscaled, signal


def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step.

    Raises:
        GradientError: If `signal` is not a `Signal`, or its flag is not boolean.
        StateError: If `state` is not a `ScaleState`.

    Example:
        >>> import lossscale, lossscale.numpy as ls
        >>> policy = lossscale.Dynamic()
        >>> ls.update(policy, ls.init(policy), lossscale.Signal(finite=False)).scale
        np.float32(32768.0)
    """
    require_signal(signal)
    require_state(state)
    if not isinstance(state.scale, (np.generic, np.ndarray)):
        state = init(policy, state)  # a policy's own first state: Python's float64
    finite = _flags(signal.finite)
    if finite.shape not in ((), np.shape(state.scale)):
        message = (
            f"finite must be one boolean, or one for each scale, got "
            f"{format_value(signal.finite)}. Use the signal that unscale returns."
        )
        raise GradientError(message)
    flags = signal._replace(finite=finite)
    if flags.too_large is not None:
        flags = flags._replace(too_large=_flags(flags.too_large))
    if flags.amax is not None:  # of float64 gradients it is float64
        flags = flags._replace(amax=_saturate(flags.amax))
    with np.errstate(all="ignore"):
        moved = advance(policy, state, flags, where=np.where)
    return _to_arrays(moved, [np.asarray(value).dtype for value in state])


def _to_arrays(state: ScaleState, dtypes: list[Any]) -> ScaleState:
    """Return a state as NumPy scalars, or arrays, of these dtypes."""
    pairs = zip(state, dtypes, strict=True)
    # np.where returns arrays of no dimension; [()] makes scalars of them again.
    values = [np.asarray(value, dtype=dtype)[()] for value, dtype in pairs]
    return type(state)(*values)


def _saturate(amax: Any) -> Any:
    """Return magnitudes in float32; those beyond it as its largest number."""
    return np.minimum(amax, validation.FLOAT32_MAX, dtype=np.float64).astype(np.float32)


def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was finite, else `old`; nothing is copied.

    Args:
        finite: One boolean: `signal.finite`, not the signal.
        new: A nested structure of anything.
        old: A structure of the same shape.

    Raises:
        GradientError: If `finite` is anything but one boolean.
        StructureError: If the two do not have the same structure.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.select(False, {"step": 7}, {"step": 6})
        {'step': 6}
    """
    applied = flag(finite)
    trees.check_same_structure(new, old)
    return new if applied else old


def upcast(what: str, path: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a floating-point leaf as it is, or in float32 if it is float16."""
    array = np.asarray(leaf)
    masked = isinstance(leaf, np.ma.MaskedArray)
    if masked or array.dtype.kind != "f" or array.dtype.itemsize not in _WIDTHS:
        kind = "masked" if masked else array.dtype
        message = (
            f"The {what}{' at ' + path if path else ''} is {kind}, expected float16, "
            "float32 or float64. Leave out what is not differentiated, or put None in "
            "its place."
        )
        raise GradientError(message)
    return array.astype(np.float32) if array.dtype.itemsize == _WIDTHS[0] else array


_WIDTHS = (2, 4, 8)
"""Bytes of float16, float32 and float64."""

_BEYOND = 2**200
"""An integer beyond float32, and within float64."""


def _flags(finite: Any) -> npt.NDArray[np.bool_]:
    """Return flags as booleans, of one scale or of a vector; anything else is an error.

    A step that is taken for finite by mistake is applied, so nothing is guessed: NaN,
    infinity, None, text and a whole `Signal` have a truth value in Python, and no
    meaning here.
    """
    refused = isinstance(finite, (Signal, np.ma.MaskedArray))
    array = np.asarray(None if refused else finite)
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return array.astype(np.bool_)


def flag(finite: Any) -> np.bool_:
    """Return one flag as a boolean; anything else is an error."""
    flags = _flags(finite)
    if flags.size != 1:
        message = f"finite must be one boolean, got {format_value(finite)}."
        raise GradientError(message)
    return np.bool_(flags.item())


def all_finite(grads: Any) -> np.bool_:
    """Return whether every leaf is finite; so is a structure without leaves."""
    flags = [np.isfinite(leaf).all() for _, leaf in trees.leaves(grads)]
    return np.bool_(all(flags))


def all_finite_and_squarable(grads: Any) -> tuple[np.bool_, np.bool_]:
    """Return whether all numbers are finite, and whether their squares are too."""
    amaxes = [  # NaN is the largest of all to NumPy
        (np.abs(leaf).max(initial=0.0), largest_square(leaf.dtype.name))
        for _, leaf in trees.leaves(grads)
    ]
    finite = all(np.isfinite(amax) for amax, _ in amaxes)
    return np.bool_(finite), np.bool_(all(amax <= bound for amax, bound in amaxes))


def _measurements(
    grads: Any, unscaled: Any, names: frozenset[Measurement]
) -> dict[str, Array]:
    """Measure what was asked for; sums are kept in float64."""
    scaled = [np.asarray(leaf) for _, leaf in trees.leaves(grads)]
    # float32, or float64 where a gradient is: its largest value may need it.
    number = np.result_type(np.float32, *scaled).type if scaled else np.float32
    count = max(1, sum(leaf.size for leaf in scaled))
    measures: dict[str, Callable[[], Array]] = {
        "nan": lambda: np.bool_(any(np.isnan(leaf).any() for leaf in scaled)),
        "amax": lambda: number(max(map(_largest, scaled), default=0.0)),
        "norm": lambda: number(
            np.sqrt(
                sum(
                    np.square(leaf, dtype=np.float64).sum()
                    for _, leaf in trees.leaves(unscaled)
                )
            )
        ),
        "zero_fraction": lambda: np.float32(
            sum(np.count_nonzero(leaf == 0) for leaf in scaled) / count
        ),
        "subnormal_fraction": lambda: np.float32(sum(map(_subnormal, scaled)) / count),
    }
    edge = find_edge(names)
    if edge is not None:
        measures["above_edge"] = lambda: np.float32(
            sum(_count_above(leaf, edge) for leaf in scaled) / count
        )
    with np.errstate(all="ignore"):
        return {name: measures[name]() for name in list_fields(names)}


def _largest(leaf: npt.NDArray[Any]) -> float:
    """Return the largest finite magnitude in an array."""
    finite = leaf[np.isfinite(leaf)]
    return float(np.abs(finite).max(initial=0.0))


def _count_above(leaf: npt.NDArray[Any], edge: AboveEdge) -> int:
    """Count the values whose magnitude is above an edge."""
    magnitudes = np.abs(upcast("gradient", "", leaf))
    limit = np.float32(edge.edge)
    above = magnitudes >= limit if edge.inclusive else magnitudes > limit
    return int(np.count_nonzero(above))


def _subnormal(leaf: npt.NDArray[Any]) -> int:
    """Count the values below the smallest normal number of their own dtype."""
    tiny = np.finfo(leaf.dtype).smallest_normal
    return int(np.count_nonzero((leaf != 0) & (np.abs(leaf) < tiny)))
