# SPDX-License-Identifier: Apache-2.0
"""The loss scales of jmp and flax, for code that was written for them.

jmp.py     NoOpLossScale, StaticLossScale, DynamicLossScale, all_finite, select_tree
flax.py    DynamicScale, DynamicScaleResult
pytree.py  registration of their classes with JAX and with flax's serialization

Each computes the same steps as the original, with the policy of its preset. The
differences are defects of the originals: settings survive `jit` and every other use as
a pytree; the scale is float32 and its counter int32 from the start; a scale reaches
neither 0 nor infinity.

Neither jmp nor flax is imported. flax's serialization knows the classes if flax was
imported before the first instance was created.
"""
