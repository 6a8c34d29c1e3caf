# SPDX-License-Identifier: Apache-2.0
"""How large a result would be in a wider format: the equation, evaluated in it."""

import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from lossscale.core.explanation.evaluated import LARGEST_OF


def measure_wide(eqn: Any, arrays: Sequence[Any]) -> float | None:
    """Return the largest magnitude of an equation's result in a wider format.

    float16 and the formats below it are computed in float32, float32 in float64.

    Returns:
        The magnitude; `None` if it is not finite there either, not beyond the largest
        number of its format, or if the equation cannot be evaluated in another format.
    """
    dtype = str(eqn.outvars[0].aval.dtype)
    largest = LARGEST_OF.get(dtype)
    if largest is None or dtype == "float64":
        return None
    wide = jnp.float64 if dtype in ("float32", "bfloat16") else jnp.float32
    try:
        with _enable_x64():
            result = _evaluate(eqn, arrays, wide)
            magnitude = float(jnp.max(jnp.abs(result)))
    except Exception:  # noqa: BLE001  # a primitive may refuse another dtype in any way
        return None
    beyond = math.isfinite(magnitude) and magnitude > largest
    return magnitude if beyond else None


def _enable_x64() -> AbstractContextManager[Any]:
    """Return a context with float64; older versions of JAX have it elsewhere."""
    enable = getattr(jax, "enable_x64", None)
    if enable is None:
        enable = importlib.import_module("jax.experimental").enable_x64
    context: AbstractContextManager[Any] = enable(True)
    return context


def _evaluate(eqn: Any, arrays: Sequence[Any], wide: Any) -> Any:
    if eqn.primitive.name == "convert_element_type":
        return jnp.asarray(arrays[0]).astype(wide)
    inputs = [
        jnp.asarray(a).astype(wide) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for a in map(jnp.asarray, arrays)
    ]
    params = dict(eqn.params)
    for name in ("preferred_element_type", "out_dtype", "accum_dtype"):
        if params.get(name) is not None:
            params[name] = jnp.dtype(wide)
    result = eqn.primitive.bind(*inputs, **params)
    return result[0] if eqn.primitive.multiple_results else result
