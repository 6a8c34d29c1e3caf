"""Savers of TensorFlow 1 find variables by name: ours have the originals' names.

With the control flow of TensorFlow 1, the variables that an optimizer makes in a branch
are named after the branch.
"""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import lossscale.tensorflow as ls  # noqa: E402

v1 = tf.compat.v1
THEIRS = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
OURS = ls.MixedPrecisionLossScaleOptimizer
GRADIENTS = (1.0, float("nan"), 3.0)


@pytest.fixture(params=["branches of TensorFlow 1", "branches of TensorFlow 2"])
def _control_flow(request):
    if request.param == "branches of TensorFlow 1":
        v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


def build(wrapper, scale, make=v1.train.AdamOptimizer):
    """Build a graph; return its input, its training op and its weight."""
    gradient = v1.placeholder(tf.float32, (), "gradient")
    weight = v1.get_variable("weight", initializer=1.0)
    step = v1.train.get_or_create_global_step()
    return gradient, wrapper(make(0.5), scale).minimize(gradient * weight, step), weight


def names():
    return sorted(variable.op.name for variable in v1.global_variables())


def names_of(wrapper, *arguments):
    with tf.Graph().as_default():
        build(wrapper, *arguments)
        return names()


def run(wrapper, folder, *, restore=None):
    """Train from the start, or from a checkpoint; return all values and a path."""
    with tf.Graph().as_default(), v1.Session() as session:
        gradient, train, _ = build(wrapper, "dynamic")
        saver = v1.train.Saver()
        if restore is None:
            session.run(v1.global_variables_initializer())
        else:
            saver.restore(session, restore)
        for value in GRADIENTS:
            session.run(train, {gradient: value})
        path = saver.save(session, f"{folder}/{'first' if restore is None else 'next'}")
        variables = {x.op.name: x for x in v1.global_variables()}
        return session.run(variables), path


@pytest.mark.usefixtures("_control_flow")
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
@pytest.mark.parametrize(
    "make",
    [
        v1.train.AdamOptimizer,
        v1.train.AdagradOptimizer,
        v1.train.RMSPropOptimizer,
        lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
    ],
    ids=["adam", "adagrad", "rmsprop", "momentum"],
)
def test_variables_have_the_names_that_tensorflows_wrapper_gives_them(scale, make):
    assert names_of(THEIRS, scale, make) == names_of(OURS, scale, make)


@pytest.mark.usefixtures("_control_flow")
@pytest.mark.parametrize(("first", "second"), [(THEIRS, OURS), (OURS, THEIRS)])
def test_training_goes_on_from_a_checkpoint_of_the_other_wrapper(folder, first, second):
    _, path = run(first, folder)
    expected, _ = run(first, folder, restore=path)
    found, _ = run(second, folder, restore=path)
    assert expected == found


@pytest.mark.usefixtures("_control_flow")
def test_two_optimizers_in_a_name_scope_next_to_branches_of_the_model():
    def built(wrapper):
        with tf.Graph().as_default(), tf.name_scope("train"):
            table = v1.get_variable("table", initializer=[[1.0], [2.0]])
            rows = tf.gather(table, [0, 0, 1])  # a sparse gradient
            pred = tf.reduce_sum(rows) > 0
            loss = tf.cond(pred, lambda: rows, lambda: -rows)
            for _ in range(2):
                wrapper(v1.train.AdamOptimizer(), "dynamic").minimize(loss)
            wrapper(v1.train.AdamOptimizer(), 8.0).minimize(loss)
            wrapper(v1.train.AdamOptimizer(), "dynamic").minimize(loss)
            return names()

    assert built(THEIRS) == built(OURS)


@pytest.mark.usefixtures("_control_flow")
def test_mirrored_variables_have_the_names_that_tensorflows_wrapper_gives_them():
    def built(wrapper):
        with tf.Graph().as_default():
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            with strategy.scope():
                weight = v1.get_variable("weight", initializer=1.0)
                optimizer = wrapper(v1.train.AdamOptimizer(0.5), "dynamic")
                strategy.run(lambda: optimizer.minimize(weight * weight))
            v1.train.Saver()  # raises if two variables have one name
            return names()

    assert built(THEIRS) == built(OURS)


def test_two_optimizers_with_managers_have_the_names_that_contribs_gave_them():
    # contrib's wrapper calls tf.cond to apply, and its manager to update.
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            for number in range(2):
                manager = ls.ExponentialUpdateLossScaleManager(8, 1)
                weight = v1.get_variable(f"weight_{number}", initializer=1.0)
                adam = ls.LossScaleOptimizer(v1.train.AdamOptimizer(), manager)
                adam.minimize(weight * weight, var_list=[weight])
            powers = [name for name in names() if "beta1_power" in name]
    finally:
        v1.enable_control_flow_v2()
    assert ["cond/beta1_power", "cond_2/beta1_power"] == powers
