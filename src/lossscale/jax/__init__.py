# SPDX-License-Identifier: Apache-2.0
"""The JAX adapter: pure functions over pytrees.

functional.py      init, scale, unscale, update, select, apply_if_finite
value_and_grad.py  JAX's function of that name, with the loss scaled inside
retries.py         a step that overflowed again, at the lowered scale
accumulation.py    micro-batches in a scan
selection.py       selection between two trees, leaf by leaf
gradient.py        one gradient: dtype, bits, check; leaves that pass through
measurements.py    what `unscale` measures when it is asked to
norms.py           a norm in one pass, where squares may leave float32
consensus.py       one decision for all devices of a mapped axis
report.py          which leaves were not finite, by key path
explanation/       why a batch was not finite: its jaxpr, equation by equation
alarm.py           a warning after many skipped steps in a row
arguments.py       validation of functions, states, argument positions and flags
function_names.py  a function's name for a wrapper that takes the state as well
export.py          registration with `jax.export`
types.py           names for the types in signatures
compat/            the loss scales of jmp and flax
"""

from lossscale.core.optional import explain_missing

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "jax", "JAX") from None

from lossscale.core.portable import STATE_CLASSES
from lossscale.core.state import Signal
from lossscale.jax.accumulation import AccumulationResult, accumulate_gradients
from lossscale.jax.alarm import CollapseAlarm
from lossscale.jax.explanation.explainer import explain
from lossscale.jax.export import register_tuple
from lossscale.jax.functional import (
    apply_if_finite,
    init,
    scale,
    select,
    unscale,
    update,
)
from lossscale.jax.gradient import is_overwrite_with_gradient
from lossscale.jax.report import LeafFlags, leaf_flags, nonfinite_leaves
from lossscale.jax.retries import RetryResult, with_retries
from lossscale.jax.value_and_grad import ValueAndGrad, value_and_grad

for _kind in (
    *STATE_CLASSES,
    Signal,
    ValueAndGrad,
    AccumulationResult,
    LeafFlags,
    RetryResult,
):
    register_tuple(_kind)

__all__ = [
    "AccumulationResult",
    "CollapseAlarm",
    "LeafFlags",
    "RetryResult",
    "ValueAndGrad",
    "accumulate_gradients",
    "apply_if_finite",
    "explain",
    "init",
    "is_overwrite_with_gradient",
    "leaf_flags",
    "nonfinite_leaves",
    "scale",
    "select",
    "unscale",
    "update",
    "value_and_grad",
    "with_retries",
]
