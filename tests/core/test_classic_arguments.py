"""Constructor arguments and odd inputs, against the recorded originals.

`cases.*.jsonl` record what the originals made of each input. Ours must do the same,
but for the differences listed here, which are those of the compatibility page.
"""

import copy
import math
import re

import numpy as np
import pytest
from helpers.traces import read

import lossscale.numpy as ls
from lossscale.errors import LossScaleError

CASES = read("tensorflow/cases.tf1.15.5.eager") + read(
    "tensorflow/cases.tf2.21.0.eager"
)


def value_of(tagged):
    """Return the Python value that a type-tagged input represents."""
    ((kind, value),) = tagged.items()
    if kind in {"int", "bool", "str"}:
        return value
    if kind in {"float", "py"}:
        return float(value)
    if kind == "none":
        return None
    if kind.startswith("np."):
        return getattr(np, kind[3:])(value)
    raise LookupError(kind)


def gradients_of(tagged):
    """Return nested NumPy gradients; LookupError for what only TensorFlow has."""
    if "tensor" in tagged:
        values = np.asarray(tagged["tensor"], dtype=object)
        numbers = np.vectorize(float, otypes=[float])(values) if values.size else values
        return numbers.astype(tagged["dtype"])
    if "list" in tagged:
        return [gradients_of(item) for item in tagged["list"]]
    if "tuple" in tagged:
        return tuple(gradients_of(item) for item in tagged["tuple"])
    if "dict" in tagged:
        return {key: gradients_of(item) for key, item in tagged["dict"].items()}
    return value_of(tagged)


MAKERS = {
    "FixedLossScaleManager(loss_scale)": ls.FixedLossScaleManager,
    "ExponentialUpdateLossScaleManager(init_loss_scale, 2)": (
        lambda value: ls.ExponentialUpdateLossScaleManager(value, 2)
    ),
    "FixedLossScale(loss_scale_value)": ls.FixedLossScale,
    "DynamicLossScale(initial_loss_scale, 2, 2)": (
        lambda value: ls.DynamicLossScale(value, 2, 2)
    ),
    "DynamicLossScale(8, increment_period, 2)": (
        lambda value: ls.DynamicLossScale(8, value, 2)
    ),
    "DynamicLossScale(8, 2, multiplier)": lambda value: ls.DynamicLossScale(
        8, 2, value
    ),
    "get(identifier)": ls.get,
}


