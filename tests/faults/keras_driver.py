"""Faults in a loop of Keras 3, on the backend of the process: ours, and Keras's own.

Steps are compiled where the backend compiles, as `fit` compiles them; every tenth is
not, nor one with an exception in the middle. Gradients are given as they come from a
scaled loss.
"""

import numpy as np
from helpers import fault_arrays
from helpers.fault_arrays import INTERVAL, RATE, SHAPES, SLOPES, raise_if
from helpers.keras_backend import BACKEND, keras

from lossscale.keras import LossScaleOptimizer

Original = keras.optimizers.LossScaleOptimizer
SETTINGS = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9, "nesterov": True},
    "Adam": {},
    "Adam amsgrad": {"amsgrad": True},
    "Adam clipnorm": {"clipnorm": 1.0},
    "Adam clipvalue": {"clipvalue": 1.0},
    "Adam global_clipnorm": {"global_clipnorm": 1.0},
    "Adam accumulation": {"gradient_accumulation_steps": 2},
    "Adam EMA": {"use_ema": True, "ema_overwrite_frequency": 7},
    "AdamW": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adafactor": {},
    "RMSprop": {"momentum": 0.5},
    "Nadam": {},
    "Ftrl": {},
    "Lion": {},
    "Lamb": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
}
CONFIGURATIONS = tuple(
    name
    for name in SETTINGS
    if hasattr(keras.optimizers, name.partition(" ")[0])  # newer than the oldest Keras
)
"""Every optimizer of Keras 3, and Adam in the ways that change its gradients."""

EAGER_EVERY = 10
"""Eager steps take some ten times as long as compiled ones."""

CALLS = ("scale", "before apply", "in apply", "after update", "after step")
SCALE = 2.0**15


class Loop(fault_arrays.Loop):
    """Weights and an optimizer in its wrapper, and one step of them with faults."""

    low = 2.0**-126
    parts = ("inner", "wrapper", "weights", "_compiled")

    def __init__(self, configuration: str, *, own: bool) -> None:
        self._configuration = configuration
        self._own = own
        self._raises = None
        self.make()

    def make(self) -> None:
        name = self._configuration.partition(" ")[0]
        settings = SETTINGS[self._configuration]
        self.inner = getattr(keras.optimizers, name)(RATE, **settings)
        make = Original if self._own else LossScaleOptimizer
        self.wrapper = make(self.inner, SCALE, INTERVAL)
        self.weights = [keras.Variable(np.ones(shape, np.float32)) for shape in SHAPES]
        self.wrapper.build(self.weights)
        self._compiled = _compiled(self.wrapper, self.weights)
        self._intercept()

    def _intercept(self) -> None:
        """Raise in the wrapped optimizer's own step where the plan says so."""
        apply = self.inner.apply

        def apply_or_raise(*arguments, **keywords):
            if not _is_compiling():
                raise_if(self._raises, "in apply")
            apply(*arguments, **keywords)
            if not _is_compiling():
                raise_if(self._raises, "after update")

        # Keras tracks what is set in the usual way.
        object.__setattr__(self.inner, "apply", apply_or_raise)

    def save(self):
        store = {}
        self.wrapper.save_own_variables(store)
        return store, [_numpy(weight) for weight in self.weights]

    def load(self, saved) -> None:
        store, weights = saved
        for weight, old in zip(self.weights, weights, strict=True):
            weight.assign(old)
        self.wrapper.load_own_variables(store)

    def iterate(self, step) -> None:
        self._raises = step.raises_at
        raise_if(step.raises_at, "scale")
        scale = np.float32(float(self.wrapper.scale_loss(1.0)))
        gradients = []
        written, hit = (
            fault_arrays.written(step.faults),
            fault_arrays.hit(step.faults),
        )
        with np.errstate(over="ignore"):
            for slope, array, mask in zip(SLOPES, written, hit, strict=True):
                made = None if array is None else np.where(mask, array, slope * scale)
                gradients.append(
                    None if made is None else keras.ops.convert_to_tensor(made)
                )
        raise_if(step.raises_at, "before apply")
        is_eager = step.number % EAGER_EVERY == 0 or step.raises_at is not None
        if is_eager and not (self._own and BACKEND == "jax"):
            self.wrapper.apply(gradients, self.weights)
        else:
            self._compiled(gradients)
        raise_if(step.raises_at, "after step")

    def arrays(self) -> dict[str, np.ndarray]:
        named = {f"weight {i}": weight for i, weight in enumerate(self.weights)}
        for index, variable in enumerate(self.inner.variables):
            if variable is not self.inner.iterations:
                named[f"{variable.path} ({index})"] = variable
        return {name: _numpy(variable) for name, variable in named.items()}

    def count(self) -> int:
        # Of all micro-batches, where `iterations` counts updates alone.
        return int(_numpy(self.inner._iterations))

    def scale(self) -> float:
        return float(_numpy(self.wrapper.dynamic_scale))


def _numpy(variable) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))


def _is_compiling() -> bool:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    if BACKEND == "jax":
        import jax

        return isinstance(jax.numpy.zeros(()), jax.core.Tracer)
    return False


def _compiled(optimizer, variables):
    """Return a step, compiled where the backend compiles."""
    if BACKEND == "torch":
        return lambda gradients: optimizer.apply(gradients, variables)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(
            lambda gradients: optimizer.apply(gradients, variables), autograph=False
        )
    import jax

    jitted = jax.jit(optimizer.stateless_apply)

    def step(gradients):
        results = jitted(
            [variable.value for variable in optimizer.variables],
            gradients,
            [variable.value for variable in variables],
        )
        targets = (variables, optimizer.variables)
        for places, values in zip(targets, results, strict=True):
            for place, value in zip(places, values, strict=True):
                place.assign(value)

    return step


def run(configuration, *, own, steps, seed, device="cpu"):
    """Run a plan of faults; stop at the first thing that must not happen."""
    place = "gpu:0" if device == "cuda" else "cpu:0"
    with keras.device(place):
        return fault_arrays.run(
            Loop(configuration, own=own),
            CALLS,
            optimizer=configuration,
            scaler=f"Keras on {BACKEND}" if own else f"lossscale on {BACKEND}",
            steps=steps,
            seed=seed,
        )
