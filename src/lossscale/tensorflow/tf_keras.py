# SPDX-License-Identifier: Apache-2.0
"""tf_keras's `LossScaleOptimizer`: drop-ins for its classes, and bases for ours.

tf_keras has two wrapper classes, for legacy optimizers and for new ones. They pass
settings, weights, slots, checkpoints and configs on to the optimizer inside; that part
is tf_keras's here too. The part that handles the loss, the gradients and the scale is
replaced.
"""

from typing import Any, ClassVar, cast

import tensorflow as tf

from lossscale.errors import MissingPackageError

try:
    import tf_keras
    from tf_keras.src.mixed_precision import loss_scale_optimizer as original
except ModuleNotFoundError as error:
    if error.name != "tf_keras":  # tf_keras is installed, a package it needs is not
        raise
    _message = (
        "lossscale.tensorflow.tf_keras needs tf_keras, which is not installed. Install "
        "it with: pip install tf-keras"
    )
    raise MissingPackageError(_message) from None

from lossscale.core.state import Array
from lossscale.tensorflow.tracing import skip_autograph_in
from lossscale.tensorflow.wrapper import OptimizerWrapper


class _LegacyBase(original.LossScaleOptimizer):
    """The class of a wrapper around a legacy optimizer."""

    def _attach(self, opt: Any) -> None:
        # A fixed scale has no variables; it is replaced at once.
        original.LossScaleOptimizer.__init__(self, opt, False, 1.0)


class _NewBase(original.LossScaleOptimizerV3):
    """The class of a wrapper around a new optimizer."""

    def _attach(self, opt: Any) -> None:
        original.LossScaleOptimizerV3.__init__(self, opt, False, 1.0)
        # The parts of a checkpoint are tracked by name, not as attributes too.
        self._self_setattr_tracking = False


def choose_base(opt: Any) -> type:
    """Return the base of a wrapper around an optimizer of tf_keras."""
    legacy = isinstance(opt, tf_keras.optimizers.legacy.Optimizer)
    return _LegacyBase if legacy else _NewBase


def register(cls: type) -> None:
    """Let tf_keras write and read a class by a name of its own."""
    kind = "Legacy" if issubclass(cls, original.LossScaleOptimizer) else ""
    tf_keras.saving.register_keras_serializable(
        "lossscale", f"{kind}LossScaleOptimizer"
    )(cls)


class _DropInMeta(original.LossScaleOptimizerMetaclass):
    """Instantiates one of two classes, chosen by the optimizer."""

    def __call__(cls, inner_optimizer: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: N805
        if cls is not BaseLossScaleOptimizer:
            return super().__call__(inner_optimizer, *arguments, **keywords)
        if isinstance(inner_optimizer, tf_keras.optimizers.legacy.Optimizer):
            return LossScaleOptimizer(inner_optimizer, *arguments, **keywords)
        if isinstance(inner_optimizer, tf_keras.optimizers.Optimizer):
            return LossScaleOptimizerV3(inner_optimizer, *arguments, **keywords)
        # tf_keras's constructor raises, and says what it expected.
        return original.BaseLossScaleOptimizer(inner_optimizer)


class BaseLossScaleOptimizer(original.BaseLossScaleOptimizer, metaclass=_DropInMeta):
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


class _DropIn(OptimizerWrapper):
    """tf_keras's attributes, on one of our loss scales."""

    _original: ClassVar[Any]
    _count_skipped_steps = True
    _skip_nonfinite = True
    _loss_scale: Any
    _track_trackable: Any

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: The optimizer of tf_keras to wrap.
            dynamic: Whether the scale moves.
            initial_scale: The scale to begin with; the scale, if it does not move.
            dynamic_growth_steps: How many finite steps in a row double the scale.

        Raises:
            TypeError: If an argument is of another type.
            ValueError: If arguments contradict each other.
        """
        loss_scale: Any
        if dynamic is True:
            scale = 2.0**15 if initial_scale is None else initial_scale
            steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
            loss_scale = self._dynamic_class(scale, steps)
            self._original.__init__(self, inner_optimizer, False, 1.0)
        else:
            # tf_keras's constructor checks the arguments.
            self._original.__init__(
                self, inner_optimizer, dynamic, initial_scale, dynamic_growth_steps
            )
            loss_scale = self._fixed_class(float(cast("float", initial_scale)))
        self._loss_scale = loss_scale
        if dynamic is True:
            self._track_trackable(loss_scale, "loss_scale")

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
@skip_autograph_in(*_METHODS)
class LossScaleOptimizer(_DropIn, original.LossScaleOptimizer, BaseLossScaleOptimizer):
    """tf_keras's wrapper of a legacy optimizer, with the same arguments.

    Example:
        >>> import tf_keras
        >>> from lossscale.tensorflow.tf_keras import LossScaleOptimizer
        >>> LossScaleOptimizer(tf_keras.optimizers.legacy.SGD()).initial_scale
        32768.0
    """

    _original = original.LossScaleOptimizer


@tf_keras.saving.register_keras_serializable("lossscale.tf_keras")
@skip_autograph_in(*_METHODS)
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

    _original = original.LossScaleOptimizerV3
    # The parts of a checkpoint are tracked by name, not as attributes too.
    __init__ = tf.__internal__.tracking.no_automatic_dependency_tracking(
        _DropIn.__init__
    )
