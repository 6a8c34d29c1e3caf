# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper under its classic names.

The second base of an instance depends on the optimizer inside: around an optimizer of
tf_keras it is tf_keras's own wrapper, which `compile` expects; around any other it is
`tf.compat.v1.train.Optimizer`.
"""

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias, overload

import tensorflow as tf

from lossscale.core import classic, validation
from lossscale.core.policies import Policy
from lossscale.errors import SettingError, SettingTypeError
from lossscale.tensorflow import wrapped_optimizer
from lossscale.tensorflow.classic import DynamicLossScale, FixedLossScale
from lossscale.tensorflow.policy_loss_scale import PolicyLossScale
from lossscale.tensorflow.tracing import skip_autograph_in
from lossscale.tensorflow.wrapper import OptimizerWrapper

Scale: TypeAlias = classic.LossScaleManager | classic.LossScale | Policy | float | str

_SETTINGS = ("lr", "beta_1", "beta_2", "clipnorm", "global_clipnorm", "clipvalue")
"""Settings of a Keras optimizer that are read and set through the wrapper."""


@skip_autograph_in(
    "compute_gradients",
    "apply_gradients",
    "minimize",
    "get_scaled_loss",
    "get_unscaled_gradients",
)
class LossScaleOptimizer(OptimizerWrapper):
    """An optimizer that scales its loss and never applies non-finite gradients.

    It wraps an optimizer of `tf.compat.v1.train`, of Keras 3 or of tf_keras, works
    eagerly, in graphs and in `tf.function`, and under distribution strategies, where
    an overflow in one replica skips the step in all. It can be put into a
    `tf.train.Checkpoint`. Around an optimizer of tf_keras it is an instance of
    tf_keras's wrapper, so `fit` scales the loss; around any other it is a
    `tf.compat.v1.train.Optimizer`.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> weight = tf.Variable(5.0)
        >>> descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        >>> optimizer = ls.LossScaleOptimizer(descent, "dynamic")
        >>> optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
        >>> float(weight)
        2.0
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Choose the class by the optimizer."""
        opt = arguments[0] if arguments else keywords.get("opt")
        return object.__new__(_derive(cls, _choose_base(opt)))

    @overload
    def __init__(
        self,
        opt: Any,
        loss_scale_manager: Scale,
        *,
        skip_nonfinite: bool = True,
        count_skipped_steps: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        opt: Any,
        *,
        loss_scale: Scale,
        skip_nonfinite: bool = True,
        count_skipped_steps: bool = False,
    ) -> None: ...

    def __init__(
        self,
        opt: Any,
        loss_scale_manager: Any = None,
        *,
        loss_scale: Any = None,
        skip_nonfinite: bool = True,
        count_skipped_steps: bool = False,
    ) -> None:
        """Wrap an optimizer.

        Args:
            opt: The optimizer to wrap.
            loss_scale_manager: A manager, a LossScale, a policy, a number, or
                "dynamic".
            loss_scale: The same by the name that it had in tf.keras.
            skip_nonfinite: Whether a step with non-finite gradients is skipped even
                where the LossScale would let it pass, as a fixed one does. False
                applies them, as the later originals did. With a manager such a step
                is always skipped.
            count_skipped_steps: Whether `global_step` (or the `iterations` of a Keras
                optimizer) moves on a skipped step too, as in tf.keras from 2.3 on.

        Raises:
            SettingError: If an argument is of another type (a ValueError).
        """
        validation.check_bool("count_skipped_steps", count_skipped_steps)
        if loss_scale is not None and loss_scale_manager is not None:
            message = (
                f"loss_scale_manager={loss_scale_manager!r} and "
                f"loss_scale={loss_scale!r} were both given; pass one of them."
            )
            raise SettingError(message)
        scale = loss_scale_manager if loss_scale is None else loss_scale
        super().__init__(opt, scale, skip_nonfinite=skip_nonfinite)
        self._count_skipped_steps = count_skipped_steps
        if isinstance(self._loss_scale, tf.__internal__.tracking.Trackable):
            self._track_trackable(self._loss_scale, "loss_scale")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as plain values, in the format of tf.keras 2.3.

        Raises:
            SettingTypeError: If the optimizer is not of tf_keras, or if the scale is a
                manager: these have no config.
        """
        tf_keras = _find_tf_keras(self._optimizer)
        if tf_keras is None:
            message = (
                f"A {type(self._optimizer).__name__} has no config that tf_keras reads."
                " Wrap an optimizer of tf_keras.optimizers, or make this one again."
            )
            raise SettingTypeError(message)
        if isinstance(self._loss_scale, classic.LossScaleManager):
            message = (
                f"A {type(self._loss_scale).__name__} has no config. Use a LossScale, "
                "such as DynamicLossScale()."
            )
            raise SettingTypeError(message)
        config = {
            "optimizer": tf_keras.optimizers.serialize(self._optimizer),
            "loss_scale": {
                "class_name": type(self._loss_scale).__name__,
                "config": self._loss_scale.get_config(),
            },
        }
        options = {"skip_nonfinite": True, "count_skipped_steps": False}
        values = {name: getattr(self, f"_{name}") for name in options}
        return config | {
            name: value for name, value in values.items() if value != options[name]
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the optimizer of a config; the config is left as it is.

        Args:
            config: What `get_config` returned, here or in tf.keras 1.15 to 2.3.
            custom_objects: Classes of your own, by name.

        Raises:
            SettingError: If a class of the config is not known.
        """
        import tf_keras  # noqa: PLC0415  # it reads the config of the optimizer

        options = dict(config)
        classes = dict(custom_objects or {})
        optimizer = options.pop("optimizer")
        if isinstance(optimizer, Mapping):
            optimizer = tf_keras.optimizers.deserialize(
                dict(optimizer), classes, use_legacy_format="module" not in optimizer
            )
        scale = _make_scale(options.pop("loss_scale"), classes)
        return cls(optimizer, scale, **options)

    def _adopt(self, opt: Any) -> None:
        self._attach(opt)  # of the base that was chosen

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting on the wrapped optimizer; refuse one without effect here."""
        wrapped = self.__dict__.get("_optimizer")
        if name.startswith("_") or hasattr(type(self), name) or wrapped is None:
            super().__setattr__(name, value)
        elif _passes_through(wrapped, name):
            setattr(wrapped, _get_current_name(name), value)
        elif hasattr(wrapped, name):
            message = (
                f"{name} belongs to the optimizer inside; set it there: "
                f"optimizer.inner_optimizer.{name} = ..."
            )
            raise AttributeError(message)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a setting of the wrapped optimizer."""
        wrapped = self.__dict__.get("_optimizer")
        if wrapped is not None and _passes_through(wrapped, name):
            return getattr(wrapped, _get_current_name(name))
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(message)


class MixedPrecisionLossScaleOptimizer(LossScaleOptimizer):
    """`LossScaleOptimizer` under its name in `tf.compat.v1.mixed_precision`.

    Example:
        >>> import tensorflow as tf, lossscale.tensorflow as ls
        >>> descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        >>> ls.MixedPrecisionLossScaleOptimizer(descent, loss_scale=128).loss_scale
        FixedLossScale(128.0)
    """

    def __init__(
        self,
        opt: Any,
        loss_scale: classic.LossScale | float | str,
        **options: Any,
    ) -> None:
        """Wrap an optimizer of `tf.compat.v1.train`.

        Args:
            opt: The optimizer to wrap.
            loss_scale: A LossScale, a number, or "dynamic".
            **options: The keywords of `LossScaleOptimizer`.

        Raises:
            SettingError: If either argument is of another kind (a ValueError).
        """
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            message = (
                "opt must be a tf.compat.v1.train.Optimizer, got "
                f"{type(opt).__name__}. LossScaleOptimizer wraps Keras's too."
            )
            raise SettingError(message)
        super().__init__(opt, loss_scale, **options)


class _TensorFlowBase(tf.compat.v1.train.Optimizer):
    """The second base of a wrapper whose optimizer is not of tf_keras."""

    _optimizer: Any
    _loss_scale: Any

    def _attach(self, opt: Any) -> None:
        tf.compat.v1.train.Optimizer.__init__(
            self, use_locking=False, name=wrapped_optimizer.get_name(opt)
        )
        self._optimizer = opt
        wrapped_optimizer.mark_as_wrapped(opt)
        # The name under which MixedPrecisionLossScaleOptimizer saved it.
        if isinstance(opt, tf.__internal__.tracking.Trackable):
            self._track_trackable(opt, "base_optimizer")

    @property
    def iterations(self) -> Any:
        """The step counter of a Keras optimizer; TensorFlow 1's have none."""
        return self._optimizer.iterations

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self._optimizer.iterations = value

    @property
    def learning_rate(self) -> Any:
        """The learning rate of a Keras optimizer; TensorFlow 1's keep theirs."""
        return self._optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not wrapped_optimizer.is_keras(self._optimizer):
            name = wrapped_optimizer.get_name(self._optimizer)
            message = (
                f"The learning rate of {name} cannot be set: optimizers of TensorFlow "
                "1 take a tensor or variable for it when they are made."
            )
            raise AttributeError(message)
        self._optimizer.learning_rate = value

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer and of the loss scale."""
        return wrapped_optimizer.list_variables(
            self._optimizer
        ) + wrapped_optimizer.list_variables(self._loss_scale)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot variable of the wrapped optimizer."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return list(self._optimizer.get_slot_names())

    def __repr__(self) -> str:
        """Return the class; Keras 3 writes it when its `compile` refuses the object."""
        name = f"{type(self).__module__}.{type(self).__name__}"
        text = f"{name} around a {type(self._optimizer).__name__}"
        if _is_keras_3(self._optimizer):
            text += "; with compile() of Keras 3 use lossscale.keras.LossScaleOptimizer"
        return f"<{text}>"

    def __dir__(self) -> list[str]:
        """List the attributes, except for `get_slot_names`.

        Checkpoints ask for it by `dir`. The slots belong to the wrapped optimizer and
        are saved with it; offered twice, they cannot be saved at all.
        """
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _trackable_children(
        self, save_type: str = "checkpoint", **keywords: Any
    ) -> dict[str, Any]:
        """Return what is saved with this optimizer.

        TensorFlow cannot load a SavedModel with the slots of an optimizer of
        TensorFlow 1. There they go as plain variables, which a step can use as well.
        """
        children: dict[str, Any] = super()._trackable_children(save_type, **keywords)
        if save_type == "savedmodel" and not wrapped_optimizer.is_keras(
            self._optimizer
        ):
            children.pop("base_optimizer", None)
            for index, variable in enumerate(
                wrapped_optimizer.list_variables(self._optimizer)
            ):
                children[f"optimizer_variable_{index}"] = variable
        return children


def _find_tf_keras(opt: Any) -> Any:
    """Return the module tf_keras if it defines the optimizer, else `None`."""
    # Where an optimizer of tf_keras exists, tf_keras is imported.
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is None:
        return None
    kinds = tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer
    return tf_keras if isinstance(opt, kinds) else None


def _is_keras_3(opt: Any) -> bool:
    libraries = {kind.__module__.partition(".")[0] for kind in type(opt).__mro__}
    return "keras" in libraries


def _choose_base(opt: Any) -> type:
    """Return the second base of a wrapper around an optimizer."""
    if _find_tf_keras(opt) is None:
        return _TensorFlowBase
    from lossscale.tensorflow import tf_keras  # noqa: PLC0415  # imports the library

    return tf_keras.choose_base(opt)


_derived: dict[tuple[type, type], type] = {}


def _derive(cls: type, base: type) -> type:
    """Return a wrapper class with a base, under its own name; the same each time."""
    if issubclass(cls, base):
        return cls
    if (cls, base) not in _derived:
        _derived[cls, base] = _make_class(cls, base)
    return _derived[cls, base]


def _make_class(cls: type, base: type) -> type:
    names = ("__module__", "__qualname__", "__doc__")
    derived = type(base)(
        cls.__name__, (cls, base), {name: getattr(cls, name) for name in names}
    )
    if cls is LossScaleOptimizer and base is not _TensorFlowBase:
        from lossscale.tensorflow import tf_keras  # noqa: PLC0415  # imports the library

        tf_keras.register(derived)
    return derived


def _passes_through(wrapped: Any, name: str) -> bool:
    """Whether a setting of an optimizer is read and set through its wrapper."""
    if name in getattr(wrapped, "_hyper", ()):
        return True
    if not wrapped_optimizer.is_keras(wrapped) or name not in _SETTINGS:
        return False
    return name == "lr" or hasattr(wrapped, name)


def _get_current_name(name: str) -> str:
    """Return the name of a setting in the wrapped optimizer; `lr` is an old name."""
    return "learning_rate" if name == "lr" else name


def _make_scale(config: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Return the loss scale of a config."""
    if not isinstance(config, Mapping):
        return config
    name = config["class_name"]
    classes = (FixedLossScale, DynamicLossScale, PolicyLossScale)
    by_name = {kind.__name__: kind for kind in classes}
    cls = custom_objects.get(name, by_name.get(name))
    if cls is None:
        message = (
            f"The config has a loss scale of the class {name}, which is not known. "
            f"Pass custom_objects={{{name!r}: ...}}."
        )
        raise SettingError(message)
    return cls.from_config(config["config"])
