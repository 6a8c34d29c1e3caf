"""Recorded arguments and inputs one by one: ours takes and refuses the same."""

from collections import Counter

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_replay import (  # noqa: E402
    number,
)
from helpers.tensorflow_rows import ROWS, rows_of  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX  # noqa: E402
from lossscale.errors import (  # noqa: E402
    LossScaleError,
)


def value_of(tagged):
    """Return the Python value that a type-tagged input represents."""
    ((kind, value),) = tagged.items()
    if kind.startswith("np."):
        return getattr(np, kind[3:])(value)
    makers = {"int": int, "bool": bool, "str": str, "none": lambda _: None}
    return makers.get(kind, float)(value)


def gradients_of(tagged):
    """Return a structure of gradients; its tensors belong to the current graph."""
    if "tensor" in tagged:
        values = np.asarray(tagged["tensor"], dtype=object)
        numbers = np.vectorize(float, otypes=[float])(values) if values.size else values
        return tf.constant(numbers.astype(tagged["dtype"]))
    if "indexed_slices" in tagged:
        parts = tagged["indexed_slices"]
        shape = parts["dense_shape"]
        return tf.IndexedSlices(
            tf.constant([float(value) for value in parts["values"]]),
            tf.constant(parts["indices"]),
            None if shape is None else tf.constant(shape),
        )
    for name, kind in (("list", list), ("tuple", tuple)):
        if name in tagged:
            return kind(gradients_of(item) for item in tagged[name])
    if "dict" in tagged:
        return {key: gradients_of(item) for key, item in tagged["dict"].items()}
    return value_of(tagged)


MANAGER = "ExponentialUpdateLossScaleManager(init_loss_scale, 2)"
FLAG = "ExponentialUpdateLossScaleManager.update_loss_scale(raw python value)"
DYNAMIC_UPDATE = "DynamicLossScale(8, 1, 2).update(grads)"
MAKERS = {
    "FixedLossScaleManager(loss_scale)": ls.FixedLossScaleManager,
    MANAGER: lambda value: ls.ExponentialUpdateLossScaleManager(value, 2),
    "FixedLossScale(loss_scale_value)": ls.FixedLossScale,
    "DynamicLossScale(initial_loss_scale, 2, 2)": (
        lambda value: ls.DynamicLossScale(value, 2, 2)
    ),
    "DynamicLossScale(8, increment_period, 2)": (
        lambda value: ls.DynamicLossScale(8, value, 2)
    ),
    "DynamicLossScale(8, 2, multiplier)": (
        lambda value: ls.DynamicLossScale(8, 2, value)
    ),
    "get(identifier)": ls.get,
}


class Here:
    """Reads values eagerly, or in a graph of TensorFlow 1 by its session."""

    def __init__(self, session=None):
        self._session = session
        self._begun = False

    def __call__(self, tensor):
        if self._session is None:
            return np.asarray(tensor).item()
        self.begin()
        return self._session.run(tensor).item()

    def begin(self):
        """Initialize the variables, once."""
        if not self._begun:
            self._session.run(tf.compat.v1.global_variables_initializer())
            self._begun = True

    def do(self, operation):
        """Run an update, which has happened already if there is no operation."""
        assert (operation is None) == (self._session is None)
        if operation is not None:
            self.begin()
            self._session.run(operation)


def made(case, here):
    """Return what ours makes of a constructor's case, in the fields recorded."""
    result = MAKERS[case["kind"]](value_of(case["input"]))
    readers = {
        "scale": lambda: here(getattr(result, "get_loss_scale", result)()),
        "config": result.get_config if hasattr(result, "get_config") else None,
        "repr": lambda: None if result is None else repr(result),
        "type": lambda: type(result).__name__,
        "increment_period": lambda: result.increment_period,
        "multiplier": lambda: result.multiplier,
    }
    # A constructor is asked for whatever was recorded of it, an error for nothing.
    return {field: readers[field]() for field in case["result"] if field in readers}


