# SPDX-License-Identifier: Apache-2.0
"""The scaler states of other libraries: which keys they have and what those mean.

One pair of functions per library, and the table `LIBRARIES` at the end. The keys are
those that the library's own `state_dict`, checkpoint or attributes have; settings that
a library does not save come from the policy that is passed to the reader.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, cast

from lossscale.core import validation
from lossscale.core.policies import Dynamic
from lossscale.core.state import ScaleState
from lossscale.core.validation import format_value, plain_number
from lossscale.errors import StateError
from lossscale.presets import make_dynamic

Values: TypeAlias = Mapping[str, Any]
Pair: TypeAlias = tuple[Dynamic, ScaleState]


@dataclass(frozen=True)
class Library:
    """How one library's mapping is recognised, read and written."""

    keys: frozenset[str]
    """Keys that a mapping of this library has at least."""
    preset: str
    """Where settings come from that the mapping does not hold."""
    scale: tuple[str, ...]
    """Where the scale is in the mapping: its key, with those of the mappings around."""
    read: Callable[[Values, Dynamic], Pair]
    write: Callable[[Dynamic, ScaleState], dict[str, Any]]
    unsaved: tuple[str, ...] = ()
    """Settings that the library has and does not save."""


def _number(values: Values, key: str, default: float | None = None) -> float:
    value = plain_number(values.get(key, default))
    return validation.check_number(f"'{key}'", value, "a number (finite, float32)")


def _count(values: Values, key: str, default: int | None = None) -> int:
    value = plain_number(values.get(key, default))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        message = f"'{key}' must be a whole number, got {format_value(value)}."
        raise StateError(message)
    return int(value)


def _switch(values: Values, key: str, default: bool) -> bool:
    return validation.check_bool(f"'{key}'", plain_number(values.get(key, default)))


def _waiting(policy: Dynamic, state: ScaleState) -> int:
    """Return the finite steps for a library that grows only exactly at its interval.

    A count at or above it, which a policy that grows a step late may hold, would never
    fire there again.
    """
    return min(int(state.good_steps), policy.growth_interval - 1)


def override(base: Dynamic, **settings: Any) -> Dynamic:
    """Return the base with other settings, and a first scale that fits the bounds."""
    lowest = settings.get("min_scale", base.min_scale)
    highest = settings.get("max_scale", base.max_scale)
    first = settings.get("init_scale", base.init_scale)
    first = min(max(first, lowest), highest)
    return make_dynamic(base, settings | {"init_scale": first})


def backoff_factor(policy: Dynamic) -> float:
    """Return the factor that comes nearest to the policy's back-off."""
    if policy.backoff_divisor is not None:
        return 1.0 / policy.backoff_divisor
    return cast("float", policy.backoff_factor)


def _read_torch(values: Values, base: Dynamic) -> Pair:
    policy = override(
        base,
        growth_factor=_number(values, "growth_factor"),
        backoff_factor=_number(values, "backoff_factor"),
        growth_interval=_count(values, "growth_interval"),
    )
    good = _count(values, "_growth_tracker")
    return policy, ScaleState(_number(values, "scale"), good, 0)


def _write_torch(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "scale": state.scale,
        "growth_factor": policy.growth_factor,
        "backoff_factor": backoff_factor(policy),
        "growth_interval": policy.growth_interval,
        "_growth_tracker": _waiting(policy, state),
    }


def _read_keras(values: Values, base: Dynamic) -> Pair:
    policy = override(
        base,
        init_scale=_number(values, "initial_scale", base.init_scale),
        growth_interval=_count(values, "dynamic_growth_steps", base.growth_interval),
    )
    good = _count(values, "step_counter")
    return policy, ScaleState(_number(values, "dynamic_scale"), good, 0)


def _write_keras(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "initial_scale": policy.init_scale,
        "dynamic_growth_steps": policy.growth_interval,
        "dynamic_scale": state.scale,
        "step_counter": _waiting(policy, state),
    }


