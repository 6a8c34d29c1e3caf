"""`lossscale.testing.tensorflow.inject`: what it writes, when, and what it refuses."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import lossscale.tensorflow as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402
from lossscale.testing.tensorflow import inject  # noqa: E402

MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "XLA": lambda function: tf.function(function, jit_compile=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["inf", "-inf", "nan", "huge", 7.5])
def test_one_number_of_one_tensor_is_written_at_its_steps(mode, kind):
    tensors = {"kernel": tf.ones((2, 3), tf.float16), "bias": tf.ones(2), "none": None}
    function = MODES[mode](
        lambda tensors, step: inject(
            tensors, "['kernel']", kind, step=step, steps=[2, 4], element=4
        )
    )
    written = np.ones((2, 3), np.float16)
    written[1, 1] = np.finfo(np.float16).max if kind == "huge" else float(kind)
    for step in range(1, 6):
        found = function(tensors, tf.constant(step))
        expected = written if step in (2, 4) else np.ones((2, 3))
        np.testing.assert_array_equal(found["kernel"].numpy(), expected)
        np.testing.assert_array_equal(found["bias"].numpy(), np.ones(2))
        assert found["none"] is None


@pytest.mark.parametrize("mode", MODES)
def test_the_scaled_gradient_of_a_variable_is_written_in_the_backward_pass(mode):
    policy, weight = Dynamic(), tf.Variable(tf.ones(2))

    def take(state, step):
        with tf.GradientTape() as tape:
            value = inject(weight, "", "nan", step=step, steps=2, where="gradient")
            loss = ls.scale(tf.reduce_sum(value), state)
        grads, signal = ls.unscale([tape.gradient(loss, weight)], state)
        return grads[0], signal.finite

    state = ls.init(policy)
    function = MODES[mode](take)
    assert [[1.0, 1.0], True] == [
        part.numpy().tolist() for part in function(state, tf.constant(1))
    ]
    grad, finite = function(state, tf.constant(2))
    assert [True, False] == np.isnan(grad.numpy()).tolist()
    assert not finite


def test_indexed_slices_stay_sparse():
    slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1]), (6, 3))
    (found,) = inject([slices], "[0]", "inf", step=1, steps=1, element=3)
    assert isinstance(found, tf.IndexedSlices)
    assert [[1, 0]] == np.argwhere(np.isinf(found.values.numpy())).tolist()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"name": "[2]"}, SettingError, r"Did you mean '\[[01]\]'"),
        ({"name": "[1]"}, SettingTypeError, "int32"),
        ({"value": "hueg"}, SettingError, "Did you mean 'huge'"),
        ({"value": 1e5}, SettingError, "65504"),
        ({"where": "output"}, SettingError, "'value' or 'gradient'"),
        ({"element": 2}, SettingError, "has 2 numbers"),
        ({"steps": 0}, SettingError, "first step is 1"),
    ],
)
def test_what_cannot_be_injected_is_one_error(change, error, words):
    settings = {"name": "[0]", "value": "inf", "step": 1, "steps": 1}
    tensors = [tf.ones(2, tf.float16), tf.constant([1, 2])]
    with pytest.raises(error, match=words):
        inject(tensors, **(settings | change))
