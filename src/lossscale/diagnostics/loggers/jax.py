# SPDX-License-Identifier: Apache-2.0
"""Record steps from inside `jit`, by a callback to the host."""

from typing import Any

from lossscale.core.state import ScaleState, Signal
from lossscale.diagnostics.loggers.packages import import_package
from lossscale.diagnostics.records.recorder import Recorder


def record_in_jit(
    recorder: Recorder,
    state: ScaleState,
    signal: Signal,
    *,
    step: Any = None,
    loss: Any = None,
    lr: Any = None,
    clip: Any = None,
) -> None:
    """Record a step from inside a function that JAX compiles.

    Every run of the compiled function sends a few numbers to the host, in order. After
    the last one call `jax.effects_barrier()`: JAX does not wait by itself. Outside of
    `jit`, `Recorder.record_signal` does the same without a callback.

    Args:
        recorder: Takes the step.
        state: The state that the step used: that before `update`.
        signal: What `unscale` or `value_and_grad` returned.
        step: Which step it is; by default one after the last.
        loss: The unscaled loss.
        lr: The learning rate.
        clip: The factor that clipping multiplied the gradients by.

    Raises:
        MissingPackageError: If JAX is not installed.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import jax, lossscale, lossscale.jax as ls
        >>> from lossscale.diagnostics import Recorder, read_run, record_in_jit
        >>> policy = lossscale.Dynamic()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "run.jsonl"
        ...     with Recorder(path) as recorder:
        ...         @jax.jit
        ...         def train(state, gradient):
        ...             _, signal = ls.unscale(gradient, state)
        ...             record_in_jit(recorder, state, signal)
        ...             return ls.update(policy, state, signal)
        ...         state = train(ls.init(policy), float("inf"))
        ...         jax.effects_barrier()
        ...     [step.cause for step in read_run(path).records()]
        ['inf']
    """
    jax = import_package("jax", "record_in_jit")

    def record(values: Any) -> None:
        # Arrays of one number that are on the host.
        given_step = values["step"]
        recorder.record_signal(
            ScaleState(*values["state"]),
            Signal(**values["signal"]),
            step=None if given_step is None else int(given_step),
            loss=values["loss"],
            lr=values["lr"],
            clip=values["clip"],
        )

    values = {
        "state": tuple(state[:3]),
        "signal": signal._asdict(),
        "step": step,
        "loss": loss,
        "lr": lr,
        "clip": clip,
    }
    jax.debug.callback(record, values, ordered=True)
