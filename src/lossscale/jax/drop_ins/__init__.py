# SPDX-License-Identifier: Apache-2.0
"""jmp's and flax's names for a loss scale, for code that was written for them.

    like_jmp    NoOpLossScale, StaticLossScale, DynamicLossScale, all_finite,
                select_tree
    like_flax   DynamicScale, DynamicScaleResult
    trees       what they share

Each takes the steps of the original, by the policy of its preset. What is different
is what went wrong there: settings survive `jit` and every other way through a tree;
the scale is float32 and its counter int32 from the start; a scale reaches neither 0
nor infinity.

Neither jmp nor flax is imported. flax's serialization knows the classes if flax was
imported before one of them was made.
"""

from lossscale.jax.drop_ins.like_flax import DynamicScale, DynamicScaleResult
from lossscale.jax.drop_ins.like_jmp import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)

__all__ = [
    "DynamicLossScale",
    "DynamicScale",
    "DynamicScaleResult",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "all_finite",
    "select_tree",
]