def flagged(case, here):
    """Return what ours makes of a flag."""
    manager = ls.ExponentialUpdateLossScaleManager(8, 2, 1, 2, 0.5)
    here.do(manager.update_loss_scale(value_of(case["input"])))
    return {"good": here(manager.good_steps), "scale": here(manager.get_loss_scale())}


def updated(case, here):
    """Return what ours makes of a structure of gradients."""
    if case["kind"].startswith("Fixed"):
        operation, should_apply = ls.FixedLossScale(8).update(
            gradients_of(case["input"])
        )
        here.do(operation)
        assert should_apply is True
        return {"should_apply": True}
    loss_scale = ls.DynamicLossScale(8, 1, 2)
    operation, should_apply = loss_scale.update(gradients_of(case["input"]))
    applied = bool(here(should_apply))
    here.do(operation)
    return {"should_apply": applied, "scale_after": here(loss_scale())}


def outcome(case, here):
    """Return what ours does with a case, in the words of the recording."""
    act = updated
    if case["kind"] in MAKERS:
        act = made
    elif case["kind"] == FLAG:
        act = flagged
    try:
        return act(case, here)
    except LossScaleError as error:
        return {"raises": "TypeError" if isinstance(error, TypeError) else "ValueError"}


def outcome_in_graph(case):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return outcome(case, Here(session))


def plain(result):
    """Return a recorded result with its numbers as numbers."""
    if isinstance(result, dict):
        return {
            key: value.rpartition(".")[2] if key == "raises" else plain(value)
            for key, value in result.items()
        }
    return number(result) if result in ("NaN", "Infinity", "-Infinity") else result


def cannot_work(case):
    """Whether a setting is one that the originals let through to break later."""
    value = float(value_of(case["input"]))
    lowest = 1.0 if case["kind"].endswith("multiplier)") else 0.0
    return not lowest < value <= FLOAT32_MAX


ERROR_TYPE = "wrong in both, and ours says so by a ValueError or TypeError"
FLAG_TYPE = "a flag is one boolean or number in every mode; None and text are none"
NO_SHAPE = "a sparse gradient is checked by its values and needs no dense shape"
DIFFERENCES = {
    "cases.tf1.15.5.eager": {ERROR_TYPE: 2, FLAG_TYPE: 2, NO_SHAPE: 2},
    "cases.tf1.15.5.graph": {ERROR_TYPE: 1, FLAG_TYPE: 5, NO_SHAPE: 2},
    "cases.tf2.3.4.eager": {ERROR_TYPE: 2},
    "cases.tf2.21.0.eager": {ERROR_TYPE: 2},
}


def difference(case, ours):
    """Return what the difference is; one that is not listed is an error."""
    was_error, is_error = "raises" in case["result"], "raises" in ours
    value = None if case["kind"] == DYNAMIC_UPDATE else value_of(case["input"])
    if case["kind"] == FLAG and is_error == (value is None or isinstance(value, str)):
        return FLAG_TYPE
    if was_error and is_error:
        return ERROR_TYPE
    if case["kind"] == DYNAMIC_UPDATE and was_error:
        (slices,) = case["input"]["list"]
        assert slices["indexed_slices"]["dense_shape"] is None
        finite = [1.0] == slices["indexed_slices"]["values"]
        assert {
            "should_apply": finite,
            "scale_after": 16.0 if finite else 4.0,
        } == ours
        return NO_SHAPE
    message = f"{case} but ours: {ours}"
    raise AssertionError(message)


@pytest.mark.parametrize("file", DIFFERENCES)
def test_single_inputs_are_taken_as_by_the_original(file):
    same, refused, different = 0, 0, Counter()
    for case in rows_of(file):
        ours = outcome_in_graph(case)
        # In eager mode too, whichever was recorded.
        assert ours == outcome(case, Here())
        if ours == plain(case["result"]):
            same += 1
        elif (
            "raises" in ours
            and case["kind"] in MAKERS
            and ("raises" not in case["result"])
        ):
            assert cannot_work(case)
            refused += 1
        else:
            different[difference(case, ours)] += 1
    assert DIFFERENCES[file] == different
    assert ROWS[file] == (same, refused, different.total())
