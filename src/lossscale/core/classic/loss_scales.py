# SPDX-License-Identifier: Apache-2.0
"""The loss scales of `tf.train.experimental` and `tf.mixed_precision.experimental`."""

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from lossscale.core import validation
from lossscale.core.classic.arguments import fixed_scale, real_number, whole_number
from lossscale.core.classic.binding import Binding, Variable
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.core.validation import format_value
from lossscale.errors import SettingError, SettingTypeError

Self = TypeVar("Self", bound="LossScale")


class LossScale(metaclass=ABCMeta):
    """A loss scale that can be called for its value and updated from gradients.

    Subclass it for a strategy of your own; an optimizer honours whatever `update`
    says about applying the gradients.
    """

    @abstractmethod
    def __call__(self) -> Array:
        """Return the current loss scale as a scalar float32 tensor."""

    @abstractmethod
    def update(self, grads: Any) -> tuple[Any, Any]:
        """Update the loss scale from a nested structure of unscaled gradients.

        Returns:
            `(update_op, should_apply_gradients)`. The first is `None` where the
            update happens at once, else an op that performs it. If the second is
            False, the gradients are not to be applied.
        """

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments. The current state is not among them."""

    @classmethod
    def from_config(  # noqa: PYI019  # typing.Self is newer than Python 3.10
        cls: type[Self], config: Mapping[str, Any]
    ) -> Self:
        """Create the loss scale from its config."""
        return cls(**config)


class FixedLossScale(LossScale):
    """A loss scale that never changes."""

    _binding: ClassVar[Binding]

    def __init__(self, loss_scale_value: float) -> None:
        """Keep a loss scale of 1 or more.

        Args:
            loss_scale_value: A Python int or float.

        Raises:
            SettingError: If it is anything else, below 1, NaN or infinite (a
                ValueError).
        """
        if not isinstance(loss_scale_value, (int, float)):
            message = (
                "loss_scale_value must be a Python int or float, got "
                f"{format_value(loss_scale_value)} ({type(loss_scale_value).__name__})."
            )
            raise SettingError(message)
        value = real_number("loss_scale_value", loss_scale_value)
        self._value = fixed_scale("loss_scale_value", value)

    def __call__(self) -> Array:
        """Return the loss scale as a scalar float32 tensor."""
        return self._binding.constant(self._value)

    def update(self, grads: Any) -> tuple[Any, bool]:
        """Do nothing, and say that the gradients may be applied, whatever they are.

        A class that cannot adjust itself always answers True; it is the optimizer
        that refuses non-finite gradients.
        """
        del grads
        return self._binding.nothing(), True

    def update_from_finite(self, finite: Any) -> tuple[Any, bool]:
        """Do nothing, as `update`."""
        return self.update(finite)

    def update_from_signal(self, signal: Signal) -> Any:
        """Do nothing, whatever the step saw."""
        return self.update(signal)[0]

    def get_config(self) -> dict[str, Any]:
        """Return `{"loss_scale_value": ...}`."""
        return {"loss_scale_value": self._value}

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"{type(self).__name__}({self._value})"


class DynamicLossScale(LossScale):
    """A loss scale that doubles after finite steps and halves after an overflow."""

    _binding: ClassVar[Binding]

    def __init__(
        self,
        initial_loss_scale: float = 2**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
        *,
        floor: float = 1.0,
    ) -> None:
        """Start at `initial_loss_scale`.

        Args:
            initial_loss_scale: The loss scale to begin with, above 0.
            increment_period: Increase after this many finite steps in a row.
            multiplier: What an increase multiplies and a decrease divides by; above 1.
            floor: A decrease that would end below it ends at it. The originals have
                1; some models need less.

        Raises:
            SettingError: For a number that cannot work (a ValueError).
            SettingTypeError: For something that is not a number (a TypeError).
        """
        # As the originals: whatever float() and int() take, strings included.
        self._initial_loss_scale = validation.check_scale(
            "initial_loss_scale",
            _convert(float, "initial_loss_scale", initial_loss_scale),
        )
        self._increment_period = int(
            _convert(int, "increment_period", increment_period)
        )
        self._multiplier = validation.check_above_one(
            "multiplier", _convert(float, "multiplier", multiplier)
        )
        self._floor = validation.check_scale("floor", _convert(float, "floor", floor))
        self._policy = Dynamic(
            # A policy starts within its bounds. The state below need not: the
            # original took any first scale.
            init_scale=max(self._initial_loss_scale, self._floor),
            growth_factor=self._multiplier,
            backoff_divisor=self._multiplier,
            growth_interval=whole_number("increment_period", self._increment_period),
            min_scale=self._floor,
            max_scale=validation.FLOAT32_MAX,
        )
        self._state_variables = self._binding.create_variables(
            self,
            ScaleState(self._initial_loss_scale, 0, 0),
            scale=Variable("current_loss_scale", "float32"),
            good=Variable("good_steps", "int64"),
            bad=None,
        )

    @property
    def initial_loss_scale(self) -> float:
        """The loss scale it was made with."""
        return self._initial_loss_scale

    @property
    def increment_period(self) -> int:
        """How many finite steps in a row make it grow."""
        return self._increment_period

    @property
    def multiplier(self) -> float:
        """What an increase multiplies and a decrease divides by."""
        return self._multiplier

    @property
    def floor(self) -> float:
        """What no decrease goes below."""
        return self._floor

    def __call__(self) -> Array:
        """Return the current loss scale as a scalar float32 tensor."""
        return self._state_variables.read().scale

    def update(self, grads: Any) -> tuple[Any, Array]:
        """Update the loss scale from a nested structure of unscaled gradients.

        `None` gradients are ignored; a structure without any gradient is a finite step.
        """
        return self.update_from_finite(self._binding.all_finite(grads))

    def update_from_finite(self, finite: Any) -> tuple[Any, Array]:
        """Update the loss scale when it is known whether the gradients are finite.

        Saves a second read of the gradients.
        """
        self._binding.check_context("update")
        flag = self._binding.flag(finite)
        return self.update_from_signal(Signal(flag)), flag

    def update_from_signal(self, signal: Signal) -> Any:
        """Update the loss scale from what a step saw; return what `update` does first.

        A gradient that is `too_large` leaves it as it is.
        """
        state = self._binding.update(self._policy, self._state_variables.read(), signal)
        return self._state_variables.assign(state)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; a floor only if it is not 1."""
        config = {
            "initial_loss_scale": self._initial_loss_scale,
            "increment_period": self._increment_period,
            "multiplier": self._multiplier,
        }
        return config if self._floor == 1.0 else config | {"floor": self._floor}

    def __repr__(self) -> str:
        """Return the settings and, where it can be read, the current state."""
        fields = self.get_config()
        state = self._state_variables.read_for_repr()
        if state is not None:
            current = {
                "current_loss_scale": state.scale,
                "num_good_steps": state.good_steps,
            }
            fields = current | fields
        text = ", ".join(f"{key}={value}" for key, value in fields.items())
        return f"{type(self).__name__}({text})"


def get(
    identifier: Any,
    fixed_class: type[FixedLossScale],
    dynamic_class: type[DynamicLossScale],
) -> LossScale | None:
    """Return the loss scale for a number, "dynamic", a LossScale or None.

    Raises:
        SettingError: For anything else (a ValueError).
    """
    if isinstance(identifier, (int, float)):
        return fixed_class(identifier)
    if isinstance(identifier, str) and identifier == "dynamic":
        return dynamic_class()
    if identifier is None or isinstance(identifier, LossScale):
        return identifier
    message = (
        'A loss scale is a Python number, "dynamic" or a LossScale; got '
        f"{format_value(identifier)} ({type(identifier).__name__})."
    )
    raise SettingError(message)


def _convert(kind: Any, name: str, value: Any) -> float:
    """Convert as the originals did, with an error that names the argument."""
    try:
        converted: float = kind(value)
    except TypeError:
        message = (
            f"{name} must be a number, got {format_value(value)} "
            f"({type(value).__name__})."
        )
        raise SettingTypeError(message) from None
    except (ValueError, OverflowError):
        message = f"{name} must be a finite number, got {format_value(value)}."
        raise SettingError(message) from None
    return converted
