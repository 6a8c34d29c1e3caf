# SPDX-License-Identifier: Apache-2.0
"""The state between steps (`ScaleState`) and what a step measured (`Signal`).

Both are NamedTuples of whatever arrays a framework has: trees to JAX, `tf.nest`,
torch's pytree and optree, with nothing to register. Settings live in policies, never
here: a library that mixed the two lost its floor under `jit`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""A number or array of any framework; the core never inspects one."""

Where: TypeAlias = Callable[[Array, Array, Array], Array]
"""A framework's select: `where(condition, a, b)`.

Either value may be a Python number, which takes the dtype of the other. A framework
whose own function does not do that provides one that does.
"""


class ScaleState(NamedTuple):
    """The loss scale and its two counters.

    Example:
        >>> from lossscale import Dynamic
        >>> Dynamic(init_scale=1024.0).init()
        ScaleState(scale=1024.0, good_steps=0, bad_steps=0)
    """

    scale: Array
    """What the loss is multiplied by; float32."""
    good_steps: Array
    """Finite steps counted towards the next growth; an integer."""
    bad_steps: Array
    """Overflows counted towards the next back-off; an integer."""


class Signal(NamedTuple):
    """What one step measured. Only `finite` is required; `None` means not measured.

    Example:
        >>> from lossscale import Signal
        >>> Signal(finite=True).amax is None
        True
    """

    finite: Array
    """Whether the step may be applied: every gradient is finite, before *and* after it
    was unscaled, and none is too large for the optimizer."""
    nan: Array | None = None
    """Whether any gradient is NaN (an overflow alone gives infinities)."""
    amax: Array | None = None
    """The largest finite magnitude of the gradients, still scaled."""
    norm: Array | None = None
    """The global norm of the unscaled gradients."""
    loss_finite: Array | None = None
    """Whether the loss was finite before it was scaled."""
    zero_fraction: Array | None = None
    """The fraction of gradient values that are exactly zero."""
    subnormal_fraction: Array | None = None
    """The fraction of gradient values below the smallest normal number of the dtype."""
    too_large: Array | None = None
    """Whether every gradient is finite, and one of them is too large for the optimizer
    to square or add up. Such a step is skipped, so `finite` is False, and the scale
    stays where it is: no lower scale makes a true gradient smaller."""

    above_edge: Array | None = None
    """The fraction of gradient values, still scaled, whose magnitude is above an edge:
    that of an `AboveEdge` which `unscale` was asked to measure. `Histogram` and
    `Saturation` read it, and compare `amax` where it is not measured."""


State: TypeAlias = Any
"""A `ScaleState`, or a policy's own NamedTuple that starts with its three fields.

Further fields hold what a policy remembers, each one float32 number. Type checkers
cannot relate such a NamedTuple to `ScaleState`, and frameworks carry no subclass of it.
"""


def is_state(value: Any) -> bool:
    """Whether this is a `ScaleState`, or a NamedTuple that starts with its fields."""
    if isinstance(value, ScaleState):
        return True
    fields = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    return fields[: len(ScaleState._fields)] == ScaleState._fields


def list_dtypes(state: State) -> list[str]:
    """Return the dtype of every field of a state: float32, and int32 for counters."""
    return ["float32", "int32", "int32", *["float32"] * (len(state) - 3)]
