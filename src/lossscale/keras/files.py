# SPDX-License-Identifier: Apache-2.0
"""The optimizer's side of files: configs, variables, and those of Keras's own class."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from lossscale.core.policies import Policy
from lossscale.core.portable import check_state
from lossscale.core.state import ScaleState
from lossscale.errors import SettingTypeError, StateError
from lossscale.keras import settings
from lossscale.keras.operations import read

ADDED = (
    "bad_steps",
    "last_scale",
    "skipped_steps",
    "consecutive_skips",
    "skip_reasons",
)
"""The variables that Keras's class does not have, in order; they come after its own."""


class Files(keras.optimizers.LossScaleOptimizer):
    """What an optimizer writes and reads; `LossScaleOptimizer` has the rest."""

    policy: Policy
    _policy_was_given: bool

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as plain values: Keras's four, and a policy if given.

        Raises:
            SettingTypeError: If the policy is of a class that Keras cannot write.
        """
        # Not Keras's own: before 3.12 it has settings that the class does not take.
        config: dict[str, Any] = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        if self._policy_was_given:
            config["policy"] = settings.policy_to_config(self.policy)
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer of a config: ours, or one of Keras's class.

        The config is left as it is; Keras takes the inner optimizer out of it.
        """
        arguments = dict(config)
        inner = keras.saving.deserialize_keras_object(
            arguments.pop("inner_optimizer"), custom_objects=custom_objects
        )
        if arguments.get("policy") is not None:
            arguments["policy"] = settings.policy_from_config(
                arguments["policy"], custom_objects
            )
            # They are there for readers of the config; the policy has them.
            arguments.pop("initial_scale", None)
            arguments.pop("dynamic_growth_steps", None)
        return cls(inner, **arguments)

    @classmethod
    def from_keras(cls, optimizer: Any, *, policy: Policy | None = None) -> Any:
        """Take over a `LossScaleOptimizer`: its inner optimizer, scale and counters.

        For a model that was compiled or loaded with Keras's class. The inner optimizer
        is shared, so the one that was taken over should not be used any more.

        Args:
            optimizer: Keras's `LossScaleOptimizer`, or one of ours.
            policy: How the scale moves from now on; unless given, as before.

        Raises:
            SettingTypeError: If it is another optimizer.
        """
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            message = (
                "from_keras takes over a keras.optimizers.LossScaleOptimizer, got "
                f"{type(optimizer).__name__}. Wrap another optimizer with "
                "LossScaleOptimizer(optimizer)."
            )
            raise SettingTypeError(message)
        if policy is None and getattr(optimizer, "_policy_was_given", False):
            policy = optimizer.policy
        if policy is None:
            numbers = (optimizer.initial_scale, optimizer.dynamic_growth_steps)
            taken = cls(optimizer.inner_optimizer, *numbers, name=optimizer.name)
        else:
            taken = cls(optimizer.inner_optimizer, name=optimizer.name, policy=policy)
        if optimizer.built:
            taken.build(optimizer._trainable_variables)  # noqa: SLF001  # a base's
            for name in ("step_counter", "dynamic_scale", *ADDED):
                if hasattr(optimizer, name):
                    getattr(taken, name).assign(getattr(optimizer, name))
            taken._check_loaded_state()  # our own
        return taken

    def load_own_variables(self, store: Any) -> None:
        """Read the variables from a file that this class wrote, or Keras's.

        A scale that the policy could not use, such as the 0 or the infinity that
        Keras's class runs into, is replaced by the policy's first, with a warning.
        """
        own = len(self._variables)
        added = len(ADDED) if self.built else 0
        kept = [*self.variables[: own - added], *self.variables[own:]]
        values = [store[key] for key in sorted(store.keys(), key=_number)]
        if added and _shapes(values) == _shapes(kept):
            for variable, value in zip(kept, values, strict=True):
                variable.assign(value)
            for name in ADDED:
                variable = getattr(self, name)
                first = self.initial_scale if name == "last_scale" else 0
                variable.assign(ops.full(variable.shape, first, variable.dtype))
        else:
            # Keras checks the count; it warns, and reads nothing, if that is wrong.
            super().load_own_variables(store)
        if self.built:
            self._check_loaded_state()

    def _check_loaded_state(self) -> None:
        """Start over if the policy cannot go on from the scale and the counters."""
        variables = (self.dynamic_scale, self.step_counter, self.bad_steps)
        numbers = (ops.convert_to_numpy(read(each)).item() for each in variables)
        try:
            check_state(self.policy, ScaleState(*numbers))
        except StateError as error:
            message = f"The loaded loss scale starts over: {error}"
            warnings.warn(message, stacklevel=3)
            for variable, value in zip(variables, self.policy.init(), strict=True):
                variable.assign(value)


def _number(key: str) -> tuple[int, str]:
    """Sort 10 after 9; a key that is no number comes last."""
    return (int(key), "") if key.isdecimal() else (2**31, key)


def _shapes(arrays: list[Any]) -> list[tuple[int, ...]]:
    """Return the shape of each variable or array."""
    return [tuple(array.shape) for array in arrays]
