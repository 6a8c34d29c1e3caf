# SPDX-License-Identifier: Apache-2.0
"""The NumPy adapter: the reference, and the file to copy for another framework.

It offers what every framework's module offers: the five verbs

    init(policy)                    the first state, in the framework's arrays
    scale(loss, state)              the loss times the scale, in float32
    unscale(grads, state)           the gradients divided by it, and what was seen
    update(policy, state, signal)   the state after the step
    select(finite, new, old)        the new values, or the old ones on a bad step

and the seven classic classes, bound to NumPy in the second half. It imports the core
and NumPy, never another adapter. The rule is not restated here: `update` hands
`np.where` to the policy.

Losses and gradients are nests of dict, list, tuple and NamedTuple; `None` passes
through. Leaves are float16, float32 or float64 arrays or scalars; integers, booleans,
complex numbers and strings are a `GradientError` that names the leaf.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lossscale.core import classic, trees
from lossscale.core.classic import LossScale, LossScaleManager
from lossscale.core.errors import GradientError, SettingError
from lossscale.core.policies import Policy
from lossscale.core.state import MEASUREMENTS, Array, ScaleState, Signal

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "get",
    "init",
    "scale",
    "select",
    "unscale",
    "update",
]


def init(policy: Policy, state: ScaleState | None = None) -> ScaleState:
    """Return the first state of a policy, as NumPy scalars.

    Args:
        policy: Any policy.
        state: A state to go on from, such as one that `from_portable` returned.

    Example:
        >>> import lossscale, lossscale.numpy as ls
        >>> ls.init(lossscale.Dynamic()).scale
        np.float32(65536.0)
    """
    first = policy.init() if state is None else state
    return ScaleState(
        np.float32(first.scale), np.int32(first.good), np.int32(first.bad)
    )


def scale(loss: Any, state: ScaleState) -> Any:
    """Return the loss times the scale, in float32 (float64 stays float64).

    A float16 loss is widened first: 65504 is float16's largest number.

    Raises:
        GradientError: If a loss is not a floating-point number.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> ls.scale(np.float16(2.0), ls.init(lossscale.Fixed(1024.0)))
        np.float32(2048.0)
    """

    def multiply(path: str, leaf: Any) -> Any:
        # Backward starts from a 1, so a plain number is as good as an array.
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            leaf = np.float32(leaf)
        with np.errstate(over="ignore"):
            return _widened("loss", path, leaf) * state.scale

    return trees.map_leaves(multiply, loss)


def unscale(
    grads: Any, state: ScaleState, *, measure: Iterable[str] = ()
) -> tuple[Any, Signal]:
    """Multiply gradients by 1 / scale, and say whether all of them are finite.

    float16 gradients become float32, where small ones do not vanish again; float64
    stays float64. `Signal.finite` looks at the result: an infinity stays one when it
    is unscaled, and a finite gradient may become one.

    Args:
        grads: A nest of scaled gradients.
        state: The state whose scale was used for the loss.
        measure: Further fields of the `Signal` to fill, any of "nan", "amax", "norm",
            "zero_share" and "subnormal_share".

    Raises:
        GradientError: If a gradient is not floating-point.

    Example:
        >>> import numpy as np, lossscale, lossscale.numpy as ls
        >>> state = ls.init(lossscale.Fixed(4.0))
        >>> grads, signal = ls.unscale({"w": np.array([8.0, 4.0])}, state)
        >>> grads, bool(signal.finite)
        ({'w': array([2., 1.])}, True)
    """
    wanted = _wanted(measure)
    inverse = np.float32(1.0) / np.float32(state.scale)

    def multiply(path: str, leaf: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return _widened("gradient", path, leaf) * inverse

    unscaled = trees.map_leaves(multiply, grads)
    signal = Signal(finite=_all_finite(unscaled))
    if wanted:
        signal = signal._replace(**_measurements(grads, unscaled, wanted))
    return unscaled, signal


def update(policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
    """Return the state after a step.

    Example:
        >>> import lossscale, lossscale.numpy as ls
        >>> policy = lossscale.Dynamic()
        >>> ls.update(policy, ls.init(policy), lossscale.Signal(finite=False)).scale
        np.float32(32768.0)
    """
    if isinstance(state.scale, float) and not isinstance(state.scale, np.float64):
        state = init(policy, state)  # a policy's own first state: Python's float64
    finite = signal._replace(finite=np.asarray(signal.finite, dtype=np.bool_))
    with np.errstate(over="ignore"):
        moved = policy.step(state, finite, where=np.where)
    # np.where returns arrays of no dimension; [()] makes scalars of them again.
    return ScaleState(*(np.asarray(value)[()] for value in moved))


def select(finite: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was finite, else `old`; nothing is copied.

    Raises:
        StructureError: If the two are not nests of the same shape.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.select(False, {"step": 7}, {"step": 6})
        {'step': 6}
    """
    trees.check_same_structure(new, old)
    return new if bool(finite) else old


