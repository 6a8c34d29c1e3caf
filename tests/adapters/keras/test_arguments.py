"""What the constructor takes, and what it refuses."""

import inspect
import math

import numpy as np
import pytest
from helpers.keras_backend import QUIET, keras

import lossscale
from lossscale import Dynamic, Fixed, ScaleState, presets
from lossscale.errors import LossScaleError, SettingError, SettingTypeError
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer


def sgd():
    return keras.optimizers.SGD(0.5)


def test_it_is_keras_optimizer():
    assert isinstance(LossScaleOptimizer(sgd()), Original)


def test_the_first_arguments_and_their_defaults_are_those_of_keras():
    expected = inspect.signature(Original.__init__).parameters
    ours = inspect.signature(LossScaleOptimizer.__init__).parameters
    names = [name for name in expected if name != "kwargs"]
    assert names == [name for name in ours if name in names]
    assert [expected[name].default for name in names] == [
        ours[name].default for name in names
    ]
    assert inspect.Parameter.KEYWORD_ONLY == ours["policy"].kind


def test_without_a_policy_it_has_the_numbers_of_keras_and_bounds():
    policy = LossScaleOptimizer(sgd(), 8.0, 3).policy
    assert presets.get("keras", init_scale=8.0, growth_interval=3) == policy
    assert 2.0**-126 == policy.min_scale
    assert math.isfinite(policy.max_scale)


@pytest.mark.parametrize(
    "policy",
    [Fixed(8.0), Dynamic(hysteresis=3), presets.get("megatron")],
    ids=["fixed", "dynamic", "preset"],
)
def test_a_policy_decides_where_the_scale_starts(policy):
    optimizer = LossScaleOptimizer(sgd(), policy=policy)
    assert policy is optimizer.policy
    assert policy.init().scale == optimizer.initial_scale
    optimizer.build([keras.Variable([1.0])])
    assert policy.init().scale == float(optimizer.dynamic_scale.value)


def test_an_inner_static_scale_is_disabled():
    inner = keras.optimizers.SGD(0.5, loss_scale_factor=100.0)
    LossScaleOptimizer(inner)
    assert inner.loss_scale_factor is None


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e39, 2.0**-127])
def test_a_first_scale_of_no_use_is_an_error(scale):
    with pytest.raises(SettingError, match="initial_scale must be a positive float32"):
        LossScaleOptimizer(sgd(), initial_scale=scale)


@pytest.mark.parametrize("scale", ["4", None, True, [2.0]])
def test_a_first_scale_that_is_no_number_is_an_error(scale):
    with pytest.raises(SettingTypeError, match="initial_scale"):
        LossScaleOptimizer(sgd(), initial_scale=scale)


@pytest.mark.parametrize("steps", [0, -3, 2**31])
def test_a_growth_interval_out_of_range_is_an_error(steps):
    with pytest.raises(SettingError, match="dynamic_growth_steps"):
        LossScaleOptimizer(sgd(), dynamic_growth_steps=steps)


@pytest.mark.parametrize("steps", [2.5, "2", None])
def test_a_growth_interval_that_is_no_whole_number_is_an_error(steps):
    with pytest.raises(SettingTypeError, match="dynamic_growth_steps"):
        LossScaleOptimizer(sgd(), dynamic_growth_steps=steps)


def test_a_whole_float_counts_steps_as_in_keras():
    assert 2 == LossScaleOptimizer(sgd(), 1.0, 2.0).dynamic_growth_steps


def test_numbers_of_numpy_are_numbers():
    optimizer = LossScaleOptimizer(sgd(), np.float32(8.0), np.int64(3))
    assert (8.0, 3) == (optimizer.initial_scale, optimizer.dynamic_growth_steps)


@pytest.mark.parametrize(
    "numbers", [{"initial_scale": 8.0}, {"dynamic_growth_steps": 3}]
)
def test_a_policy_beside_the_numbers_of_keras_is_an_error(numbers):
    with pytest.raises(SettingError, match="Pass one or the other"):
        LossScaleOptimizer(sgd(), policy=Dynamic(), **numbers)


