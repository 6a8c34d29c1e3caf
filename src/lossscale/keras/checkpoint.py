# SPDX-License-Identifier: Apache-2.0
"""Configs and saved variables, those of Keras's own class included."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
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


def copy_variables(source: Any, target: Any, memory: Mapping[str, Any]) -> None:
    """Assign the scale and the counters of a built optimizer to another.

    Args:
        source: An optimizer of Keras's class, or one of ours.
        target: One of ours.
        memory: The target's variables of what its policy remembers, by name.
    """
    for name in ("step_counter", "dynamic_scale", *ADDED):
        if hasattr(source, name):
            getattr(target, name).assign(getattr(source, name))
    saved = {variable.name: variable for variable in source.variables}
    if memory.keys() <= saved.keys():
        for name, variable in memory.items():
            variable.assign(saved[name])


def load_from_others(
    optimizer: Any,
    own_variables: Sequence[Any],
    memory: Mapping[str, Any],
    store: Mapping[str, Any],
) -> bool:
    """Load a file of Keras's class, or of a policy that remembers nothing.

    Returns False, and loads nothing, if the file is another one.

    Args:
        optimizer: The optimizer, which is built.
        own_variables: The variables of the wrapper.
        memory: Those of what the policy remembers, by name; the wrapper's last.
        store: The file.
    """
    count = len(own_variables)
    values = [store[key] for key in sorted(store.keys(), key=_sort_key)]
    first = dict.fromkeys(ADDED, 0.0) | {"last_scale": optimizer.initial_scale}
    remembered = optimizer.policy.init()._asdict()
    for absent in [*ADDED, *memory], [*memory]:
        end = count - len(absent)
        shared = [*optimizer.variables[:end], *optimizer.variables[count:]]
        if not absent or _shapes_of(values) != _shapes_of(shared):
            continue
        for variable, value in zip(shared, values, strict=True):
            variable.assign(value)
        for name in absent:
            is_kept = name in memory
            variable = memory[name] if is_kept else getattr(optimizer, name)
            value = remembered[name] if is_kept else first[name]
            variable.assign(ops.full(variable.shape, value, variable.dtype))
        return True
    return False


def reset_invalid_state(policy: Policy, variables: Sequence[Any]) -> None:
    """Assign the policy's first state if it cannot continue from the loaded one.

    Args:
        policy: The policy.
        variables: Of its state: the scale, its two counters, and further numbers.
    """
    numbers = (ops.convert_to_numpy(read(x)).item() for x in variables)
    try:
        check_state(policy, type(policy.init())(*numbers))
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
