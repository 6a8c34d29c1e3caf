# SPDX-License-Identifier: Apache-2.0
"""tf_keras's `LossScaleOptimizer`: drop-ins for its classes, and bases for ours.

Its wrapper is one of two classes, for legacy optimizers and for new ones. Everything
that passes through it to the optimizer inside is tf_keras's: settings, weights, slots,
checkpoints, configs. What it does with the loss, the gradients and the scale is ours.
"""

from typing import Any

import tensorflow as tf

from lossscale.errors import MissingPackageError

try:
    import tf_keras
    from tf_keras.src.mixed_precision import loss_scale_optimizer as original
except ModuleNotFoundError as error:
    if error.name != "tf_keras":  # it is there, and something of its own is not
        raise
    _message = (
        "lossscale.tensorflow.tf_keras needs tf_keras, which is not installed. Install "
        "it with: pip install tf-keras"
    )
    raise MissingPackageError(_message) from None

from lossscale.core.state import Array
from lossscale.tensorflow.autograph import unconverted_methods
from lossscale.tensorflow.wrapper import Wrapper


class _InLegacy(original.LossScaleOptimizer):
    """The class of a wrapper around a legacy optimizer."""

    def _attach(self, opt: Any) -> None:
        # A fixed scale has no variables; it is replaced at once.
        original.LossScaleOptimizer.__init__(self, opt, False, 1.0)


class _InNew(original.LossScaleOptimizerV3):
    """The class of a wrapper around a new optimizer."""

    def _attach(self, opt: Any) -> None:
        original.LossScaleOptimizerV3.__init__(self, opt, False, 1.0)
        # What is saved is tracked by name; attributes are not tracked as well.
        self._self_setattr_tracking = False


def base_for(opt: Any) -> type:
    """Return the base of a wrapper around an optimizer of tf_keras."""
    legacy = isinstance(opt, tf_keras.optimizers.legacy.Optimizer)
    return _InLegacy if legacy else _InNew


def register(cls: type) -> None:
    """Let tf_keras write and read a class by a name of its own."""
    kind = "Legacy" if issubclass(cls, original.LossScaleOptimizer) else ""
    tf_keras.saving.register_keras_serializable(
        "lossscale", f"{kind}LossScaleOptimizer"
    )(cls)