def refused_by_ours(kind, value):
    """Whether the original takes an input that ours refuses on purpose."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    if kind == "DynamicLossScale(8, increment_period, 2)":
        return False
    if kind == "DynamicLossScale(8, 2, multiplier)":
        return not 1 < number < math.inf
    return not number > 0 or number > float(np.finfo(np.float32).max)


def constructor_cases():
    return [case for case in CASES if case["kind"] in MAKERS]


def test_there_are_enough_cases():
    assert len(constructor_cases()) > 120
    assert len({case["kind"] for case in constructor_cases()}) == len(MAKERS)


@pytest.mark.parametrize(
    "case", constructor_cases(), ids=lambda case: f"{case['kind']} {case['input']}"
)
def test_a_constructor_takes_what_the_original_takes(case):  # noqa: C901
    try:
        value = value_of(case["input"])
    except LookupError as error:
        pytest.skip(f"NumPy has no {error} to pass to {case['kind']}")
    make, result = MAKERS[case["kind"]], case["result"]
    if "raises" in result:
        expected = {"ValueError": ValueError, "TypeError": TypeError}
        name = result["raises"].rpartition(".")[2]
        if value is None and case["kind"].startswith("Exponential"):
            name = "TypeError"  # ValueError in the original; a row of the page
        with pytest.raises(expected.get(name, (ValueError, TypeError))):
            make(value)
        return
    if refused_by_ours(case["kind"], value):
        with pytest.raises(LossScaleError, match=r"must be"):
            make(value)
        return
    made = make(value)
    if "scale" in result:
        get_scale = getattr(made, "get_loss_scale", made)
        assert float(result["scale"]) == get_scale()
    if "config" in result:
        assert result["config"] == made.get_config()
    for name in ("increment_period", "multiplier"):
        if name in result:
            assert result[name] == getattr(made, name)
    if "type" in result:
        assert result["type"] == type(made).__name__
    if result.get("repr"):
        assert result["repr"] == repr(made)


def update_cases():
    return [case for case in CASES if ".update(grads)" in case["kind"]]


@pytest.mark.parametrize(
    "case", update_cases(), ids=lambda case: f"{case['kind']} {case['input']}"
)
def test_update_sees_gradients_as_the_original_does(case):
    try:
        grads = gradients_of(case["input"])
    except LookupError as error:
        pytest.skip(f"NumPy has no {error}")
    fixed = case["kind"].startswith("Fixed")
    loss_scale = ls.FixedLossScale(8) if fixed else ls.DynamicLossScale(8, 1, 2)
    result = case["result"]
    if "raises" in result:
        with pytest.raises(TypeError, match="The gradient"):
            loss_scale.update(grads)
        assert 8.0 == loss_scale()
        return
    operation, should_apply = loss_scale.update(grads)
    assert operation is None
    assert result["should_apply"] == bool(should_apply)
    if "scale_after" in result:
        assert result["scale_after"] == loss_scale()


RAW = "ExponentialUpdateLossScaleManager.update_loss_scale(raw python value)"


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["kind"] == RAW],
    ids=lambda case: str(case["input"]),
)
def test_a_manager_takes_any_number_as_a_flag_but_not_none_or_text(case):
    manager = ls.ExponentialUpdateLossScaleManager(8, 2, 1, 2, 0.5)
    value = value_of(case["input"])
    if value is None or isinstance(value, str):
        with pytest.raises(TypeError, match="one boolean"):
            manager.update_loss_scale(value)
        return
    manager.update_loss_scale(value)
    assert case["result"]["scale"] == manager.get_loss_scale()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"init_loss_scale": 0.0}, "init_loss_scale must be"),
        ({"init_loss_scale": math.nan}, "init_loss_scale must be"),
        ({"incr_ratio": 1.0}, "incr_ratio must be .* above 1"),
        ({"incr_ratio": math.nan}, "incr_ratio must be"),
        ({"decr_ratio": 1.5}, "decr_ratio must be .* below 1"),
        ({"decr_ratio": 0}, "decr_ratio must be"),
        ({"floor": -1.0}, "floor must be"),
        ({"at_floor": "stay"}, "at_floor must be 'hold' or 'clamp'"),
        ({"init_loss_scale": 0.25}, "could never move"),
        (
            {"init_loss_scale": 0.3716920129327538, "incr_ratio": 2.690399484534846},
            "could never move",
        ),
        ({"init_loss_scale": 10**400}, "init_loss_scale must be"),
        ({"incr_every_n_steps": 2**40}, "incr_every_n_steps must be"),
    ],
)
def test_a_manager_names_the_argument_that_is_wrong(keywords, message):
    arguments = {"init_loss_scale": 8.0, "incr_every_n_steps": 2} | keywords
    with pytest.raises(ValueError, match=message):
        ls.ExponentialUpdateLossScaleManager(**arguments)


@pytest.mark.parametrize("name", ["incr_every_n_steps", "decr_every_n_nan_or_inf"])
def test_a_fractional_number_of_steps_is_refused_at_construction(name):
    arguments = {"init_loss_scale": 8.0, "incr_every_n_steps": 2} | {name: 2.0}
    with pytest.raises(TypeError, match=f"{name} must be a whole number"):
        ls.ExponentialUpdateLossScaleManager(**arguments)


def test_a_dynamic_loss_scale_shows_its_state_and_can_be_copied():
    loss_scale = ls.DynamicLossScale(8, 2, 2)
    loss_scale.update([np.float32(1)])
    text = repr(loss_scale)
    numbers = re.findall(r"=([\d.]+)", text)
    assert text.startswith("DynamicLossScale(current_loss_scale=")
    assert ["8.0", "1", "8.0", "2", "2.0"] == numbers
    twin = copy.deepcopy(loss_scale)
    twin.update([np.float32(1)])
    assert (8.0, 16.0) == (loss_scale(), twin())


def test_unknown_keys_of_a_config_are_refused_and_missing_ones_have_defaults():
    with pytest.raises(TypeError):
        ls.DynamicLossScale.from_config({"scale": 8})
    assert 2000 == ls.DynamicLossScale.from_config({"multiplier": 3}).increment_period
