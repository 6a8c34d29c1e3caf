"""`CollapseAlarm`: the warning after many skipped steps in a row."""

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
FINITE = Signal(True, loss_finite=True, too_large=False)


def feed(alarm, signals):
    """Return the messages of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, signal in enumerate(signals):
            alarm(signal, 2.0**-number)
        alarm.flush()
    assert all(each.category is CollapseWarning for each in caught)
    return [str(each.message) for each in caught]


def test_it_warns_once_for_each_row_of_skipped_steps():
    rows = [*[OVERFLOW] * 7, FINITE, *[OVERFLOW] * 2, FINITE, *[OVERFLOW] * 3]
    first, second = feed(ls.CollapseAlarm(limit=3), rows)
    assert "3 steps in a row were skipped" in first
    assert "from 1 to 0.25" in first
    assert "Reasons: 3 overflow." in second


@pytest.mark.parametrize(
    ("signals", "reasons", "advice"),
    [
        ([LOSS] * 2, "2 loss not finite", "The loss itself"),
        ([LARGE] * 2, "2 gradient too large", "too large to be squared"),
        ([LARGE, OVERFLOW], "1 gradient too large, 1 overflow", "leaf_flags"),
        ([Signal(False)] * 2, "2 overflow", "leaf_flags"),
    ],
)
def test_its_advice_follows_from_the_reasons(signals, reasons, advice):
    (message,) = feed(ls.CollapseAlarm(limit=2), signals)
    assert f"Reasons: {reasons}." in message
    assert advice in message


def test_it_raises_with_on_collapse_raise():
    alarm = ls.CollapseAlarm(limit=2, on_collapse="raise")
    alarm(OVERFLOW, 8.0)
    with pytest.raises(CollapseError, match="2 steps in a row"):
        feed(alarm, [OVERFLOW])


def test_a_loop_that_donates_its_state_is_watched():
    policy = Dynamic(init_scale=8.0)
    alarm = ls.CollapseAlarm(limit=5)

    def step(state, weight):
        result = ls.value_and_grad(lambda w: w * jnp.inf, policy)(state, weight)
        return result.state, weight + 0, result.signal

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state, weight = ls.init(policy), jnp.float32(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            state, weight, signal = compiled(state, weight)
            alarm(signal, state.scale)
        alarm.flush()
    (warning,) = caught
    assert "5 loss not finite" in str(warning.message)
    assert 6 == alarm.consecutive_skips


def test_wrong_arguments_raise_errors_that_name_them():
    for settings in ({"limit": 0}, {"on_collapse": "print"}):
        with pytest.raises(LossScaleError, match=next(iter(settings))):
            ls.CollapseAlarm(**settings)
    with pytest.raises(GradientError, match="signal must be a Signal"):
        ls.CollapseAlarm()(False, 8.0)