class _Kind(original.LossScaleOptimizerMetaclass):
    """Makes one of two classes, by the optimizer that is given."""

    def __call__(cls, inner_optimizer: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: N805
        if cls is not BaseLossScaleOptimizer:
            return super().__call__(inner_optimizer, *arguments, **keywords)
        if isinstance(inner_optimizer, tf_keras.optimizers.legacy.Optimizer):
            return LossScaleOptimizer(inner_optimizer, *arguments, **keywords)
        if isinstance(inner_optimizer, tf_keras.optimizers.Optimizer):
            return LossScaleOptimizerV3(inner_optimizer, *arguments, **keywords)
        # It says what it expected.
        return original.BaseLossScaleOptimizer(inner_optimizer)


class BaseLossScaleOptimizer(original.BaseLossScaleOptimizer, metaclass=_Kind):
    """`tf_keras.mixed_precision.LossScaleOptimizer` with the same arguments.

    Around a legacy optimizer it makes a `LossScaleOptimizer`, around a new one a
    `LossScaleOptimizerV3`.

    Example:
        >>> import tf_keras
        >>> from lossscale.tensorflow.tf_keras import BaseLossScaleOptimizer
        >>> optimizer = BaseLossScaleOptimizer(tf_keras.optimizers.Adam())
        >>> float(optimizer.loss_scale)
        32768.0
    """


class _DropIn(Wrapper):
    """tf_keras's attributes, on one of our loss scales."""

    _count_skipped_steps = True
    _skip_nonfinite = True
    _loss_scale: Any
    _track_trackable: Any

    def _start(
        self, original_class: Any, opt: Any, dynamic: Any, scale: Any, steps: Any
    ) -> None:
        """Check the arguments as tf_keras does, and make a loss scale of ours."""
        if dynamic is True:
            scale = 2.0**15 if scale is None else scale
            steps = 2000 if steps is None else steps
            chosen = self._dynamic_class(scale, steps)
            original_class.__init__(self, opt, False, 1.0)
        else:
            original_class.__init__(self, opt, dynamic, scale, steps)
            chosen = self._fixed_class(float(scale))
        self._loss_scale = chosen
        if dynamic is True:
            self._track_trackable(chosen, "loss_scale")

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return isinstance(self._loss_scale, self._dynamic_class)

    @property
    def loss_scale(self) -> Array:
        """The current loss scale, a float32 tensor."""
        return self._current()

    @property
    def dynamic_counter(self) -> Any:
        """The variable that counts finite steps; `None` if the scale is fixed."""
        return self._loss_scale.good_steps if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The loss scale that it was made with."""
        if self.dynamic:
            return float(self._loss_scale.initial_loss_scale)
        return float(self._loss_scale.get_config()["loss_scale_value"])

    @property
    def dynamic_growth_steps(self) -> int | None:
        """How many finite steps in a row make the scale grow."""
        return self._loss_scale.increment_period if self.dynamic else None

    def _check_calls(self, *_: Any, **__: Any) -> None:
        original._raise_if_strategy_unsupported()  # noqa: SLF001
        original._maybe_warn_about_scaling(  # noqa: SLF001
            self._loss_has_been_scaled, self._gradients_have_been_unscaled
        )


_METHODS = (
    "compute_gradients",
    "apply_gradients",
    "minimize",
    "get_scaled_loss",
    "get_unscaled_gradients",
)


@tf_keras.saving.register_keras_serializable("lossscale.tf_keras")
@unconverted_methods(*_METHODS)
class LossScaleOptimizer(_DropIn, original.LossScaleOptimizer, BaseLossScaleOptimizer):
    """tf_keras's wrapper of a legacy optimizer, with the same arguments.

    Example:
        >>> import tf_keras
        >>> from lossscale.tensorflow.tf_keras import LossScaleOptimizer
        >>> LossScaleOptimizer(tf_keras.optimizers.legacy.SGD()).initial_scale
        32768.0
    """

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: The legacy optimizer of tf_keras to wrap.
            dynamic: Whether the scale moves.
            initial_scale: The scale to begin with; the scale, if it does not move.
            dynamic_growth_steps: How many finite steps in a row double the scale.

        Raises:
            TypeError: If an argument is of another kind.
            ValueError: If arguments do not go together.
        """
        self._start(
            original.LossScaleOptimizer,
            inner_optimizer,
            dynamic,
            initial_scale,
            dynamic_growth_steps,
        )


@tf_keras.saving.register_keras_serializable("lossscale.tf_keras")
@unconverted_methods(*_METHODS)
class LossScaleOptimizerV3(
    _DropIn, original.LossScaleOptimizerV3, BaseLossScaleOptimizer
):
    """tf_keras's wrapper of a new optimizer, with the same arguments.

    Example:
        >>> import tf_keras
        >>> from lossscale.tensorflow.tf_keras import LossScaleOptimizerV3
        >>> LossScaleOptimizerV3(tf_keras.optimizers.SGD(), False, 8.0).initial_scale
        8.0
    """

    @tf.__internal__.tracking.no_automatic_dependency_tracking
    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: The new optimizer of tf_keras to wrap.
            dynamic: Whether the scale moves.
            initial_scale: The scale to begin with; the scale, if it does not move.
            dynamic_growth_steps: How many finite steps in a row double the scale.

        Raises:
            TypeError: If an argument is of another kind.
            ValueError: If arguments do not go together.
        """
        self._start(
            original.LossScaleOptimizerV3,
            inner_optimizer,
            dynamic,
            initial_scale,
            dynamic_growth_steps,
        )
