"""The classic classes eagerly, in tf.function, in XLA and in graphs of TensorFlow 1."""

import copy

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_modes import MODES  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import ContextError, GradientError  # noqa: E402

FLOAT32_MAX = float(np.finfo(np.float32).max)
QUARTER = FLOAT32_MAX / 4
every_mode = pytest.mark.parametrize("mode", MODES)
in_functions = pytest.mark.parametrize("mode", ["function", "xla", "graph"])


def manager_scales(mode, flags, *arguments, **keywords):
    """Return the scale after each update of an exponential manager."""

    def build():
        manager = ls.ExponentialUpdateLossScaleManager(*arguments, **keywords)

        def step(finite):
            updated = manager.update_loss_scale(finite)
            with tf.control_dependencies([] if updated is None else [updated]):
                return manager.get_loss_scale()

        return step

    with MODES[mode](build, True) as run:
        return [run(flag == "G").item() for flag in flags]


def dynamic_scales(mode, flags, *arguments):
    """Return the scale after each update; checks `should_apply`."""

    def build():
        loss_scale = ls.DynamicLossScale(*arguments)

        def step(gradient):
            updated, should_apply = loss_scale.update([gradient])
            with tf.control_dependencies([] if updated is None else [updated]):
                return loss_scale(), should_apply

        return step

    scales = []
    with MODES[mode](build, np.float32(1.0)) as run:
        for flag in flags:
            scale, should_apply = run(np.float32(1.0 if flag == "G" else np.nan))
            assert (flag == "G") == bool(should_apply)
            scales.append(scale.item())
    return scales


