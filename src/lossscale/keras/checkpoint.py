# SPDX-License-Identifier: Apache-2.0
"""Configs and saved variables, those of Keras's own class included."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.errors import SettingTypeError, StateError
from lossscale.keras import arguments
from lossscale.keras.backend import read

ADDED = (
    "bad_steps",
    "last_scale",
    "skipped_steps",
    "consecutive_skips",
    "skip_reasons",
)
"""The variables that Keras's class does not have, in order; they come after its own."""


def make_config(optimizer: Any, policy: Policy | None) -> dict[str, Any]:
    """Return the arguments as plain values: Keras's four, and a policy if given."""
    # Not Keras's own: before 3.12 it has settings that the class does not take.
    config: dict[str, Any] = {
        "name": optimizer.name,
        "inner_optimizer": keras.saving.serialize_keras_object(
            optimizer.inner_optimizer
        ),
        "initial_scale": optimizer.initial_scale,
        "dynamic_growth_steps": optimizer.dynamic_growth_steps,
    }
    if policy is not None:
        config["policy"] = arguments.policy_to_config(policy)
    return config


def read_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the constructor's arguments of a config, which is left as it is."""
    keywords = dict(config)
    keywords["inner_optimizer"] = keras.saving.deserialize_keras_object(
        keywords["inner_optimizer"], custom_objects=custom_objects
    )
    if keywords.get("policy") is not None:
        keywords["policy"] = arguments.policy_from_config(
            keywords["policy"], custom_objects
        )
        # In the config for its readers; the policy has both.
        keywords.pop("initial_scale", None)
        keywords.pop("dynamic_growth_steps", None)
    return keywords


def check_convertible(optimizer: Any) -> None:
    """Raise unless an optimizer is a LossScaleOptimizer of Keras, or a subclass."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        message = (
            "from_keras converts a keras.optimizers.LossScaleOptimizer, got "
            f"{type(optimizer).__name__}. Wrap another optimizer with "
            "LossScaleOptimizer(optimizer)."
        )
        raise SettingTypeError(message)


def copy_variables(source: Any, target: Any) -> None:
    """Assign the scale and the counters of a built optimizer to another."""
    for name in ("step_counter", "dynamic_scale", *ADDED):
        if hasattr(source, name):
            getattr(target, name).assign(getattr(source, name))


def load_from_keras(
    optimizer: Any, own_variables: Sequence[Any], store: Mapping[str, Any]
) -> bool:
    """Load a file of Keras's class; return False if the file is another one."""
    count = len(own_variables)
    shared = [*optimizer.variables[: count - len(ADDED)], *optimizer.variables[count:]]
    values = [store[key] for key in sorted(store.keys(), key=_sort_key)]
    if _shapes_of(values) != _shapes_of(shared):
        return False
    for variable, value in zip(shared, values, strict=True):
        variable.assign(value)
    for name in ADDED:
        variable = getattr(optimizer, name)
        first = optimizer.initial_scale if name == "last_scale" else 0
        variable.assign(ops.full(variable.shape, first, variable.dtype))
    return True


def reset_invalid_state(policy: Policy, variables: Sequence[Any]) -> None:
    """Assign the policy's first state if it cannot continue from the loaded one.

    Args:
        policy: The policy.
        variables: Of the scale and its two counters.
    """
    numbers = (ops.convert_to_numpy(read(x)).item() for x in variables)
    try:
        check_state(policy, ScaleState(*numbers))
    except StateError as error:
        message = f"The loaded loss scale starts over: {error}"
        warnings.warn(message, stacklevel=4)
        for variable, value in zip(variables, policy.init(), strict=True):
            variable.assign(value)


def _sort_key(key: str) -> tuple[int, str]:
    """Sort 10 after 9; a key that is no number comes last."""
    return (int(key), "") if key.isdecimal() else (2**31, key)


def _shapes_of(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the shape of each variable or array."""
    return [tuple(array.shape) for array in arrays]
