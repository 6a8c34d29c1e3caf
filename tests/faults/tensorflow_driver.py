"""Faults in a loop of TensorFlow: our wrapper, and TensorFlow's and tf_keras's own.

Steps go four ways: `minimize` and a tape with scaled loss and unscaled gradients, each
in a tf.function and eagerly. An exception in the middle needs a step that runs eagerly.
Gradients are replaced on their way back, while they carry the scale.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras
from helpers import fault_arrays
from helpers.fault_arrays import INTERVAL, RATE, SHAPES, SLOPES, raise_if

import lossscale.tensorflow as ls

v1 = tf.compat.v1
legacy = tf_keras.optimizers.legacy
MAKERS = {
    "v1 GradientDescent": lambda _: v1.train.GradientDescentOptimizer(RATE),
    "v1 Momentum": lambda _: v1.train.MomentumOptimizer(RATE, 0.9, use_nesterov=True),
    "v1 Adam": lambda _: v1.train.AdamOptimizer(RATE),
    "v1 Adam, manager": lambda _: v1.train.AdamOptimizer(RATE),
    "v1 Adagrad": lambda _: v1.train.AdagradOptimizer(RATE),
    "v1 AdagradDA": lambda steps: v1.train.AdagradDAOptimizer(RATE, steps),
    "v1 Adadelta": lambda _: v1.train.AdadeltaOptimizer(RATE),
    "v1 RMSProp": lambda _: v1.train.RMSPropOptimizer(RATE, momentum=0.5),
    "v1 Ftrl": lambda _: v1.train.FtrlOptimizer(RATE),
    "v1 ProximalGradientDescent": lambda _: v1.train.ProximalGradientDescentOptimizer(
        RATE, l1_regularization_strength=1e-3
    ),
    "v1 ProximalAdagrad": lambda _: v1.train.ProximalAdagradOptimizer(RATE),
    "tf_keras SGD": lambda _: tf_keras.optimizers.SGD(RATE, momentum=0.9),
    "tf_keras Adam": lambda _: tf_keras.optimizers.Adam(RATE),
    "tf_keras Adam amsgrad, clipnorm": lambda _: tf_keras.optimizers.Adam(
        RATE, amsgrad=True, clipnorm=1.0
    ),
    "tf_keras AdamW": lambda _: tf_keras.optimizers.AdamW(RATE),
    "tf_keras Adamax": lambda _: tf_keras.optimizers.Adamax(RATE),
    "tf_keras Adagrad": lambda _: tf_keras.optimizers.Adagrad(RATE),
    "tf_keras Adadelta": lambda _: tf_keras.optimizers.Adadelta(RATE),
    "tf_keras Adafactor": lambda _: tf_keras.optimizers.Adafactor(RATE),
    "tf_keras RMSprop": lambda _: tf_keras.optimizers.RMSprop(RATE, momentum=0.5),
    "tf_keras Nadam": lambda _: tf_keras.optimizers.Nadam(RATE),
    "tf_keras Ftrl": lambda _: tf_keras.optimizers.Ftrl(RATE),
    "tf_keras Lion": lambda _: tf_keras.optimizers.Lion(RATE),
    "legacy SGD": lambda _: legacy.SGD(RATE, momentum=0.9, nesterov=True),
    "legacy Adam": lambda _: legacy.Adam(RATE, amsgrad=True),
    "legacy Adamax": lambda _: legacy.Adamax(RATE),
    "legacy Adagrad": lambda _: legacy.Adagrad(RATE),
    "legacy Adadelta": lambda _: legacy.Adadelta(RATE),
    "legacy RMSprop": lambda _: legacy.RMSprop(RATE, momentum=0.5),
    "legacy Nadam": lambda _: legacy.Nadam(RATE),
    "legacy Ftrl": lambda _: legacy.Ftrl(RATE),
}
CONFIGURATIONS = tuple(MAKERS)
"""Every optimizer of TensorFlow 1 and of tf_keras, new and legacy."""

EAGER_EVERY = 10
"""Eager steps take some ten times as long as compiled ones."""

CALLS = ("loss", "backward", "before apply", "in apply", "after step")


@tf.custom_gradient
def _replace(weight, mask, numbers):
    """Return a weight in whose gradient some numbers are replaced."""

    def backward(upstream):
        return tf.where(mask, numbers, upstream), None, None

    return tf.identity(weight), backward


class Loop(fault_arrays.Loop):
    """Weights, an optimizer and its wrapper, and one step of them with faults."""

    parts = ("weights", "steps", "inner", "wrapper", "_compiled", "checkpoint")

    def __init__(self, configuration: str, *, own: bool, folder: Path) -> None:
        self._configuration = configuration
        self._own = own
        self._folder = folder
        self._is_v1 = configuration.startswith("v1")
        # tf_keras counts skipped steps in `iterations`.
        self.counts_skipped = own and not self._is_v1
        self._raises = None
        self.make()

    def make(self) -> None:
        self.weights = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.inner = MAKERS[self._configuration](self.steps)
        self.wrapper = self._wrap(self.inner)
        self._compiled = {}
        if not self._is_v1:
            build = getattr(self.inner, "_create_all_weights", None) or self.inner.build
            build(self.weights)
        self._intercept()
        self.checkpoint = tf.train.Checkpoint(
            weights=self.weights, steps=self.steps, optimizer=self.wrapper
        )

    def _wrap(self, inner):
        if self._own and self._is_v1:
            scale = v1.mixed_precision.DynamicLossScale(increment_period=INTERVAL)
            return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(inner, scale)
        if self._own:
            return tf_keras.mixed_precision.LossScaleOptimizer(
                inner, dynamic_growth_steps=INTERVAL
            )
        if self._configuration.endswith("manager"):
            scale = ls.ExponentialUpdateLossScaleManager(2.0**15, INTERVAL, 2)
        else:
            scale = ls.DynamicLossScale(increment_period=INTERVAL)
        return ls.LossScaleOptimizer(inner, scale)

    def _intercept(self) -> None:
        """Raise in the wrapped optimizer's own step where the plan says so."""
        apply = self.inner.apply_gradients

        def apply_or_raise(*arguments, **keywords):
            if tf.executing_eagerly():
                raise_if(self._raises, "before apply")
            result = apply(*arguments, **keywords)
            if tf.executing_eagerly():
                raise_if(self._raises, "in apply")
            return result

        # tf.Module would track a method that is set in the usual way.
        object.__setattr__(self.inner, "apply_gradients", apply_or_raise)

    def save(self):
        return self.checkpoint.write(str(self._folder / "checkpoint")), self.scale()

    def load(self, saved) -> None:
        path, scale = saved
        # Slots of TensorFlow 1's are made, and restored, by the first step.
        self.checkpoint.read(path).assert_existing_objects_matched()
        if self.scale() != scale:
            message = f"saved at the scale {scale}, resumed at {self.scale()}"
            raise AssertionError(message)

    def iterate(self, step) -> None:
        is_eager = step.number % EAGER_EVERY == 0 or step.raises_at is not None
        uses_tape = step.number % 3 == 0
        numbers = fault_arrays.written(step.faults)
        present = tuple(array is not None for array in numbers)
        masks = [tf.constant(mask) for mask in fault_arrays.hit(step.faults)]
        given = [
            tf.constant(np.zeros(shape, np.float32) if array is None else array)
            for array, shape in zip(numbers, SHAPES, strict=True)
        ]
        self._raises = step.raises_at
        raise_if(step.raises_at, "loss")
        take = partial(self._tape if uses_tape else self._minimize, present=present)
        if not is_eager:
            compiled = tf.function(take, autograph=False)
            take = self._compiled.setdefault((uses_tape, present), compiled)
        take(masks, given)
        raise_if(step.raises_at, "after step")

    def _loss(self, masks, numbers, present):
        def loss():
            if tf.executing_eagerly():
                raise_if(self._raises, "backward")
            weights = zip(self.weights, masks, numbers, SLOPES, present, strict=True)
            return tf.add_n(
                [
                    tf.reduce_sum(_replace(weight, mask, array) * slope)
                    for weight, mask, array, slope, is_present in weights
                    if is_present
                ]
            )

        return loss

    def _variables(self, present):
        pairs = zip(self.weights, present, strict=True)
        return [weight for weight, is_present in pairs if is_present]

    def _minimize(self, masks, numbers, present) -> None:
        if self._own and not self._is_v1:
            self._tape(masks, numbers, present)
            return
        keywords = {"global_step": self.steps} if self._is_v1 else {}
        self.wrapper.minimize(
            self._loss(masks, numbers, present),
            var_list=self._variables(present),
            **keywords,
        )

    def _tape(self, masks, numbers, present) -> None:
        variables = self._variables(present)
        loss = self._loss(masks, numbers, present)
        keywords = {"global_step": self.steps} if self._is_v1 else {}
        if self._own and self._is_v1:
            pairs = self.wrapper.compute_gradients(loss, variables)
            self.wrapper.apply_gradients(pairs, **keywords)
            return
        with tf.GradientTape() as tape:
            scaled = self.wrapper.get_scaled_loss(loss())
        gradients = self.wrapper.get_unscaled_gradients(
            tape.gradient(scaled, variables)
        )
        self.wrapper.apply_gradients(zip(gradients, variables, strict=True), **keywords)

    def arrays(self) -> dict[str, np.ndarray]:
        named = {f"weight {i}": weight for i, weight in enumerate(self.weights)}
        variables = self.inner.variables
        found = variables() if callable(variables) else variables
        for index, variable in enumerate(found):
            if "iteration" not in variable.name and variable.name != "iter:0":
                named[f"{variable.name} ({index})"] = variable
        return {name: variable.numpy() for name, variable in named.items()}

    def count(self) -> int:
        counter = self.steps if self._is_v1 else self.inner.iterations
        return int(counter.numpy())

    def scale(self) -> float:
        if self._own and not self._is_v1:
            return float(self.wrapper.loss_scale)
        if self._own:
            return float(self.wrapper._loss_scale())
        return float(self.wrapper._current())


def run(configuration, *, own, steps, seed, device="cpu"):
    """Run a plan of faults; stop at the first thing that must not happen."""
    if device != "cpu":
        device = "GPU" if device == "cuda" else device
    scaler = "lossscale"
    if own:
        scaler = (
            "MixedPrecisionLossScaleOptimizer"
            if configuration.startswith("v1")
            else "tf_keras LossScaleOptimizer"
        )
    with tempfile.TemporaryDirectory() as folder, tf.device(device):
        return fault_arrays.run(
            Loop(configuration, own=own, folder=Path(folder)),
            CALLS,
            optimizer=configuration,
            scaler=scaler,
            steps=steps,
            seed=seed,
        )
