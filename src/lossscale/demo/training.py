# SPDX-License-Identifier: Apache-2.0
"""Train the network four ways and record what happened.

Every run of one seed starts from the same weights and sees the same batches, so number
format and scale are all that differs. A run is a pure function of its arguments, up to
the rounding of the installed BLAS. Imports NumPy and `lossscale.numpy` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

import lossscale.numpy as ls
from lossscale.core.policies import Dynamic, Fixed, Policy, wanted_measurements
from lossscale.demo import muon, network
from lossscale.demo.data import Digits, load_digits
from lossscale.errors import SettingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lossscale.core.state import ScaleState, Signal

STEPS = 300
BATCH = 64
# Measured: 2**4 to 2**16 train alike, 2**2 never starts, 2**20 skips most steps.
FIXED_SCALE = 2.0**12
GROWTH_INTERVAL = 20

_PROBE_INTERVAL = 25
_FINAL_STEPS = 20


class Step(NamedTuple):
    """What a finished step did."""

    run: str
    """The name of the run."""
    number: int
    """Which step it is, counted from 1."""
    loss: float
    """The unscaled loss."""
    rate: float
    """The learning rate."""
    policy: Policy
    """What moves the scale."""
    state: ScaleState
    """The state whose scale was used."""
    signal: Signal
    """What unscaling found, its measurements included."""
    gradients: list[network.Array]
    """The gradients as stored: scaled, in the run's format; one per layer."""


OnStep: TypeAlias = Callable[[Step], object]
"""Called with every finished step."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one training run did."""

    name: str
    """What to call the run."""

    losses: NDArray[np.float32]
    """Unscaled training loss of each step."""

    scales: NDArray[np.float32]
    """Scale that each step used."""

    skipped: NDArray[np.bool_]
    """Whether each step overflowed and left the weights alone."""

    accuracy: float
    """Fraction of test images classified correctly, in the run's own number format."""

    flushed: float
    """Fraction of weight-gradient entries lost to underflow.

    Of the entries that float32 finds non-zero, from the same weights and batch, the
    fraction that the run itself found to be exactly zero; over every 25th step.
    """

    final_scale: float
    """Scale that the next step would have used."""

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last 20 steps."""
        return float(np.mean(self.losses[-_FINAL_STEPS:]))


def compare(
    steps: int = STEPS,
    seed: int = 0,
    policy: Policy | None = None,
    on_step: OnStep | None = None,
) -> list[Run]:
    """Train in float32, and in float16 without, with a fixed and with a given scale.

    Args:
        steps: Number of batches for each run.
        seed: Chooses initial weights and batches.
        policy: What moves the scale of the fourth run; by default `Dynamic` with a
            growth interval short enough to see the scale rise, overflow and fall.
        on_step: Called after every step.

    Returns:
        Four runs, in the order above.

    Example:
        >>> from lossscale.demo import compare
        >>> runs = compare(steps=2)
        >>> [run.name for run in runs][:2]
        ['float32', 'float16, no scaling']
    """
    if policy is None:
        policy = Dynamic(growth_interval=GROWTH_INTERVAL)
    half, single = np.float16, np.float32
    plans: list[tuple[str, Policy, network.Format]] = [
        ("float32", Fixed(1.0), single),
        ("float16, no scaling", Fixed(1.0), half),
        ("float16, fixed scale", Fixed(FIXED_SCALE), half),
        ("float16, dynamic scale", policy, half),
    ]
    return [
        train(name, chosen, number, steps=steps, seed=seed, on_step=on_step)
        for name, chosen, number in plans
    ]


def train(
    name: str,
    policy: Policy,
    number: network.Format,
    *,
    steps: int = STEPS,
    seed: int = 0,
    depth: int = network.DEPTH,
    on_step: OnStep | None = None,
) -> Run:
    """Train once.

    Args:
        name: What to call the run.
        policy: What moves the scale.
        number: Format of weights, activations and gradients; master weights, momenta
            and the unscaling stay in float32.
        steps: Number of batches; the rate falls linearly to zero over them.
        seed: Chooses initial weights and batches.
        depth: Number of linear layers.
        on_step: Called after every step.

    Returns:
        The record of the run.

    Raises:
        SettingError: If `steps` is below 1.
    """
    if steps < 1:
        message = f"steps must be 1 or more, got {steps}."
        raise SettingError(message)
    digits = load_digits()
    generator = np.random.default_rng(seed)
    weights = network.initial_weights(generator, depth)
    momenta = [np.zeros_like(weight) for weight in weights]
    state = ls.init(policy)
    losses = np.zeros(steps, np.float32)
    scales = np.zeros(steps, np.float32)
    skipped = np.zeros(steps, np.bool_)
    flushed_count = probed_count = 0
    measured = wanted_measurements(policy)
    if on_step is not None:
        measured = ("nan", "amax", "norm")

    for step in range(steps):
        chosen = generator.integers(len(digits.train_labels), size=BATCH)
        images, labels = digits.train_images[chosen], digits.train_labels[chosen]

        trace = network.forward(weights, images, number)
        losses[step], slope = network.cross_entropy(trace.logits, labels)
        seed_gradient = slope * ls.scale(np.float32(1), state)
        stored = network.backward(weights, trace, seed_gradient, number)
        gradients, signal = ls.unscale(stored, state, measure=measured)

        rate = muon.RATE * (1 - step / steps)
        proposed = muon.step(weights, momenta, gradients, rate)
        scales[step], skipped[step] = state.scale, not signal.finite
        if on_step is not None:
            loss = float(losses[step])
            on_step(Step(name, step + 1, loss, rate, policy, state, signal, stored))
        if step % _PROBE_INTERVAL == 0:
            exact = _exact_gradients(weights, images, labels)
            flushed_count += _count_flushed(stored, exact)
            probed_count += sum(int(np.count_nonzero(gradient)) for gradient in exact)

        weights, momenta = ls.select(signal.finite, proposed, (weights, momenta))
        state = ls.update(policy, state, signal)

    return Run(
        name=name,
        losses=losses,
        scales=scales,
        skipped=skipped,
        accuracy=_accuracy(weights, digits, number),
        flushed=flushed_count / max(1, probed_count),
        final_scale=float(state.scale),
    )


def _exact_gradients(
    weights: list[network.Array], images: network.Array, labels: network.Labels
) -> list[network.Array]:
    """Compute the same gradients in float32, without a scale."""
    trace = network.forward(weights, images, np.float32)
    _, slope = network.cross_entropy(trace.logits, labels)
    return network.backward(weights, trace, slope, np.float32)


def _count_flushed(stored: list[network.Array], exact: list[network.Array]) -> int:
    """Count entries that are zero in `stored` and not in `exact`."""
    return sum(
        int(np.count_nonzero((ours == 0) & (theirs != 0)))
        for ours, theirs in zip(stored, exact, strict=True)
    )


def _accuracy(
    weights: list[network.Array], digits: Digits, number: network.Format
) -> float:
    """Classify the test images in the run's own format."""
    logits = network.forward(weights, digits.test_images, number).logits
    return float(np.mean(logits.argmax(axis=1) == digits.test_labels))