MANAGER = [
    ((1, 2, 2, 2, 0.5), "GGGGGG", [1, 2, 2, 4, 4, 8]),
    (
        (QUARTER, 2, 2, 2, 0.5),
        "GGGGGG",
        [QUARTER, *[2 * QUARTER] * 2, *[FLOAT32_MAX] * 3],
    ),
    ((1024, 2, 2, 2, 0.5), "BBBBBB", [1024, 512, 512, 256, 256, 128]),
    ((16, 2, 2, 2, 0.5), "BBBBBBBBBB", [16, 8, 8, 4, 4, 2, 2, 1, 1, 1]),
    ((1, 2, 2, 2, 0.5), "GGGBG", [1, 2, 2, 2, 2]),
    ((1, 2, 2, 2, 0.5), "GGGBGB", [1, 2, 2, 2, 2, 1]),
    ((1, 1, 1, 2, 0.5), "GGGBGG", [2, 4, 8, 4, 8, 16]),
    ((1, 1, 1, 2, 0.5), "GBGBGBGBG", [2, 1, 2, 1, 2, 1, 2, 1, 2]),
    ((32, 2, 1, 2, 0.5), "GBGBGBG", [32, 16, 16, 8, 8, 4, 4]),
    ((4, 2, 2, 2, 0.5), "BBGGGBGBGGGB", [4, 2, 2, 4, 4, 4, 4, 2, 2, 4, 4, 4]),
]
DYNAMIC = [
    ((1, 2, 2), "GGGGGG", [1, 2, 2, 4, 4, 8]),
    (
        (QUARTER, 2, 2),
        "GGGGGG",
        [QUARTER, *[2 * QUARTER] * 2, *[FLOAT32_MAX] * 3],
    ),
    ((1024, 2, 2), "BBBBBB", [512, 256, 128, 64, 32, 16]),
    ((16, 2, 2), "BBBBBB", [8, 4, 2, 1, 1, 1]),
    ((1, 2, 2), "GGGBG", [1, 2, 2, 1, 1]),
    ((1, 1, 2), "GGGBGG", [2, 4, 8, 4, 8, 16]),
    ((1, 1, 2), "GBGBGBGBG", [2, 1, 2, 1, 2, 1, 2, 1, 2]),
    ((32, 2, 2), "GBGBGBG", [32, 16, 16, 8, 8, 4, 4]),
    ((4, 2, 3), "GGBGG", [4, 12, 4, 4, 12]),
    ((4, 2, 2), "BGGGBGBGGGB", [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
]


@every_mode
@pytest.mark.parametrize(("arguments", "flags", "expected"), MANAGER)
def test_the_exponential_manager(mode, arguments, flags, expected):
    assert expected == manager_scales(mode, flags, *arguments)


@every_mode
@pytest.mark.parametrize(("arguments", "flags", "expected"), DYNAMIC)
def test_the_dynamic_loss_scale(mode, arguments, flags, expected):
    assert expected == dynamic_scales(mode, flags, *arguments)


@every_mode
def test_the_same_bits_in_every_mode_whatever_the_ratios(mode):
    """The original's decrease was a division eagerly and a product in a graph."""
    scale, expected = np.float32(1000), []
    for flag in "BBGBBGGB":
        scale = scale * np.float32(1.7) if flag == "G" else scale / np.float32(1.7)
        expected.append(scale.item())
    assert expected == dynamic_scales(mode, "BBGBBGGB", 1000, 1, 1.7)
    scale, expected = np.float32(1000), []
    for flag in "BBGBBGGB":
        scale = scale * np.float32(1.7 if flag == "G" else 0.8)
        expected.append(scale.item())
    assert expected == manager_scales(mode, "BBGBBGGB", 1000, 1, 1, 1.7, 0.8)


@every_mode
def test_fixed_scales_are_float32_tensors_that_stay(mode):
    def build():
        manager = ls.FixedLossScaleManager(1000)
        fixed, dynamic = ls.FixedLossScale(1000), ls.DynamicLossScale(1000)

        def step(gradient):
            updated = manager.update_loss_scale(tf.math.is_finite(gradient))
            operation, should_apply = fixed.update([gradient])
            assert should_apply is True
            assert (updated is None) == (operation is None)
            found = manager.get_loss_scale(), fixed(), dynamic()
            for tensor in found:
                assert tf.is_tensor(tensor)
                assert not isinstance(tensor, tf.Variable)
                assert (tf.float32, ()) == (tensor.dtype, tuple(tensor.shape))
            return found

        return step

    with MODES[mode](build, np.float32(0)) as run:
        for gradient in (0.0, np.nan):
            assert (1000.0,) * 3 == tuple(map(float, run(np.float32(gradient))))


def test_an_update_returns_none_eagerly():
    assert ls.FixedLossScaleManager(8).update_loss_scale(True) is None
    assert ls.ExponentialUpdateLossScaleManager(8, 2).update_loss_scale(True) is None
    assert ls.FixedLossScale(8).update([])[0] is None
    for gradient in (1.0, np.nan, 1.0):  # the original returned a counter on some
        assert ls.DynamicLossScale(8, 3).update([gradient])[0] is None


def test_an_update_returns_a_tensor_in_a_graph():
    with tf.Graph().as_default():
        for updated in (
            ls.FixedLossScaleManager(8).update_loss_scale(True),
            ls.ExponentialUpdateLossScaleManager(8, 2).update_loss_scale(True),
            ls.FixedLossScale(8).update([])[0],
            ls.DynamicLossScale(8).update([tf.constant(1.0)])[0],
        ):
            assert isinstance(updated, tf.Tensor)


def test_each_run_of_an_update_op_is_one_update():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = ls.DynamicLossScale(8, 2, 2)
        operation, _ = loss_scale.update([tf.constant(1.0)])
        value = loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        seen = []
        for _ in range(4):
            session.run(operation)
            seen.append(session.run(value).item())
        assert [8.0, 16.0, 16.0, 32.0] == seen


@every_mode
@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", "bool"])
def test_a_flag_may_be_any_number_and_nan_is_never_finite(mode, dtype):
    def build():
        manager = ls.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)

        def step(finite):
            updated = manager.update_loss_scale(finite)
            with tf.control_dependencies([] if updated is None else [updated]):
                return manager.get_loss_scale()

        return step

    values = [1, 0] + ([np.nan, np.inf] if dtype.startswith("float") else [])
    expected = [16.0, 8.0, 4.0, 2.0][: len(values)]
    with MODES[mode](build, np.zeros((), dtype)) as run:
        assert expected == [run(np.asarray(x, dtype)).item() for x in values]


@pytest.mark.parametrize("wrong", [None, "yes", float("nan"), [True, False], ()])
def test_what_is_no_flag_changes_nothing(wrong):
    manager = ls.ExponentialUpdateLossScaleManager(8, 1, 1)
    with pytest.raises(GradientError, match="one boolean"):
        manager.update_loss_scale(wrong)
    assert 8.0 == float(manager.get_loss_scale())
    with tf.Graph().as_default(), pytest.raises(GradientError, match="one boolean"):
        ls.ExponentialUpdateLossScaleManager(8, 1, 1).update_loss_scale(wrong)


def test_variables_have_the_names_and_dtypes_of_the_originals():
    with tf.Graph().as_default() as graph:
        for _ in range(2):
            ls.ExponentialUpdateLossScaleManager(8, 2)
        ls.DynamicLossScale()
        found = [
            (variable.op.name, variable.dtype.base_dtype.name)
            for variable in graph.get_collection("variables")
        ]
        assert [] == graph.get_collection("trainable_variables")
    assert [
        ("loss_scale", "float32"),
        ("good_steps", "int32"),
        ("bad_steps", "int32"),
        ("loss_scale_1", "float32"),
        ("good_steps_1", "int32"),
        ("bad_steps_1", "int32"),
        ("current_loss_scale", "float32"),
        ("good_steps_2", "int64"),
    ] == found


def makers():
    return {
        "manager": lambda: ls.ExponentialUpdateLossScaleManager(8, 2),
        "loss scale": lambda: ls.DynamicLossScale(8),
    }


def use(made):
    getattr(made, "get_loss_scale", made)()


@pytest.mark.parametrize("kind", makers())
def test_an_object_of_another_graph_says_so(kind):
    make = makers()[kind]
    with tf.Graph().as_default():
        made = make()
        use(made)
    with tf.Graph().as_default(), pytest.raises(ContextError, match="another graph"):
        use(made)
    with pytest.raises(ContextError, match="in another graph"):
        use(made)
    made = make()
    with tf.Graph().as_default(), pytest.raises(ContextError, match="made eagerly"):
        use(made)
    tf.function(lambda: use(made))()  # a function belongs to the world around it
    with tf.Graph().as_default():
        inside = make()
        tf.cond(tf.constant(True), lambda: inside_value(inside), lambda: 0.0)


def inside_value(made):
    return getattr(made, "get_loss_scale", made)()


@pytest.mark.parametrize("kind", makers())
def test_nothing_with_variables_is_made_inside_a_function(kind):
    with pytest.raises(ContextError, match=r"inside a tf\.function"):
        tf.function(makers()[kind])()


def test_fixed_ones_work_in_any_graph():
    manager, fixed = ls.FixedLossScaleManager(8), ls.FixedLossScale(8)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert [8.0, 8.0] == session.run([manager.get_loss_scale(), fixed()])


def test_repr_shows_the_state_eagerly_and_only_settings_in_a_graph():
    loss_scale = ls.DynamicLossScale(8, 5, 2)
    loss_scale.update([tf.constant(1.0)])
    assert (
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=1, "
        "initial_loss_scale=8.0, increment_period=5, multiplier=2.0)"
    ) == repr(loss_scale)
    settings = (
        "DynamicLossScale(initial_loss_scale=8.0, increment_period=5, multiplier=2.0)"
    )
    with tf.Graph().as_default():
        made = ls.DynamicLossScale(8, 5, 2)
        assert settings == repr(made)
        assert settings == repr(loss_scale)
    assert settings == repr(made)


def test_a_deep_copy_is_independent_and_still_checkpointed():
    loss_scale = ls.DynamicLossScale(8, 1, 2)
    twin = copy.deepcopy(loss_scale)
    twin.update([tf.constant(1.0)])
    assert (8.0, 16.0) == (float(loss_scale()), float(twin()))
    assert 16.0 == float(twin.current_loss_scale)
    manager = ls.ExponentialUpdateLossScaleManager(8, 1)
    other = copy.deepcopy(manager)
    other.update_loss_scale(True)
    found = [float(x.get_loss_scale()) for x in (manager, other)]
    assert [8.0, 16.0] == found


@in_functions
def test_an_optimizer_of_ones_own_loss_scale_is_asked(mode):
    """A custom LossScale is honoured, as the document says of any."""

    class EveryOther(ls.LossScale):
        def __init__(self):
            self.steps = tf.Variable(0, trainable=False)

        def __call__(self):
            return tf.constant(4.0)

        def update(self, grads):
            counted = self.steps.assign_add(1)
            return counted, tf.equal(counted % 2, 0)

        def get_config(self):
            return {}

    def build():
        weight = tf.Variable(10.0)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = ls.LossScaleOptimizer(descent, EveryOther())

        def step(gradient):
            applied = optimizer.apply_gradients([(gradient, weight)])
            with tf.control_dependencies([applied]):
                return tf.convert_to_tensor(weight)

        return step

    with MODES[mode](build, np.float32(1)) as run:
        seen = [run(np.float32(x)).item() for x in (1, 1, 1, np.nan)]
    assert [10.0, 9.0, 9.0, 9.0] == seen


@every_mode
def test_a_flag_that_the_compiler_knows_changes_no_bit(mode):
    """Known to be bad, the divisor was a constant, and the division a product."""

    def build():
        loss_scale = ls.DynamicLossScale(10, 9, 3)

        def step(unused):
            updated, _ = loss_scale.update_from_finite(False)
            with tf.control_dependencies([] if updated is None else [updated]):
                return loss_scale()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        assert np.float32(10) / np.float32(3) == run(np.float32(0))
