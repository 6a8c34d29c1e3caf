"""How the TensorFlow adapter looks to a type checker; checked by mypy, never run.

Not `tensorflow.py`: a checker would take that for the framework itself.
"""

from typing import Any

import tensorflow as tf

import lossscale.tensorflow as ls
from lossscale import Dynamic, Fixed, Policy, ScaleState, Signal
from lossscale.core import classic

policy: Policy = Dynamic()
state: ScaleState = ls.init(policy)
state = ls.init(policy, ScaleState(8.0, 0, 0))
loss: Any = ls.scale(tf.constant(1.0), state)
gradients, signal = ls.unscale({"w": loss, "b": None}, state, measure=["norm"])
seen: Signal = signal
state = ls.update(policy, state, signal)
chosen: Any = ls.select(signal.finite, gradients, gradients)

manager: ls.LossScaleManager = ls.ExponentialUpdateLossScaleManager(
    8.0, 2, floor=0.5, at_floor="clamp"
)
fixed_manager: ls.LossScaleManager = ls.FixedLossScaleManager(8.0)
scale: Any = manager.get_loss_scale()
manager.update_loss_scale(True)

fixed: ls.LossScale = ls.FixedLossScale(8)
dynamic: ls.DynamicLossScale = ls.DynamicLossScale(
    8.0, increment_period=100, multiplier=2.0, floor=0.25
)
operation, should_apply = dynamic.update([tf.constant(1.0), None])
operation, should_apply = dynamic.update_from_finite(should_apply)
again: ls.DynamicLossScale = ls.DynamicLossScale.from_config(dynamic.get_config())
found: classic.LossScale | None = ls.get("dynamic")
period: int = dynamic.increment_period
floor: float = dynamic.floor

descent = tf.compat.v1.train.GradientDescentOptimizer(0.1)
optimizer = ls.LossScaleOptimizer(
    descent, dynamic, skip_nonfinite=True, count_skipped_steps=False
)
for identifier in (manager, fixed, 8, 8.0, "dynamic"):
    ls.LossScaleOptimizer(descent, loss_scale_manager=identifier)
mixed: ls.LossScaleOptimizer = ls.MixedPrecisionLossScaleOptimizer(
    descent, loss_scale=8, skip_nonfinite=False
)
held: classic.LossScaleManager | classic.LossScale = optimizer.loss_scale
pairs: list[tuple[Any, Any]] = optimizer.compute_gradients(lambda: loss, [])
optimizer.apply_gradients(pairs, global_step=None)
optimizer.minimize(lambda: loss, var_list=[])
unscaled: list[Any] = optimizer.get_unscaled_gradients(
    [optimizer.get_scaled_loss(loss)]
)


class Own(ls.LossScale):
    """A loss scale of one's own."""

    def __call__(self) -> Any:
        return tf.constant(8.0)

    def update(self, grads: Any) -> tuple[Any, bool]:
        return None, True

    def get_config(self) -> dict[str, Any]:
        return {}


own: ls.LossScale = Own()
ls.LossScaleOptimizer(descent, own)

by_policy: ls.LossScale = ls.PolicyLossScale(Fixed(8.0))
ls.LossScaleOptimizer(descent, Fixed(8.0))

ls.PolicyLossScale(8.0)  # type: ignore[arg-type]
ls.ExponentialUpdateLossScaleManager(8.0, 2, at_floor="floor")  # type: ignore[arg-type]
ls.ExponentialUpdateLossScaleManager(8.0)  # type: ignore[call-arg]
ls.LossScaleOptimizer(descent, loss_scale=8)
ls.LossScaleOptimizer(descent)  # type: ignore[call-overload]
ls.LossScaleOptimizer(descent, None)  # type: ignore[call-overload]
dynamic.multiplier = 3.0  # type: ignore[misc]
wrong: ScaleState = ls.init(Fixed)  # type: ignore[arg-type]
