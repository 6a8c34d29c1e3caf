# SPDX-License-Identifier: Apache-2.0
"""The JAX adapter: pure functions over pytrees.

verbs              init, scale, unscale, update, select
value_and_grad     JAX's function of that name, with the loss scaled inside
selecting          `select`, and `apply_if_finite`, which saves the work
retrying           a bad step again, at a lower scale
accumulation       micro-batches in a scan, the bad ones dropped
leaves             one gradient: its kinds, its bits, what passes through
measurements       what `unscale` measures when it is asked to
norms              a norm in one pass, where squares may leave float32
reports            which leaf it was, by key path
signatures         the name of a function for one that takes the state as well
agreement          one decision for all devices of a mapped axis
drop_ins           the names of jmp and flax
"""

from lossscale.core.optional import explain_missing

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise explain_missing(error, "jax", "JAX") from None

from lossscale.jax.accumulation import Accumulated, accumulating
from lossscale.jax.leaves import overwritten
from lossscale.jax.reports import LeafFlags, bad_leaves, leaf_flags
from lossscale.jax.retrying import Retried, retrying
from lossscale.jax.selecting import apply_if_finite
from lossscale.jax.value_and_grad import Differentiated, value_and_grad
from lossscale.jax.verbs import init, scale, select, unscale, update

__all__ = [
    "Accumulated",
    "Differentiated",
    "LeafFlags",
    "Retried",
    "accumulating",
    "apply_if_finite",
    "bad_leaves",
    "init",
    "leaf_flags",
    "overwritten",
    "retrying",
    "scale",
    "select",
    "unscale",
    "update",
    "value_and_grad",
]
