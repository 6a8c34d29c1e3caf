"""The demonstration: its data, its arithmetic, and what it claims."""

import numpy as np
import pytest

from lossscale import Dynamic, Fixed
from lossscale.demo import compare, load_digits, network, train
from lossscale.errors import SettingError


def test_the_digits_are_all_there():
    digits = load_digits()
    assert (1437, 64) == digits.train_images.shape
    assert (360, 64) == digits.test_images.shape
    assert (0.0, 1.0) == (digits.train_images.min(), digits.train_images.max())
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert set(range(10)) == set(labels.tolist())


def test_the_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(0)
    weights = [3 * w.astype(np.float64) for w in network.initial_weights(rng, depth=3)]
    images, labels = rng.random((5, 64)), rng.integers(10, size=5)

    def loss(changed):
        """The same network written again, in float64."""
        hidden = images
        for weight in changed[:-1]:
            inner = hidden @ weight
            cubic = np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)
            hidden = 0.5 * inner * (1 + np.tanh(cubic))
        logits = hidden @ changed[-1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return -logs[np.arange(5), labels].mean()

    trace = network.forward(weights, images.astype(np.float32), np.float32)
    _, slope = network.cross_entropy(trace.logits, labels)
    gradients = network.backward(weights, trace, slope, np.float32)
    step = 1e-4
    for layer, gradient in enumerate(gradients):
        for _ in range(20):
            place = tuple(rng.integers(size) for size in gradient.shape)
            up, down = ([w.copy() for w in weights] for _ in range(2))
            up[layer][place] += step
            down[layer][place] -= step
            expected = (loss(up) - loss(down)) / (2 * step)
            assert expected == pytest.approx(gradient[place], rel=2e-3, abs=1e-7)


def test_everything_that_is_stored_is_float16():
    rng = np.random.default_rng(0)
    weights = network.initial_weights(rng)
    images, labels = rng.random((4, 64)).astype(np.float32), rng.integers(10, size=4)
    trace = network.forward(weights, images, np.float16)
    _, slope = network.cross_entropy(trace.logits, labels)
    gradients = network.backward(weights, trace, slope, np.float16)
    stored = [*trace.inputs, *trace.slopes, trace.logits, *gradients]
    assert {np.dtype(np.float16)} == {array.dtype for array in stored}


def test_weights_are_rounded_to_float16_before_use():
    rng = np.random.default_rng(0)
    exact = [w + np.float32(2.0**-13) for w in network.initial_weights(rng)]
    rounded = [w.astype(np.float16).astype(np.float32) for w in exact]
    images = rng.random((4, 64)).astype(np.float32)
    seed = rng.standard_normal((4, 10)).astype(np.float32)
    results = []
    for weights in (exact, rounded):
        trace = network.forward(weights, images, np.float16)
        gradients = network.backward(weights, trace, seed, np.float16)
        results.append([trace.logits.tolist(), *(g.tolist() for g in gradients)])
    assert results[0] == results[1]


def test_neither_weights_nor_momenta_move_on_a_skipped_step(monkeypatch):
    from lossscale.demo import muon

    seen = []
    original = muon.step

    def watch(weights, momenta, gradients, rate):
        seen.append([array.copy() for array in (*weights, *momenta)])
        return original(weights, momenta, gradients, rate)

    monkeypatch.setattr(muon, "step", watch)
    train("run", Fixed(2.0**126), np.float16, steps=3)
    for later in seen[1:]:
        for before, after in zip(seen[0], later, strict=True):
            assert np.array_equal(before, after)


@pytest.fixture(scope="module")
def runs():
    return compare()


def test_unscaled_float16_learns_nothing_because_every_gradient_is_lost(runs):
    _, unscaled, _, _ = runs
    assert 1.0 == unscaled.flushed
    assert unscaled.accuracy < 0.2


def test_scaled_float16_learns_as_float32_does(runs):
    single, _, fixed, dynamic = runs
    assert single.accuracy > 0.95
    # Over ten seeds float32 itself spreads from 97.5 to 99.4 %.
    for scaled in (fixed, dynamic):
        assert scaled.accuracy > single.accuracy - 0.03
        assert scaled.flushed < 0.05


def test_the_dynamic_scale_grows_overflows_and_recovers(runs):
    dynamic = runs[3]
    assert dynamic.skipped.any()
    changes = np.sign(np.diff(dynamic.scales))
    assert {-1.0, 0.0, 1.0} == set(changes.tolist())


def test_a_run_is_repeatable():
    first, second = (
        train("run", Dynamic(growth_interval=20), np.float16, steps=5, seed=3)
        for _ in range(2)
    )
    assert first.losses.tolist() == second.losses.tolist()


def test_an_absurd_scale_skips_and_never_breaks_the_weights():
    run = train("run", Fixed(2.0**126), np.float16, steps=10)
    assert run.skipped.all()
    assert np.isfinite(run.losses).all()


def test_no_steps_are_refused():
    with pytest.raises(SettingError, match="steps must be 1 or more"):
        train("run", Fixed(), np.float16, steps=0)