def _read_tensorflow(values: Values, base: Dynamic) -> Pair:
    """Read the two checkpointed variables, with the config of either class."""
    first = _number(values, "initial_scale", base.init_scale)
    interval = _count(values, "dynamic_growth_steps", base.growth_interval)
    multiplier = _number(values, "multiplier", base.growth_factor)
    policy = override(
        base,
        init_scale=_number(values, "initial_loss_scale", first),
        growth_interval=_count(values, "increment_period", interval),
        growth_factor=multiplier,
        backoff_divisor=multiplier,
    )
    scale = _number(values, "current_loss_scale")
    return policy, ScaleState(scale, _count(values, "good_steps"), 0)


def _write_tensorflow(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "initial_loss_scale": policy.init_scale,
        "increment_period": policy.growth_interval,
        "multiplier": policy.growth_factor,
        "current_loss_scale": state.scale,
        "good_steps": state.good_steps,
    }


def _write_tf_keras(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "initial_scale": policy.init_scale,
        "dynamic_growth_steps": policy.growth_interval,
        "current_loss_scale": state.scale,
        "good_steps": state.good_steps,
    }


def _read_jmp(values: Values, base: Dynamic) -> Pair:
    factor = _number(values, "factor", base.growth_factor)
    policy = override(
        base,
        growth_interval=_count(values, "period", base.growth_interval),
        growth_factor=factor,
        backoff_divisor=factor,
        min_scale=_number(values, "min_loss_scale", base.min_scale),
    )
    scale = _number(values, "loss_scale")
    return policy, ScaleState(scale, _count(values, "counter"), 0)


def _write_jmp(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "loss_scale": state.scale,
        "counter": _waiting(policy, state),
        "period": policy.growth_interval,
        "factor": policy.growth_factor,
        "min_loss_scale": policy.min_scale,
    }


def _read_flax(values: Values, base: Dynamic) -> Pair:
    policy = override(
        base,
        growth_factor=_number(values, "growth_factor", base.growth_factor),
        backoff_factor=_number(values, "backoff_factor", backoff_factor(base)),
        growth_interval=_count(values, "growth_interval", base.growth_interval),
        min_scale=_number(values, "minimum_scale", base.min_scale),
    )
    scale = _number(values, "scale")
    return policy, ScaleState(scale, _count(values, "fin_steps"), 0)


def _write_flax(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "growth_factor": policy.growth_factor,
        "backoff_factor": backoff_factor(policy),
        "growth_interval": policy.growth_interval,
        "minimum_scale": policy.min_scale,
        # It grows exactly at its interval, and shows it before it does.
        "fin_steps": min(state.good_steps, policy.growth_interval),
        "scale": state.scale,
    }


def _read_deepspeed(values: Values, base: Dynamic) -> Pair:
    """Read the attributes of a DynamicLossScaler, or FP16_Optimizer's fewer keys."""
    factor = _number(values, "scale_factor", base.growth_factor)
    window = _count(values, "scale_window", base.growth_interval)
    hysteresis = _count(values, "delayed_shift", base.hysteresis)
    policy = override(
        base,
        growth_factor=factor,
        backoff_divisor=factor,
        growth_interval=window,
        hysteresis=hysteresis,
        min_scale=_number(values, "min_scale", base.min_scale),
        consecutive_overflows=_switch(
            values, "consecutive_hysteresis", base.consecutive_overflows
        ),
    )
    # DeepSpeed counts finite steps since the last overflow and never starts again; our
    # counter is 1 after a growth, since only the first growth comes a step late.
    clean = _count(values, "cur_iter") - 1 - _count(values, "last_overflow_iter")
    good = (clean - 1) % window + 1 if clean > 0 else 0
    bad = hysteresis - _count(values, "cur_hysteresis", hysteresis)
    return policy, ScaleState(_number(values, "cur_scale"), good, bad)


