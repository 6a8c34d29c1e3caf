"""The file of a recorded run: what it may hold, and what follows from it."""

import json

import numpy as np
import pytest

import lossscale.numpy as ls
from lossscale import Dynamic, presets
from lossscale.demo import load_digits, muon, network
from lossscale.diagnostics import read_recording, simulate
from lossscale.errors import StateError


def recording(*lines):
    return read_recording(lines, "steps.jsonl")


def test_flags_alone_are_replayed_at_every_scale():
    found = recording("true", '{"finite": false, "loss": 3.5}', "", "false")
    assert [True, False, False] == found.finite.tolist()
    assert np.isnan(found.magnitudes("float16")).all()
    assert (3, 0, 0) == (found.replayed, found.measured, found.bounded)


def test_a_magnitude_is_that_of_the_unscaled_gradients():
    found = recording('{"finite": true, "magnitude": 0.25, "scale": 65536}')
    assert [0.25] == found.magnitudes("float16").tolist()
    assert (0, 1, 0) == (found.replayed, found.measured, found.bounded)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 1024.0, 65536.0])
def test_an_overflow_with_its_scale_is_one_from_there_upwards(dtype, scale):
    found = recording(f'{{"finite": false, "scale": {scale}}}')
    assert (0, 0, 1) == (found.replayed, found.measured, found.bounded)
    below = float(np.nextafter(np.float32(scale), np.float32(0)))
    for first, skipped in ((scale, 1), (scale * 2, 1), (below, 0)):
        (result,) = simulate(
            [Dynamic(init_scale=first)],
            found.finite,
            magnitudes=found.magnitudes(dtype),
            dtype=dtype,
        )
        assert skipped == result.skipped


def test_the_magnitude_of_an_overflow_is_not_used():
    """What is measured there is the largest magnitude of those that are finite."""
    found = recording('{"finite": false, "magnitude": 1e-9}')
    assert np.isnan(found.magnitudes("float16")).all()
    assert (1, 0, 0) == (found.replayed, found.measured, found.bounded)


def train(policy, steps=300):
    """Train the demonstration's network in float16, and record every step."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    weights = network.initial_weights(rng)
    momenta = [np.zeros_like(weight) for weight in weights]
    state, lines = ls.init(policy), []
    for step in range(steps):
        rows = rng.integers(len(digits.train_labels), size=64)
        trace = network.forward(weights, digits.train_images[rows], np.float16)
        _, slope = network.cross_entropy(trace.logits, digits.train_labels[rows])
        scaled = network.backward(weights, trace, ls.scale(slope, state), np.float16)
        gradients, signal = ls.unscale(scaled, state, measure=["amax"])
        line = {"finite": bool(signal.finite), "scale": float(state.scale)}
        if signal.finite:
            line["magnitude"] = float(signal.amax / state.scale)
            rate = muon.RATE * (1 - step / steps)
            weights, momenta = muon.step(weights, momenta, gradients, rate)
        lines.append(json.dumps(line))
        state = ls.update(policy, state, signal)
    return lines, state


@pytest.mark.parametrize("name", ["megatron", "mindspore", "deepspeed"])
def test_the_record_of_one_policy_predicts_a_training_with_another(name):
    """Not exactly: gradients inside the network overflow before those of weights do."""
    recorded = read_recording(train(Dynamic(growth_interval=20))[0])
    policy = presets.get(name, growth_interval=20)
    lines, state = train(policy)
    skipped = int(np.count_nonzero(~read_recording(lines).finite))
    (predicted,) = simulate(
        [policy], recorded.finite, magnitudes=recorded.magnitudes("float16")
    )
    (replayed,) = simulate([policy], recorded.finite)
    assert 0.6 * skipped <= predicted.skipped <= 1.4 * skipped
    assert 0.25 <= predicted.final.scale / state.scale <= 4
    # The flags alone: twice to several times too few skips, and a scale to match.
    assert replayed.skipped < 0.6 * skipped or replayed.final.scale > 4 * state.scale


def test_an_unknown_magnitude_may_be_written_as_null():
    found = recording('{"finite": true, "magnitude": null, "scale": null}')
    assert (1, 0, 0) == (found.replayed, found.measured, found.bounded)


def test_a_byte_order_mark_is_read():
    assert [True] == recording("\ufefftrue\n").finite.tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1", "expected true, false or an object"),
        ('{"magnitude": 1.0}', "expected true, false or an object"),
        ("[", "expected true, false or an object"),
        ("[" * 100_000, "expected true, false or an object"),
        ('{"finite": true, "magnitude": -1}', "'magnitude' must be"),
        ('{"finite": true, "magnitude": true}', "'magnitude' must be"),
        ('{"finite": true, "magnitude": "1"}', "'magnitude' must be"),
        ('{"finite": true, "magnitude": Infinity}', "'magnitude' must be"),
        ('{"finite": true, "magnitude": NaN}', "'magnitude' must be"),
        ('{"finite": false, "scale": 0}', "'scale' must be"),
        ('{"finite": false, "scale": Infinity}', "'scale' must be"),
        ('{"finite": false, "scale": ' + "9" * 400 + "}", "'scale' must be"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line, message):
    with pytest.raises(StateError, match=rf"steps\.jsonl, line 2: .*{message}"):
        recording("true", line)


def test_a_file_without_a_step_is_refused():
    with pytest.raises(StateError, match=r"steps\.jsonl holds no step"):
        recording("", "\n")
