# SPDX-License-Identifier: Apache-2.0
"""The first 100 steps of an example with another policy, for benchmarks/start.py.

    python benchmarks/start_examples.py train_jax.py 2**32 auto

prints lost updates, how often a batch was computed again (-1 if the example does not
say) and the last scale, as JSON. Each example runs its own training loop, cut short;
TensorFlow and Triton do not share a process, so each has one of its own.
"""

import builtins
import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from lossscale import AutoStart, Dynamic

STEPS = 100

STARTS = {
    "train_torch.py": ("dynamic", "auto", "auto, retried"),
    "train_jax.py": ("dynamic", "auto", "all retried"),
    "train_optax.py": ("dynamic", "auto"),
    "train_tensorflow.py": ("dynamic", "auto"),
    "train_keras.py": ("dynamic", "auto"),
}
"""What can be tried without another training loop."""


def main() -> None:
    name, scale, start = sys.argv[1:]
    base, _, exponent = scale.partition("**")
    rule = Dynamic(init_scale=float(base) ** float(exponent or 1))
    policy = rule if start == "dynamic" else AutoStart(rule)
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    example: Any = importlib.import_module(name.removesuffix(".py"))
    example.range = lambda count: builtins.range(min(count, STEPS))
    run = globals()[f"run_{name.removeprefix('train_').removesuffix('.py')}"]
    print(json.dumps(run(example, policy, start)))


def run_torch(example: Any, policy: Any, start: str) -> tuple[int, int, float]:
    """Run the loop of train_torch.py; `attempts` goes around its step."""
    import torch

    from lossscale.torch import GradScaler

    scaler = GradScaler(example.DEVICE, policy=policy)
    run = example.make_run(scaled=True)._replace(scaler=scaler)
    random = torch.Generator().manual_seed(0)
    updates = attempts = 0
    for _ in range(STEPS):
        rows = torch.randint(
            len(example.DIGITS.train_labels), (example.BATCH_SIZE,), generator=random
        ).to(example.DEVICE)
        images = example.DIGITS.train_images[rows]
        labels = example.DIGITS.train_labels[rows]
        for attempt in scaler.attempts() if start == "auto, retried" else (1,):
            attempts += attempt > 1
            loss = example.compute_loss(run.model, images, labels, half=True)
            example.train_step(run, loss)
        updates += bool(scaler.last_step.applied)
    return STEPS - updates, attempts, scaler.get_scale()


def run_jax(example: Any, policy: Any, start: str) -> tuple[int, int, float]:
    """Run train_jax.py; it counts skipped steps of all that it was to take."""
    import jax.numpy as jnp

    import lossscale.jax as ls

    if start == "all retried":
        plain = ls.value_and_grad

        def with_retries(function: Any, policy: Any) -> Any:
            step = ls.with_retries(plain(function, policy), retries=policy.tries)
            return lambda *arguments: step(*arguments)[:4]

        ls.value_and_grad = with_retries
    example.INFINITE_STEP = -1
    skipped, scale = _read_line(lambda: example.run("run", jnp.float16, policy))
    return skipped - (example.STEPS - STEPS), -1 if start != "dynamic" else 0, scale


def run_optax(example: Any, policy: Any, start: str) -> tuple[int, int, float]:
    """Run train_optax.py."""
    del start
    import jax.numpy as jnp

    example.INFINITE_STEP = -1
    skipped, scale = _read_line(lambda: example.run("run", jnp.float16, policy))
    return skipped, 0, scale


def run_tensorflow(example: Any, policy: Any, start: str) -> tuple[int, int, float]:
    """Run train_tensorflow.py."""
    del start
    import lossscale.tensorflow as ls

    _, skipped, scale = example.train("float16", ls.PolicyLossScale(policy))
    return skipped - (example.STEPS - STEPS), 0, scale


def run_keras(example: Any, policy: Any, start: str) -> tuple[int, int, float]:
    """Run train_keras.py, stopped after so many batches."""
    del start
    import keras

    from lossscale.keras import LossScaleOptimizer

    class Stop(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            self.batches += 1
            self.model.stop_training = self.batches >= STEPS
            if self.batches == STEPS:
                optimizer = self.model.optimizer
                self.found = (
                    int(optimizer.last_step.skipped_steps),
                    0,
                    float(optimizer.dynamic_scale),
                )

    stop = Stop()
    optimizer = LossScaleOptimizer(example.muon(), policy=policy)
    example.train("mixed_float16", optimizer, [stop])
    return stop.found


def _read_line(run: Any) -> tuple[int, float]:
    """Return the skipped steps and the scale that an example prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run()
    found = re.search(r"skipped (\d+) scale ([\d,]+)", text.getvalue())
    return int(found[1]), float(found[2].replace(",", ""))


if __name__ == "__main__":
    main()
