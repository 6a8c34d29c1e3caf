"""How the Keras adapter looks to a type checker; checked by mypy, never run.

Not `keras.py`: a checker would take that for the framework itself.
"""

from typing import Any

import keras

from lossscale import Dynamic, Explanation, Fixed, Policy, presets
from lossscale.keras import (
    LossScaleLogger,
    LossScaleOptimizer,
    StepReport,
    explain,
    find_scale,
)

inner: Any = keras.optimizers.Adam(1e-3)
optimizer: LossScaleOptimizer = LossScaleOptimizer(inner)
optimizer = LossScaleOptimizer(inner, 2.0**10, 100, "scaled")
optimizer = LossScaleOptimizer(inner, policy=Dynamic(hysteresis=2))
optimizer = LossScaleOptimizer(inner, name="fixed", policy=Fixed(8.0))
optimizer = LossScaleOptimizer(inner, policy=presets.get("torch"))
policy: Policy = optimizer.policy

report: StepReport = optimizer.last_step
skipped: Any = report.skipped
numbers: list[Any] = [*report]
loss: Any = optimizer.scale_loss(1.0)
loss = optimizer.stateless_scale_loss([1.0], loss)
loss = optimizer.get_scaled_loss(lambda: loss)
gradients: list[Any] = optimizer.get_unscaled_gradients([loss, None])
optimizer.apply(gradients)
optimizer.apply(gradients, trainable_variables=[loss, loss])
weights, variables = optimizer.stateless_apply([1.0], gradients, [1.0])
first: Any = weights[0]
config: dict[str, Any] = optimizer.get_config()
again: Any = LossScaleOptimizer.from_config(config)
taken: Any = LossScaleOptimizer.from_keras(again, policy=Fixed(8.0))

found: float = find_scale(loss, loss, sample_weight=loss)
seen: Explanation = explain(inner, [[1.0]], [[1.0]], scale=8.0)
explain(inner)  # type: ignore[call-arg]

callback: LossScaleLogger = LossScaleLogger(every=10, warn_after=5)

LossScaleOptimizer(inner, policy=8.0)  # type: ignore[arg-type]
LossScaleOptimizer(inner, "2")  # type: ignore[arg-type]
LossScaleOptimizer()  # type: ignore[call-arg]
LossScaleLogger(every=0.5)  # type: ignore[arg-type]
optimizer.stateless_apply([1.0], gradients)  # type: ignore[call-arg]
report.missing  # type: ignore[attr-defined]