def test_only_what_was_given_beside_a_policy_is_named():
    words = r"^initial_scale=8\.0 was given together"
    with pytest.raises(SettingError, match=words) as caught:
        LossScaleOptimizer(sgd(), initial_scale=8.0, policy=Fixed(4.0))
    assert "dynamic_growth_steps" not in str(caught.value)
    words = r"^initial_scale=8\.0 and dynamic_growth_steps=3 were given together"
    with pytest.raises(SettingError, match=words):
        LossScaleOptimizer(sgd(), 8.0, 3, policy=Fixed(4.0))


@pytest.mark.parametrize("policy", [Dynamic(), Fixed(8.0)])
def test_a_policy_in_the_place_of_the_scale_is_an_error_that_says_where(policy):
    words = rf"Pass policy={type(policy).__name__}\(\.\.\.\)\.$"
    with pytest.raises(SettingTypeError, match=words):
        LossScaleOptimizer(sgd(), policy)


def test_a_preset_is_not_its_policy():
    preset = presets.PRESETS["torch"]
    with pytest.raises(SettingTypeError, match=r"Pass the \.policy of the Preset\."):
        LossScaleOptimizer(sgd(), policy=preset)
    LossScaleOptimizer(sgd(), policy=preset.policy)


@pytest.mark.parametrize("policy", ["torch", 1024.0, Dynamic, object()])
def test_what_is_no_policy_is_an_error(policy):
    with pytest.raises(SettingTypeError, match=r"such as lossscale\.Dynamic"):
        LossScaleOptimizer(sgd(), policy=policy)


def test_a_policy_that_starts_at_zero_is_an_error():
    class Zero:
        def init(self):
            return ScaleState(0.0, 0, 0)

        def step(self, state, signal, *, where):
            return state

    with pytest.raises(SettingError, match="first state of the policy"):
        LossScaleOptimizer(sgd(), policy=Zero())


@pytest.mark.parametrize("inner", ["sgd", 1, None])
def test_what_is_no_optimizer_is_an_error(inner):
    with pytest.raises(SettingTypeError, match=r"keras\.optimizers\.Adam\(1e-3\)"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("wrapper", [Original, LossScaleOptimizer])
def test_scaling_twice_is_an_error(wrapper):
    with pytest.raises(SettingTypeError, match="scaled twice"):
        LossScaleOptimizer(wrapper(sgd()))


def test_dynamic_false_is_an_error_that_names_fixed_and_what_keras_advises():
    LossScaleOptimizer(sgd(), dynamic=True)
    # Keras's own test expects its advice in the message.
    for advice in (r"policy=lossscale\.Fixed", "set `loss_scale_factor`"):
        with pytest.raises(SettingError, match=advice):
            LossScaleOptimizer(sgd(), dynamic=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_decay", 0.5),
        ("clipnorm", 0.5),
        ("global_clipnorm", 0.5),
        ("clipvalue", 0.5),
        ("use_ema", True),
        ("ema_momentum", 0.5),
        ("ema_overwrite_frequency", 2),
        ("loss_scale_factor", 0.5),
        ("gradient_accumulation_steps", 2),
    ],
)
def test_arguments_of_the_inner_optimizer_belong_there(name, value):
    with pytest.raises(ValueError, match=f"set `{name}` on the `inner_optimizer`"):
        LossScaleOptimizer(sgd(), **{name: value})


def test_unknown_arguments_are_an_error():
    with pytest.raises(ValueError, match="arguments: `foo`, `bar`"):
        LossScaleOptimizer(sgd(), foo=True, bar=3)


@pytest.mark.parametrize("name", ["inital_scale", "init_scale", "initial_scales"])
def test_a_keyword_that_is_misspelt_is_an_error_that_names_it(name):
    with pytest.raises(SettingError, match="Did you mean 'initial_scale'") as caught:
        LossScaleOptimizer(sgd(), **{name: 8.0})
    assert f"`{name}`" in str(caught.value)


def test_every_error_is_one_of_lossscale():
    for wrong in ({"initial_scale": -1.0}, {"foo": 1}, {"policy": 3}):
        with pytest.raises(LossScaleError):
            LossScaleOptimizer(sgd(), **wrong)
    assert issubclass(SettingError, ValueError)
    assert lossscale.errors.SettingError is SettingError
