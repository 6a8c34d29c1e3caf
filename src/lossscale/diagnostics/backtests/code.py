# SPDX-License-Identifier: Apache-2.0
"""A policy as code: to name it, and to paste it into a training."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import frexp
from typing import Any

from lossscale.core.policies import Dynamic, Policy

FRAMEWORKS = ("torch", "keras", "tensorflow", "optax", "jax", "numpy")
"""The frameworks that there is code for."""

_OVER_TORCH = ("accelerate", "lightning", "transformers")
"""Packages that import Keras or JAX next to torch, if those are installed."""

_HALF = 0.5
_SHORT = 2.0**10


def find_framework(versions: Mapping[str, str]) -> str:
    """Return the framework of a training, from the packages that it had loaded."""
    if "torch" in versions and any(name in versions for name in _OVER_TORCH):
        return "torch"
    # Keras loads the framework that computes for it, optax loads JAX.
    order = ("keras", "torch", "tensorflow", "optax", "jax")
    return next((name for name in order if name in versions), "numpy")


def write_policy(policy: Policy, prefix: str = "", always: tuple[str, ...] = ()) -> str:
    """Return a policy as an expression, without the settings that are the defaults.

    Args:
        policy: The policy.
        prefix: What its class is imported from, such as "lossscale.".
        always: Settings that are written all the same.
    """
    if not is_dataclass(policy):
        return repr(policy)
    arguments = []
    for field in fields(policy):
        value, default = getattr(policy, field.name), field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        changed = value != default and not _is_implied(policy, field.name)
        if changed or field.name in always:
            text = _write_value(value, prefix, always)
            arguments.append(text if field.name == "scale" else f"{field.name}={text}")
    return f"{prefix}{type(policy).__name__}({', '.join(arguments)})"


def _is_implied(policy: Any, name: str) -> bool:
    """Whether a setting is a default that a policy writes out."""
    is_default = isinstance(policy, Dynamic) and policy.backoff_factor in (None, 0.5)
    return name == "backoff_factor" and is_default


def _write_value(value: Any, prefix: str, always: tuple[str, ...]) -> str:
    if isinstance(value, Dynamic):
        return write_policy(value, prefix, always)
    if isinstance(value, float) and value > 0:
        mantissa, exponent = frexp(value)
        if mantissa == _HALF and not 1.0 / _SHORT <= value <= _SHORT:
            return f"2.0**{exponent - 1}"
    return repr(value)


def write_code(policy: Policy, framework: str) -> str:
    """Return code to paste into a training with a framework."""
    imports, use = _USES[framework]
    lines = ["import lossscale", *imports, ""]
    written = write_policy(policy, "lossscale.", _ALWAYS)
    lines += [f"policy = {written}", *use]
    return "\n".join(lines) + "\n"


_ALWAYS = ("scale", "init_scale", "growth_interval", "margin", "window", "rule")

_USES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch": (
        ("from lossscale.torch import GradScaler",),
        ('scaler = GradScaler("cuda", policy=policy)  # or "cpu"',),
    ),
    "keras": (
        ("from lossscale.keras import LossScaleOptimizer",),
        ("optimizer = LossScaleOptimizer(optimizer, policy=policy)",),
    ),
    "tensorflow": (
        ("import lossscale.tensorflow",),
        ("state = lossscale.tensorflow.init(policy)",),
    ),
    "optax": (
        ("import lossscale.optax",),
        ("optimizer = lossscale.optax.loss_scaled(optimizer, policy)",),
    ),
    "jax": (("import lossscale.jax",), ("state = lossscale.jax.init(policy)",)),
    "numpy": (("import lossscale.numpy as ls",), ("state = ls.init(policy)",)),
}
"""The imports for a framework, and the line that hands the policy over."""