def _widened(what: str, path: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a floating-point leaf as it is, or in float32 if it is float16."""
    array = np.asarray(leaf)
    if array.dtype not in (np.float16, np.float32, np.float64):
        message = (
            f"The {what}{' at ' + path if path else ''} is {array.dtype}, expected "
            "float16, float32 or float64. Leave out what is not differentiated, or "
            "put None in its place."
        )
        raise GradientError(message)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _all_finite(grads: Any) -> np.bool_:
    """Return whether every leaf is finite; a nest without leaves is."""
    flags = [np.isfinite(leaf).all() for _, leaf in trees.leaves(grads)]
    return np.bool_(all(flags))


def _wanted(measure: Iterable[str]) -> frozenset[str]:
    """Return the names to measure, once they are known to exist."""
    wanted = frozenset([measure] if isinstance(measure, str) else measure)
    unknown = sorted(wanted - set(MEASUREMENTS))
    if unknown:
        message = f"Cannot measure {unknown}; there are {', '.join(MEASUREMENTS)}."
        raise SettingError(message)
    return wanted


def _measurements(
    grads: Any, unscaled: Any, wanted: frozenset[str]
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
        "zero_share": lambda: np.float32(
            sum(np.count_nonzero(leaf == 0) for leaf in scaled) / count
        ),
        "subnormal_share": lambda: np.float32(sum(map(_subnormal, scaled)) / count),
    }
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: measures[name]() for name in sorted(wanted)}


def _largest(leaf: npt.NDArray[Any]) -> float:
    """Return the largest finite magnitude in an array."""
    finite = leaf[np.isfinite(leaf)]
    return float(np.abs(finite).max(initial=0.0))


def _subnormal(leaf: npt.NDArray[Any]) -> int:
    """Count the values below the smallest normal number of their own dtype."""
    tiny = np.finfo(leaf.dtype).smallest_normal
    return int(np.count_nonzero((leaf != 0) & (np.abs(leaf) < tiny)))


# The classic classes: the core's bodies with NumPy's variables under them.


class _Cell:
    """A state kept in this object; assigning happens at once."""

    def __init__(self, state: ScaleState, dtypes: tuple[str, str, str]) -> None:
        self._dtypes = dtypes
        self.assign(state)

    def read(self) -> ScaleState:
        return self._state

    def assign(self, state: ScaleState) -> None:
        values = zip(state, self._dtypes, strict=True)
        self._state = ScaleState(
            *(np.asarray(value, dtype=dtype)[()] for value, dtype in values)
        )


class _Binding:
    """What NumPy lends to the classic classes: everything happens at once."""

    def cell(
        self,
        owner: Any,
        state: ScaleState,
        scale: classic.Variable,
        good: classic.Variable,
        bad: classic.Variable | None,
    ) -> _Cell:
        del owner
        dtypes = scale.dtype, good.dtype, "int32" if bad is None else bad.dtype
        return _Cell(state, dtypes)

    def constant(self, value: float) -> Array:
        return np.float32(value)

    def flag(self, finite: Any) -> np.bool_:
        array = np.asarray(finite)
        if array.size != 1 or array.dtype.kind not in "biuf" or array != array:  # noqa: PLR0124  # NaN
            message = f"finite must be one boolean, got {finite!r}."
            raise GradientError(message)
        return np.bool_(array.item())

    def all_finite(self, grads: Any) -> np.bool_:
        checked = trees.map_leaves(
            lambda path, leaf: _widened("gradient", path, leaf), grads
        )
        return _all_finite(checked)

    def update(self, policy: Policy, state: ScaleState, signal: Signal) -> ScaleState:
        return update(policy, state, signal)

    def nothing(self) -> None:
        return None

    def scale_loss(self, loss: Any, loss_scale: Array) -> Any:
        state = ScaleState(loss_scale, 0, 0)
        return (lambda: scale(loss(), state)) if callable(loss) else scale(loss, state)

    def unscale(self, grads: list[Any], loss_scale: Array) -> list[Any]:
        unscaled, _ = unscale(grads, ScaleState(loss_scale, 0, 0))
        return list(unscaled)

    def transaction(
        self, permitted: Array, apply: Callable[[], Any], update: Callable[[], Any]
    ) -> None:
        if bool(permitted):
            apply()
        update()


_BINDING = _Binding()


class FixedLossScaleManager(classic.FixedLossScaleManager):
    """A manager whose loss scale never changes.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.FixedLossScaleManager(128.0).get_loss_scale()
        np.float32(128.0)
    """

    _binding = _BINDING


class ExponentialUpdateLossScaleManager(classic.ExponentialUpdateLossScaleManager):
    """A manager that grows after clean steps in a row and shrinks after bad steps.

    Example:
        >>> import lossscale.numpy as ls
        >>> manager = ls.ExponentialUpdateLossScaleManager(8.0, incr_every_n_steps=1)
        >>> manager.update_loss_scale(True)
        >>> manager.get_loss_scale()
        np.float32(16.0)
    """

    _binding = _BINDING


class FixedLossScale(classic.FixedLossScale):
    """A loss scale that never changes.

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.FixedLossScale(8)()
        np.float32(8.0)
    """

    _binding = _BINDING


class DynamicLossScale(classic.DynamicLossScale):
    """A loss scale that doubles after clean steps and halves after a bad one.

    Example:
        >>> import numpy as np, lossscale.numpy as ls
        >>> loss_scale = ls.DynamicLossScale(8, increment_period=1)
        >>> update_op, should_apply = loss_scale.update([np.array([np.inf])])
        >>> loss_scale(), bool(should_apply)
        (np.float32(4.0), False)
    """

    _binding = _BINDING


class LossScaleOptimizer(classic.LossScaleOptimizer):
    """An optimizer that scales its loss and never applies non-finite gradients.

    The wrapped optimizer is any object with `compute_gradients(loss, var_list)` and
    `apply_gradients(grads_and_vars)`; NumPy has none of its own.

    Example:
        >>> import numpy as np, lossscale.numpy as ls
        >>> class Descent:
        ...     def compute_gradients(self, loss, var_list):  # of loss = 3 * weight
        ...         return [(3.0 * loss() / (3.0 * w), w) for w in var_list]
        ...     def apply_gradients(self, grads_and_vars):
        ...         for gradient, weight in grads_and_vars:
        ...             weight -= gradient
        >>> weight = np.array([5.0], dtype=np.float32)
        >>> optimizer = ls.LossScaleOptimizer(Descent(), 128)
        >>> optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
        >>> weight
        array([2.], dtype=float32)
    """

    _binding = _BINDING
    _fixed_class = FixedLossScale
    _dynamic_class = DynamicLossScale


def get(identifier: Any) -> LossScale | None:
    """Return the loss scale that a number, "dynamic", a LossScale or None stands for.

    Raises:
        SettingError: For anything else (a ValueError).

    Example:
        >>> import lossscale.numpy as ls
        >>> ls.get(8)
        FixedLossScale(8.0)
    """
    return classic.get(identifier, FixedLossScale, DynamicLossScale)