def _write_deepspeed(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "cur_scale": state.scale,
        "cur_iter": state.good_steps,
        "last_overflow_iter": -1,
        "scale_factor": policy.growth_factor,
        "scale_window": policy.growth_interval,
        "min_scale": policy.min_scale,
        "delayed_shift": policy.hysteresis,
        # It stays at 1 once used up: each overflow then backs off.
        "cur_hysteresis": max(1, policy.hysteresis - state.bad_steps),
        "consecutive_hysteresis": policy.consecutive_overflows,
    }


def _read_megatron(values: Values, base: Dynamic) -> Pair:
    remaining = _count(values, "hysteresis_tracker")
    bad = base.hysteresis - remaining
    if bad < 0:
        message = (
            f"'hysteresis_tracker' is {remaining}, above a hysteresis of "
            f"{base.hysteresis}. Megatron does not save its settings: pass them as the "
            "policy, such as "
            f"presets.get('megatron', hysteresis={remaining})."
        )
        raise StateError(message)
    good = _count(values, "growth_tracker")
    return base, ScaleState(_number(values, "scale"), good, bad)


def _write_megatron(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    return {
        "scale": state.scale,
        "growth_tracker": _waiting(policy, state),
        "hysteresis_tracker": policy.hysteresis - state.bad_steps,
    }


def _read_apex(values: Values, base: Dynamic) -> Pair:
    other_keys = [key for key in values if key != "loss_scaler0"]
    if other_keys:
        message = (
            f"It holds several losses, {['loss_scaler0', *other_keys]}; convert one at "
            'a time, as {"loss_scaler0": ...}.'
        )
        raise StateError(message)
    inner = values["loss_scaler0"]
    if not isinstance(inner, Mapping):
        message = f"'loss_scaler0' must be a mapping, got {format_value(inner)}."
        raise StateError(message)
    scale = _number(inner, "loss_scale")
    return base, ScaleState(scale, _count(inner, "unskipped"), 0)


def _write_apex(policy: Dynamic, state: ScaleState) -> dict[str, Any]:
    unskipped = _waiting(policy, state)
    return {"loss_scaler0": {"loss_scale": state.scale, "unskipped": unskipped}}


LIBRARIES: dict[str, Library] = {
    "torch": Library(
        frozenset({"scale", "growth_interval", "_growth_tracker"}),
        "torch",
        ("scale",),
        _read_torch,
        _write_torch,
    ),
    "keras": Library(
        frozenset({"dynamic_scale", "step_counter"}),
        "keras",
        ("dynamic_scale",),
        _read_keras,
        _write_keras,
    ),
    "tensorflow": Library(
        frozenset({"current_loss_scale", "good_steps"}),
        "tensorflow",
        ("current_loss_scale",),
        _read_tensorflow,
        _write_tensorflow,
    ),
    "tf_keras": Library(
        frozenset({"current_loss_scale", "good_steps"}),
        "tensorflow",
        ("current_loss_scale",),
        _read_tensorflow,
        _write_tf_keras,
    ),
    "jmp": Library(
        frozenset({"loss_scale", "counter"}),
        "jmp",
        ("loss_scale",),
        _read_jmp,
        _write_jmp,
    ),
    "flax": Library(
        frozenset({"scale", "fin_steps"}), "flax", ("scale",), _read_flax, _write_flax
    ),
    "deepspeed": Library(
        frozenset({"cur_scale", "cur_iter", "last_overflow_iter"}),
        "deepspeed",
        ("cur_scale",),
        _read_deepspeed,
        _write_deepspeed,
    ),
    "megatron": Library(
        frozenset({"scale", "growth_tracker", "hysteresis_tracker"}),
        "megatron",
        ("scale",),
        _read_megatron,
        _write_megatron,
        (
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "hysteresis",
            "min_scale",
        ),
    ),
    "apex": Library(
        frozenset({"loss_scaler0"}),
        "apex",
        ("loss_scaler0", "loss_scale"),
        _read_apex,
        _write_apex,
        ("growth_interval", "min_scale", "max_scale"),
    ),
}
"""Every library whose state can be read and written, by name."""
