"""Settings are checked at construction, with one clear error each."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from lossscale import Dynamic, Fixed, Policy, ScaleState, presets
from lossscale.errors import LossScaleError, SettingError, SettingTypeError

WRONG = [
    ("init_scale", 0.0, "positive"),
    ("init_scale", -1.0, "positive"),
    ("init_scale", math.nan, "positive"),
    ("init_scale", math.inf, "positive"),
    ("init_scale", 1e39, "positive"),
    ("init_scale", 10**400, "positive"),
    ("init_scale", 1e-39, "positive"),
    ("init_scale", True, "positive"),
    ("init_scale", "8", "positive"),
    ("init_scale", None, "positive"),
    ("growth_factor", 1.0, "above 1"),
    ("growth_factor", 0.5, "above 1"),
    ("growth_factor", 1.00000001, "above 1"),
    ("growth_factor", -2.0, "above 1"),
    ("growth_factor", math.nan, "above 1"),
    ("growth_factor", math.inf, "above 1"),
    ("growth_factor", True, "above 1"),
    ("backoff_factor", 1.0, "below 1"),
    ("backoff_factor", 0.99999999, "below 1"),
    ("backoff_factor", 2.0, "below 1"),
    ("backoff_factor", 0.0, "above 0"),
    ("backoff_factor", 1e-50, "above 0"),
    ("backoff_factor", -0.5, "above 0"),
    ("backoff_factor", math.nan, "above 0"),
    ("backoff_factor", False, "above 0"),
    ("backoff_divisor", 1.0, "above 1"),
    ("backoff_divisor", 0.5, "above 1"),
    ("backoff_divisor", math.inf, "above 1"),
    ("growth_interval", 0, "1 or more"),
    ("growth_interval", -5, "1 or more"),
    ("growth_interval", 2.0, "whole number"),
    ("growth_interval", 2.5, "whole number"),
    ("growth_interval", math.nan, "whole number"),
    ("growth_interval", "100", "whole number"),
    ("growth_interval", True, "whole number"),
    ("growth_interval", 2**31, "2**31"),
    ("growth_interval", 2**31 - 1, "2**31"),
    ("hysteresis", 0, "1 or more"),
    ("hysteresis", -1, "1 or more"),
    ("hysteresis", 1.5, "whole number"),
    ("hysteresis", False, "whole number"),
    ("min_scale", 0.0, "positive"),
    ("min_scale", -1.0, "positive"),
    ("min_scale", math.nan, "positive"),
    ("min_scale", math.inf, "positive"),
    ("min_scale", True, "positive"),
    ("max_scale", math.inf, "positive"),
    ("max_scale", math.nan, "positive"),
    ("max_scale", 0, "positive"),
    ("at_min", "floor", "'clamp' or 'hold'"),
    ("at_min", True, "'clamp' or 'hold'"),
    ("at_max", None, "'hold' or 'clamp'"),
    ("growth_delay", "sometimes", "'never' or 'first' or 'always'"),
    ("growth_delay", False, "'never' or 'first' or 'always'"),
    ("consecutive_overflows", 1, "True or False"),
    ("consecutive_overflows", "yes", "True or False"),
    ("backoff_resets_hysteresis", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    name, value, allowed
):
    with pytest.raises((SettingError, SettingTypeError)) as caught:
        Dynamic(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert repr(value)[:30] in message or "integer of" in message
    assert allowed in message


@pytest.mark.parametrize("value", [0, -2.0, math.nan, math.inf, True, "8", None, 1e39])
def test_a_wrong_fixed_scale_is_refused(value):
    with pytest.raises(LossScaleError, match=r"^scale must be .* got"):
        Fixed(value)


def test_crossed_bounds_are_refused():
    with pytest.raises(SettingError, match=r"min_scale=8\.0 is above max_scale=4\.0"):
        Dynamic(min_scale=8.0, max_scale=4.0)


@pytest.mark.parametrize("first", [0.5, 32.0])
def test_a_first_scale_outside_the_bounds_is_refused(first):
    with pytest.raises(SettingError, match=r"init_scale=.* must lie between"):
        Dynamic(init_scale=first, min_scale=1.0, max_scale=16.0)


def test_a_default_outside_the_bounds_is_called_the_default():
    words = r"init_scale=65536.0 \(the default\) .* Pass init_scale too, .*=4096.0\."
    with pytest.raises(SettingError, match=words):
        Dynamic(max_scale=4096.0)
    with pytest.raises(SettingError, match=r"^init_scale=8.0 must .*=16.0\.$"):
        Dynamic(init_scale=8.0, min_scale=16.0)


def test_a_count_says_what_it_counts():
    with pytest.raises(SettingError, match="a whole number of overflows, 1 or more"):
        Dynamic(hysteresis=0)
    with pytest.raises(SettingError, match="a whole number of steps, 1 or more"):
        Dynamic(growth_interval=0)


def test_two_ways_to_back_off_are_refused():
    with pytest.raises(SettingError, match="give one of them"):
        Dynamic(backoff_factor=0.5, backoff_divisor=2.0)


def test_settings_become_plain_python_numbers():
    policy = Dynamic(init_scale=np.float32(8), growth_interval=np.int64(3))
    assert Dynamic(init_scale=8.0, growth_interval=3) == policy
    assert (float, int) == (type(policy.init_scale), type(policy.growth_interval))


def test_policies_are_hashable_picklable_and_frozen():
    policy = Dynamic(growth_interval=7)
    assert policy.settings  # cached, and not a part of what is compared
    assert policy == pickle.loads(pickle.dumps(policy))  # noqa: S301  # our own bytes
    assert hash(policy) == hash(Dynamic(growth_interval=7))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.growth_interval = 8


@dataclasses.dataclass(frozen=True)
class OfOnesOwn:
    def init(self):
        return ScaleState(1.0, 0, 0)

    def step(self, state, signal, *, where):
        return state


def test_anything_with_the_two_methods_is_a_policy():
    for policy in (Fixed(), Dynamic(), OfOnesOwn()):
        assert isinstance(policy, Policy)
    assert not isinstance(object(), Policy)


def test_dividing_by_three_is_exact_and_multiplying_by_a_third_is_not():
    from helpers.traces import replay

    by_division = Dynamic(growth_factor=3.0, backoff_divisor=3.0)
    by_factor = Dynamic(growth_factor=3.0, backoff_factor=1 / 3)
    scales = np.random.default_rng(0).uniform(1, 2, 200).astype(np.float32)
    expected = [float(scale / np.float32(3)) for scale in scales]
    starts = [ScaleState(float(scale), 0, 0) for scale in scales]
    divided = [replay(by_division, [False], start)[0].scale for start in starts]
    multiplied = [replay(by_factor, [False], start)[0].scale for start in starts]
    assert expected == divided
    assert expected != multiplied


def test_settings_reach_the_rule_rounded_to_float32():
    settings = Dynamic(growth_factor=1.7, backoff_factor=0.8, min_scale=0.1).settings
    assert float(np.float32(1.7)) == settings.growth_factor
    assert float(np.float32(0.8)) == settings.backoff
    assert float(np.float32(0.1)) == settings.min_scale


def test_a_preset_with_one_multiplier_keeps_one():
    policy = presets.get("tensorflow", growth_factor=3.0)
    assert 3.0 == policy.backoff_divisor
    assert 0.5 == presets.get("torch", growth_factor=3.0).backoff_factor


@pytest.mark.parametrize("start", [math.inf, math.nan])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_broken_scale_of_a_foreign_checkpoint_comes_back_at_an_overflow(name, start):
    import lossscale.numpy as ls
    from lossscale import Signal

    policy = presets.get(name)
    state = ls.init(policy)._replace(scale=np.float32(start))
    for _ in range(policy.hysteresis):
        state = ls.update(policy, state, Signal(finite=False))
    assert policy.min_scale <= state.scale <= policy.max_scale


def test_presets_take_other_settings():
    policy = presets.get("jmp", backoff_factor=0.25, min_scale=0.5)
    assert (None, 0.25, 0.5) == (
        policy.backoff_divisor,
        policy.backoff_factor,
        policy.min_scale,
    )


def test_an_unknown_preset_or_setting_is_named_with_those_there_are():
    with pytest.raises(SettingError, match=r"no preset 'pytorch'; there are torch"):
        presets.get("pytorch")
    with pytest.raises(SettingError, match=r"no setting 'interval'; its settings are"):
        presets.get("torch", interval=3)


def test_every_preset_says_where_its_facts_come_from():
    for name, preset in presets.PRESETS.items():
        assert name == preset.name
        assert preset.source.endswith(".")
        assert preset.differs.endswith(".")


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("loss_finite", [None, False, True])
def test_only_a_loss_that_was_checked_and_is_not_finite_holds_if_asked(
    hold, loss_finite
):
    from lossscale import Signal

    policy = Dynamic(init_scale=8.0, hysteresis=1, hold_on_nonfinite_loss=hold)
    state = ScaleState(8.0, 3, 0)
    signal = Signal(finite=False, loss_finite=loss_finite)
    pick = lambda condition, first, second: first if condition else second  # noqa: E731
    held = hold and loss_finite is False
    expected = state if held else ScaleState(4.0, 0, 0)
    assert expected == policy.step(state, signal, where=pick)
