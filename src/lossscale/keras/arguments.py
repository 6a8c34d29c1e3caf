# SPDX-License-Identifier: Apache-2.0
"""The optimizer's arguments, validated; a policy as part of a Keras config."""

from typing import Any

import keras

from lossscale import presets
from lossscale.core import validation
from lossscale.core.data_policies import AutoStart
from lossscale.core.policies import Policy, is_policy, require_policy
from lossscale.core.portable import KINDS, check_state, from_portable, to_portable
from lossscale.core.validation import format_value
from lossscale.errors import SettingError, SettingTypeError, StateError

INITIAL_SCALE = 2.0**15
"""Keras's first scale."""

GROWTH_STEPS = 2000
"""Keras's growth interval."""

BASE_DEFAULTS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Keywords in configs of older versions of Keras, always with these values."""


_KEYWORDS = (
    "inner_optimizer",
    "initial_scale",
    "dynamic_growth_steps",
    "name",
    "policy",
)
"""The keywords of the optimizer, for a keyword that is misspelt."""


def check_inner(inner: Any) -> None:
    """Raise unless an optimizer can be wrapped."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        message = (
            f"inner_optimizer is a {type(inner).__name__} already: the loss would be "
            "scaled twice. Pass the optimizer inside it (.inner_optimizer), or convert "
            "it with LossScaleOptimizer.from_keras(...)."
        )
        raise SettingTypeError(message)
    if not isinstance(inner, keras.optimizers.Optimizer):
        message = (
            "inner_optimizer must be an optimizer of Keras 3, such as "
            f"keras.optimizers.Adam(1e-3), got {format_value(inner)} "
            f"({type(inner).__name__})."
        )
        raise SettingTypeError(message)


def check_keywords(keywords: dict[str, Any]) -> None:
    """Raise for keywords that Keras's class refuses too, and say what to type."""
    unknown = dict(keywords)
    if not unknown.pop("dynamic", True):
        message = (
            "LossScaleOptimizer has no `dynamic=False`. For a scale that never changes "
            "pass policy=lossscale.Fixed(1024.0). (Keras says to set "
            "`loss_scale_factor` on the `inner_optimizer`, which would apply gradients "
            "that overflow.)"
        )
        raise SettingError(message)
    for name, default in BASE_DEFAULTS.items():
        if name in unknown and unknown.pop(name) != default:
            message = (
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` "
                "on the `inner_optimizer`."
            )
            raise SettingError(message)
    if unknown:
        close = validation.did_you_mean(next(iter(unknown)), _KEYWORDS)
        message = (
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`."
            f"{close}"
        )
        raise SettingError(message)


def make_policy(policy: Any, initial_scale: Any, growth_steps: Any) -> Policy:
    """Return the policy that was given, or Keras's numbers with a floor and a cap.

    `initial_scale="auto"` is the policy `AutoStart`, with Keras's interval.
    """
    if policy is None:
        if is_policy(initial_scale):
            message = (
                f"initial_scale must be a number, got {format_value(initial_scale)}. "
                f"Pass policy={type(initial_scale).__name__}(...)."
            )
            raise SettingTypeError(message)
        is_auto = isinstance(initial_scale, str) and initial_scale == "auto"
        first = INITIAL_SCALE if is_auto else initial_scale
        if isinstance(growth_steps, float) and growth_steps.is_integer():
            growth_steps = int(growth_steps)  # Keras counts to 2.0 as well
        rule = presets.get(
            "keras",
            init_scale=validation.check_scale("initial_scale", first),
            growth_interval=validation.check_count(
                "dynamic_growth_steps", growth_steps
            ),
        )
        return AutoStart(rule) if is_auto else rule
    require_policy(policy)
    numbers = (
        ("initial_scale", initial_scale, INITIAL_SCALE),
        ("dynamic_growth_steps", growth_steps, GROWTH_STEPS),
    )
    given = [
        f"{name}={format_value(value)}"
        for name, value, default in numbers
        if value != default
    ]
    if given:
        message = (
            f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given "
            f"together with policy={format_value(policy)}, which decides both. Pass "
            "one or the other: "
            "policy=lossscale.Dynamic(init_scale=..., growth_interval=...)."
        )
        raise SettingError(message)
    chosen: Policy = policy
    try:
        check_state(chosen, chosen.init())
    except StateError as error:
        message = (
            f"The first state of the policy {format_value(policy)} is invalid: {error}"
        )
        raise SettingError(message) from error
    return chosen


def policy_to_config(policy: Policy) -> dict[str, Any]:
    """Return a policy as plain values: portable if it is ours, else Keras's way."""
    kind = type(policy)
    if kind in KINDS.values():
        return to_portable(policy, policy.init())
    registered: str = keras.saving.get_registered_name(kind)
    methods = all(hasattr(policy, name) for name in ("get_config", "from_config"))
    if registered == kind.__name__ or not methods:
        message = (
            f"A {kind.__name__} cannot be written to a config. Give the class "
            "get_config(), which returns its fields, and the classmethod "
            "from_config(config), and put "
            "@keras.saving.register_keras_serializable(package='...') above it."
        )
        raise SettingTypeError(message)
    config: dict[str, Any] = keras.saving.serialize_keras_object(policy)
    return config


def policy_from_config(config: Any, custom_objects: Any = None) -> Any:
    """Return the policy of a config; a policy itself passes through."""
    if not isinstance(config, dict):
        return config
    if "class_name" in config:
        return keras.saving.deserialize_keras_object(
            config, custom_objects=custom_objects
        )
    policy, _ = from_portable(config)
    return policy
