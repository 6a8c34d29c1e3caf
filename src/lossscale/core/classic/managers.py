# SPDX-License-Identifier: Apache-2.0
"""The managers of `tf.contrib.mixed_precision`."""

from abc import ABCMeta, abstractmethod
from typing import Any, ClassVar, Literal

from lossscale.core import validation
from lossscale.core.classic.arguments import fixed_scale, real_number, whole_number
from lossscale.core.classic.binding import Binding, Variable
from lossscale.core.policies import Dynamic
from lossscale.core.state import Array, ScaleState, Signal
from lossscale.core.validation import format_value
from lossscale.errors import GradientError, SettingError


class LossScaleManager(metaclass=ABCMeta):
    """Decides the loss scale of every step. Subclass it for a strategy of your own."""

    @abstractmethod
    def get_loss_scale(self) -> Array:
        """Return the loss scale as a scalar float32 tensor."""

    @abstractmethod
    def update_loss_scale(self, finite_grads: Any) -> Any:
        """Update the loss scale, given whether all gradients were finite.

        Returns:
            `None` where the update happens at once, else an op that performs it.
        """


class FixedLossScaleManager(LossScaleManager):
    """A manager whose loss scale never changes."""

    _binding: ClassVar[Binding]

    def __init__(self, loss_scale: float) -> None:
        """Keep a loss scale of 1 or more.

        Raises:
            SettingError: If it is below 1, NaN or infinite (a ValueError).
            SettingTypeError: If it is not a number (a TypeError).
        """
        self._value = fixed_scale("loss_scale", real_number("loss_scale", loss_scale))

    def get_loss_scale(self) -> Array:
        """Return the loss scale as a scalar float32 tensor."""
        # A new tensor each time: one made earlier may belong to another graph.
        return self._binding.constant(self._value)

    def update_loss_scale(self, finite_grads: Any) -> Any:
        """Do nothing, whatever it is given."""
        del finite_grads
        return self._binding.nothing()

    def update_from_signal(self, signal: Signal) -> Any:
        """Do nothing, whatever the step saw."""
        return self.update_loss_scale(signal.finite)


class ExponentialUpdateLossScaleManager(LossScaleManager):
    """A manager that grows after finite steps in a row and shrinks after overflows.

    Overflows need not be consecutive: a finite step that only counts leaves their
    number alone. Reaching either threshold clears both counts.
    """

    _binding: ClassVar[Binding]

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
        *,
        floor: float = 1.0,
        at_floor: Literal["hold", "clamp"] = "hold",
    ) -> None:
        """Start at `init_loss_scale`.

        Args:
            init_loss_scale: The loss scale to begin with, above 0; it may be below
                the floor.
            incr_every_n_steps: Increase after this many finite steps in a row.
            decr_every_n_nan_or_inf: Decrease after this many non-finite steps.
            incr_ratio: What an increase multiplies by, above 1.
            decr_ratio: What a decrease multiplies by, below 1.
            floor: No update ends below it. The originals have 1; some models need
                less.
            at_floor: "hold" does not apply an update that would end below the floor,
                as documented; "clamp" goes to the floor exactly, as the original did.

        Raises:
            SettingError: For a number that cannot work (a ValueError).
            SettingTypeError: For something that is not a number (a TypeError).
        """
        first = real_number("init_loss_scale", init_loss_scale)
        first = validation.check_scale("init_loss_scale", first)
        lowest = validation.check_scale("floor", real_number("floor", floor))
        validation.check_choice("at_floor", at_floor, ("hold", "clamp"))
        self._policy = Dynamic(
            # A policy starts within its bounds. The state below need not: the
            # original took any first scale.
            init_scale=max(first, lowest),
            growth_factor=validation.check_above_one(
                "incr_ratio", real_number("incr_ratio", incr_ratio)
            ),
            backoff_factor=validation.check_below_one(
                "decr_ratio", real_number("decr_ratio", decr_ratio)
            ),
            growth_interval=whole_number("incr_every_n_steps", incr_every_n_steps),
            hysteresis=whole_number("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
            min_scale=lowest,
            max_scale=validation.FLOAT32_MAX,
            at_min=at_floor,
        )
        if self._policy.is_stuck(first):
            message = (
                f"init_loss_scale={first!r} could never move: even an increase ends "
                f"below the floor {lowest!r}, and such an update is not applied. Pass "
                f"floor={first!r}, or at_floor='clamp'."
            )
            raise SettingError(message)
        self._state_variables = self._binding.create_variables(
            self,
            ScaleState(first, 0, 0),
            scale=Variable("loss_scale", "float32"),
            good=Variable("good_steps", "int32"),
            bad=Variable("bad_steps", "int32"),
        )

    def get_loss_scale(self) -> Array:
        """Return the loss scale as a scalar float32 tensor."""
        return self._state_variables.read().scale

    def update_loss_scale(self, finite_grads: Any) -> Any:
        """Count the step, and move the loss scale once a threshold is reached.

        Args:
            finite_grads: Whether all gradients were finite, a boolean scalar.

        Returns:
            `None` where the update happens at once, else an op that performs it.
        """
        self._binding.check_context("update_loss_scale")
        try:
            flag = self._binding.flag(finite_grads)
        except GradientError:
            message = (
                f"finite_grads must be one boolean, got {format_value(finite_grads)}."
            )
            raise GradientError(message) from None
        return self.update_from_signal(Signal(flag))

    def update_from_signal(self, signal: Signal) -> Any:
        """Count a step of which more is known than whether it was finite."""
        state = self._state_variables.read()
        return self._state_variables.assign(
            self._binding.update(self._policy, state, signal)
        )
