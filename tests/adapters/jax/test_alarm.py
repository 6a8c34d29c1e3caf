"""The warning of a training that has come to a halt."""

import warnings

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Signal  # noqa: E402
from lossscale.errors import (  # noqa: E402
    CollapseError,
    CollapseWarning,
    GradientError,
    LossScaleError,
)

OVERFLOW = Signal(False, loss_finite=True, too_large=False)
LARGE = Signal(False, loss_finite=True, too_large=True)
LOSS = Signal(False, loss_finite=False, too_large=False)
GOOD = Signal(True, loss_finite=True, too_large=False)


def feed(alarm, signals):
    """Return the messages of all warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number, signal in enumerate(signals):
            alarm(signal, 2.0**-number)
        alarm.flush()
    assert all(each.category is CollapseWarning for each in seen)
    return [str(each.message) for each in seen]


def test_it_warns_once_for_each_row_of_skipped_steps():
    rows = [*[OVERFLOW] * 7, GOOD, *[OVERFLOW] * 2, GOOD, *[OVERFLOW] * 3]
    first, second = feed(ls.CollapseAlarm(limit=3), rows)
    assert "3 steps in a row were skipped" in first
    assert "from 1 to 0.25" in first
    assert "Reasons: 3 overflow." in second


@pytest.mark.parametrize(
    ("signals", "reasons", "advice"),
    [
        ([LOSS] * 2, "2 loss not finite", "The loss itself"),
        ([LARGE] * 2, "2 gradient too large", "cannot be squared"),
        ([LARGE, OVERFLOW], "1 gradient too large, 1 overflow", "leaf_flags"),
        ([Signal(False)] * 2, "2 overflow", "leaf_flags"),
    ],
)
def test_its_advice_follows_from_what_was_seen(signals, reasons, advice):
    (message,) = feed(ls.CollapseAlarm(limit=2), signals)
    assert f"Reasons: {reasons}." in message
    assert advice in message


def test_it_raises_if_it_is_asked_to():
    alarm = ls.CollapseAlarm(limit=2, on_collapse="raise")
    alarm(OVERFLOW, 8.0)
    with pytest.raises(CollapseError, match="2 steps in a row"):
        feed(alarm, [OVERFLOW])


def test_a_loop_that_donates_its_state_is_watched():
    policy = Dynamic(init_scale=8.0)
    alarm = ls.CollapseAlarm(limit=5)

    def step(state, weight):
        found = ls.value_and_grad(lambda w: w * jnp.inf, policy)(state, weight)
        return found.state, weight + 0, found.signal

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state, weight = ls.init(policy), jnp.float32(1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(6):
            state, weight, signal = compiled(state, weight)
            alarm(signal, state.scale)
        alarm.flush()
    (warning,) = seen
    assert "5 loss not finite" in str(warning.message)
    assert 6 == alarm.skipped_in_a_row


def test_wrong_arguments_are_named():
    for settings in ({"limit": 0}, {"on_collapse": "print"}):
        with pytest.raises(LossScaleError, match=next(iter(settings))):
            ls.CollapseAlarm(**settings)
    with pytest.raises(GradientError, match="signal must be a Signal"):
        ls.CollapseAlarm()(False, 8.0)
