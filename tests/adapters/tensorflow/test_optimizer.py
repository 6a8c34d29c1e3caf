"""The optimizer wrapper around every kind of optimizer, in every mode."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tf_keras  # noqa: E402
from helpers.tensorflow_modes import MODES  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    ADAM,
    MOMENTUM,
    OPTIMIZERS,
    value,
    variable,
)
from helpers.tensorflow_wrappers import (  # noqa: E402
    BAD,
    every_mode,
    kinds,
    possible,
    v1,
    weights_after,
)

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    SettingError,
    StructureError,
)


@every_mode
@kinds
def test_bad_gradients_are_skipped_under_a_fixed_scale(mode, kind):
    possible(mode, kind)
    for scale in (lambda: 8, lambda: ls.FixedLossScaleManager(8)):
        seen = weights_after(mode, kind, (*BAD, 0.5, np.nan), scale)
        assert [(1.0, 8.0)] * 3 + [(0.5, 8.0)] * 2 == seen


@every_mode
@kinds
def test_bad_gradients_are_applied_to_those_who_ask_for_it(mode, kind):
    possible(mode, kind)
    seen = weights_after(mode, kind, (np.inf,), lambda: 8, skip_nonfinite=False)
    assert [(-np.inf, 8.0)] == seen


@every_mode
@kinds
def test_a_manager_of_ones_own_is_asked_and_updated(mode, kind):
    possible(mode, kind)

    class Steps(ls.LossScaleManager):
        def __init__(self):
            self.value = tf.Variable(8.0, trainable=False)

        def get_loss_scale(self):
            return tf.convert_to_tensor(self.value)

        def update_loss_scale(self, finite_grads):
            return self.value.assign_add(tf.where(finite_grads, 1.0, -1.0))

    seen = weights_after(mode, kind, (np.nan, np.inf, 0.5), Steps)
    assert [(1.0, 7.0), (1.0, 6.0), (0.5, 7.0)] == seen


@every_mode
@kinds
def test_slots_and_weights_stay_on_a_bad_step(mode, kind):
    possible(mode, kind)
    gradients = (1.0, np.nan, 1.0, np.inf)
    seen = weights_after(
        mode, kind, gradients, lambda: ls.DynamicLossScale(2, 1, 4), MOMENTUM
    )
    assert [(0.0, 8.0), (0.0, 2.0), (-1.5, 8.0), (-1.5, 2.0)] == seen


@every_mode
@kinds
def test_the_loss_is_scaled_by_what_the_last_step_left(mode, kind):
    """Dynamic from 2 with a period of 1: scales 2 then 4; weight 5, 3, 1."""
    possible(mode, kind)
    upstream = []

    @tf.custom_gradient
    def spy(x):
        def backward(dy):
            if mode == "xla":  # has no Python functions
                return dy
            noted = tf.py_function(lambda y: upstream.append(float(y)), [dy], [])
            with tf.control_dependencies([] if noted is None else [noted]):
                return tf.identity(dy)

        return tf.identity(x), backward

    def build():
        weight = variable(kind, 5.0)
        optimizer = ls.LossScaleOptimizer(
            OPTIMIZERS[kind](2.0), ls.DynamicLossScale(2, 1, 2)
        )

        def step(unused):
            def loss():  # in float16: scaled in float32 all the same
                return tf.cast(spy(tf.convert_to_tensor(weight)), tf.float16)

            applied = optimizer.minimize(loss, var_list=[weight])
            with tf.control_dependencies([] if applied is None else [applied]):
                return tf.convert_to_tensor(weight)

        return step

    with MODES[mode](build, np.float32(0)) as run:
        assert [3.0, 1.0] == [run(np.float32(0)).item() for _ in range(2)]
    if mode != "xla":
        assert [2.0, 4.0] == upstream


@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_a_gradient_that_underflows_is_saved_by_the_scale(mode):
    def gradient_at(scale):
        def build():
            weight = tf.Variable(1.0)
            optimizer = ls.LossScaleOptimizer(
                v1.train.GradientDescentOptimizer(1.0), ls.FixedLossScaleManager(scale)
            )

            def step(unused):
                # The last factor comes first on the way back.
                ((gradient, same),) = optimizer.compute_gradients(
                    lambda: tf.cast(
                        tf.cast(weight, tf.float16)
                        * tf.constant(1e-4, tf.float16)
                        * tf.constant(1e-4, tf.float16),
                        tf.float16,
                    ),
                    var_list=[weight],
                )
                assert same is weight
                return gradient, tf.convert_to_tensor(weight)

            return step

        with MODES[mode](build, np.float32(0)) as run:
            gradient, weight = run(np.float32(0))
            assert 1.0 == weight  # computing applies nothing
            return gradient.item()

    assert 0.0 == gradient_at(1)
    assert 1e-8 == pytest.approx(gradient_at(1e4), rel=1e-2)


@kinds
def test_the_weight_moves_by_a_gradient_that_would_have_vanished(kind):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1e4), 1e4)
    small = tf.constant(1e-4, tf.float16)

    def loss():
        return tf.cast(tf.convert_to_tensor(weight), tf.float16) * small * small

    optimizer.minimize(loss, var_list=[weight])
    assert 1 - 1e-4 == pytest.approx(value(weight), abs=1e-6)


@kinds
def test_scaled_losses_and_unscaled_gradients_as_in_tf_keras(kind):
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(2))
    for dtype in (tf.float32, tf.float16):
        loss = tf.constant(5.0, dtype)
        assert 10.0 == float(optimizer.get_scaled_loss(loss))
        assert 10.0 == float(optimizer.get_scaled_loss(lambda x=loss: x)())
    given = [tf.constant(3.0), None, tf.constant(-4.0, tf.float16)]
    first, none, last = optimizer.get_unscaled_gradients(given)
    assert (1.5, None, -2.0) == (float(first), none, float(last))


@kinds
def test_sparse_gradients_stay_sparse(kind):
    table = variable(kind, [[1.0], [2.0], [3.0]])
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)

    def loss():
        tensor = table.value if kind == "keras 3" else table
        return tf.reduce_sum(tf.gather(tensor, [0, 2, 2]))

    ((gradient, _),) = optimizer.compute_gradients(loss, [table])
    assert isinstance(gradient, tf.IndexedSlices)
    assert [[1.0]] * 3 == gradient.values.numpy().tolist()
    optimizer.apply_gradients([(gradient, table)])
    assert [[0.0], [2.0], [1.0]] == value(table)


@kinds
def test_rows_whose_sum_overflows_never_reach_the_weights(kind):
    table = variable(kind, [[1.0], [2.0]])
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))
    rows = tf.constant([[3e38], [3e38]])
    gradient = tf.IndexedSlices(rows, tf.constant([1, 1]), tf.constant([2, 1]))
    optimizer.apply_gradients([(gradient, table)])
    assert [[1.0], [2.0]] == value(table)
    assert 8.0 == float(optimizer.loss_scale())


@kinds
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_none_gradients_and_iterators_pass(kind, compiled):
    used, unused = variable(kind, 1.0), variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))

    def step():
        pairs = zip([tf.constant(0.5), None], [used, unused], strict=True)
        optimizer.apply_gradients(pairs)

    (tf.function(step) if compiled else step)()
    assert (0.5, 1.0) == (value(used), value(unused))
    # A variable that has a gradient only later is known to the optimizer.
    optimizer.apply_gradients([(tf.constant(0.5), used), (tf.constant(0.5), unused)])
    assert (0.0, 0.5) == (value(used), value(unused))


@kinds
def test_no_gradient_at_all_is_an_error_that_changes_nothing(kind):
    weight = variable(kind, 1.0)
    loss_scale = ls.DynamicLossScale(8, 1, 2)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), loss_scale)
    for pairs in ([], [(None, weight)]):
        with pytest.raises(StructureError, match="no gradient for any"):
            optimizer.apply_gradients(pairs)
    # A loss that does not depend on the weight.
    with pytest.raises(ValueError, match="no gradient for any"):
        optimizer.minimize(lambda: tf.constant(1.0), var_list=[weight])
    assert 8.0 == float(loss_scale())


@kinds
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_counters_move_on_skipped_steps_only_for_those_who_ask(kind, compiled):
    def counted(asked):
        weight, counter = variable(kind, 1.0), tf.Variable(0, dtype=tf.int64)
        optimizer = ls.LossScaleOptimizer(
            ADAM[kind](1.0), "dynamic", count_skipped_steps=asked
        )
        given = {"global_step": counter} if kind == "v1" else {}

        def step(gradient):
            optimizer.apply_gradients([(gradient, weight)], **given)

        run = tf.function(step) if compiled else step
        for gradient in (1.0, np.nan, np.inf, 1.0):
            run(tf.constant(gradient, tf.float32))
        return value(counter if kind == "v1" else optimizer.iterations)

    assert (2, 4) == (counted(False), counted(True))


def test_global_step_moves_in_graphs_and_by_position():
    with tf.Graph().as_default(), v1.Session() as session:
        weight = tf.Variable(1.0)
        step = v1.train.get_or_create_global_step()
        fed = v1.placeholder(tf.float32, ())
        optimizer = ls.LossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), ls.DynamicLossScale(8)
        )
        train = optimizer.minimize(fed * weight, step, [weight])
        assert isinstance(train, tf.Tensor)
        session.run(v1.global_variables_initializer())
        seen = []
        for gradient in (0.5, np.nan, 0.25):
            session.run(train, {fed: gradient})
            seen.append(session.run((step, weight)))
        assert [(1, 0.5), (1, 0.5), (2, 0.25)] == seen


@kinds
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_variables_of_other_dtypes_are_trained(kind, dtype):
    if kind == "v1" and dtype == "bfloat16":
        pytest.skip("TensorFlow 1's optimizers do not take bfloat16 variables")
    weight = variable(kind, 1.0, dtype)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(1024))

    def loss():
        return tf.convert_to_tensor(weight) * tf.cast(0.5, dtype)

    optimizer.minimize(loss, var_list=[weight])
    assert 0.5 == value(weight)
    # Gradients unscaled by hand come in float32; those beyond float16 are skipped.
    optimizer.apply_gradients([(tf.constant(0.25), weight)])
    assert 0.25 == value(weight)
    if dtype == "float16":
        optimizer.apply_gradients([(tf.constant(1e5), weight)])
        assert 0.25 == value(weight)
        assert 1024.0 == float(optimizer.loss_scale())


@kinds
def test_the_scale_stays_when_the_wrapped_optimizer_raises(kind):
    base = OPTIMIZERS[kind]

    class Refuses(base):
        refuses = True

        def apply_gradients(self, grads_and_vars, *arguments, **keywords):
            if self.refuses:
                message = "no device"
                raise RuntimeError(message)
            return super().apply_gradients(grads_and_vars, *arguments, **keywords)

    weight = variable(kind, 1.0)
    inner = Refuses(1.0)
    loss_scale = ls.DynamicLossScale(8, 1, 2)
    optimizer = ls.LossScaleOptimizer(inner, loss_scale)
    pairs = [(tf.constant(0.5), weight)]
    with pytest.raises(RuntimeError, match="no device"):
        optimizer.apply_gradients(pairs)
    with pytest.raises(RuntimeError, match="no device"):
        tf.function(lambda: optimizer.apply_gradients(pairs))()
    assert (1.0, 8.0) == (value(weight), float(loss_scale()))
    inner.refuses = False
    optimizer.apply_gradients(pairs)
    assert (0.5, 16.0) == (value(weight), float(loss_scale()))


@pytest.mark.parametrize("mode", ["function", "graph"])
def test_the_scale_stays_when_an_op_of_the_wrapped_optimizer_fails(mode):
    """Failing while it runs, long after tracing: the update waits for it."""

    class Fails(v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            fails = tf.debugging.assert_less(grads_and_vars[0][0], 1.0)
            with tf.control_dependencies([] if fails is None else [fails]):
                return super().apply_gradients(grads_and_vars, global_step, name)

    made = []

    def build():
        weight = tf.Variable(1.0)
        made[:] = [ls.DynamicLossScale(8, 1, 2)]
        optimizer = ls.LossScaleOptimizer(Fails(1.0), made[0])

        def step(gradient):
            applied = optimizer.apply_gradients([(gradient, weight)])
            with tf.control_dependencies([applied]):
                return tf.convert_to_tensor(weight), made[0]()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(np.float32(2.0))
        # From 1 and 8: had the failed step moved the scale, this would be 32.
        assert [0.5, 16.0] == [x.item() for x in run(np.float32(0.5))]


@kinds
def test_clipping_inside_works_and_infinities_are_skipped_not_clipped(kind):
    if kind == "v1":
        pytest.skip("TensorFlow 1's optimizers do not clip")
    makers = {
        "keras 3": keras.optimizers.SGD,
        "tf_keras": tf_keras.optimizers.SGD,
        "tf_keras legacy": tf_keras.optimizers.legacy.SGD,
    }
    for option in ("clipnorm", "global_clipnorm", "clipvalue"):
        weight = variable(kind, 1.0)
        inner = makers[kind](1.0, **{option: 0.25})
        optimizer = ls.LossScaleOptimizer(inner, ls.DynamicLossScale(8))
        optimizer.apply_gradients([(tf.constant(np.inf, tf.float32), weight)])
        assert (1.0, 4.0) == (value(weight), float(optimizer.loss_scale()))
        optimizer.apply_gradients([(tf.constant(100.0), weight)])
        assert 0.75 == value(weight)


@kinds
def test_the_wrapped_optimizer_is_given_plain_tensors(kind):
    seen = []

    class Spy(OPTIMIZERS[kind]):
        def apply_gradients(self, grads_and_vars, *arguments, **keywords):
            pairs = list(grads_and_vars)
            seen.extend(gradient for gradient, _ in pairs)
            return super().apply_gradients(pairs, *arguments, **keywords)

    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        weight = variable(kind, 1.0)
        optimizer = ls.LossScaleOptimizer(Spy(1.0), 8)
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), weight)]))
    assert [True, True] == [isinstance(gradient, tf.Tensor) for gradient in seen]


@kinds
def test_a_loss_with_its_tape_is_minimized_as_in_keras(kind):
    weight = variable(kind, 5.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
    with tf.GradientTape() as tape:
        loss = 3.0 * tf.convert_to_tensor(weight)
    optimizer.minimize(loss, var_list=[weight], tape=tape)
    assert 2.0 == value(weight)


def test_keras_users_may_put_the_variables_second():
    weight = keras.Variable(5.0)
    optimizer = ls.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8)
    optimizer.minimize(lambda: 3.0 * weight, [weight])
    assert 2.0 == value(weight)
    optimizer.learning_rate = 0.5
    optimizer.minimize(lambda: 3.0 * weight, lambda: [weight])
    assert 0.5 == value(weight)
    assert 0.5 == value(optimizer.learning_rate)


def test_the_rate_of_an_optimizer_of_tensorflow_1_is_not_set_in_vain():
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 8)
    with pytest.raises(AttributeError, match="cannot be set"):
        optimizer.learning_rate = 0.25
    assert not hasattr(optimizer, "learning_rate")
    assert not hasattr(optimizer, "iterations")
    weight = tf.Variable(5.0)
    optimizer.minimize(lambda: 3.0 * weight, [weight])  # no step counter is a list
    assert 2.0 == float(weight)


def test_a_tensor_without_a_tape_says_what_to_type():
    optimizer = ls.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8)
    with pytest.raises(SettingError, match="tape=tape"):
        optimizer.minimize(tf.constant(1.0), [keras.Variable(1.0)])


def test_a_whole_model_is_trained_in_mixed_precision():
    """Keras 3 layers in float16 around our optimizer, in one compiled step."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((64, 8)).astype(np.float32)
    targets = (inputs.sum(axis=1) > 0).astype(np.int32)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Dense(16, activation="relu", dtype="mixed_float16"),
            keras.layers.Dense(2, dtype="mixed_float16"),
        ]
    )
    model.build((None, 8))
    optimizer = ls.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), ls.DynamicLossScale(2**18, 20)
    )

    @tf.function
    def step():
        def loss():
            logits = tf.cast(model(inputs, training=True), tf.float32)
            return tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    targets, logits, from_logits=True
                )
            )

        optimizer.minimize(loss, var_list=model.trainable_variables)

    for _ in range(100):
        step()
    predicted = np.argmax(model(inputs).numpy(), axis=1)
    assert (predicted == targets).mean() > 0.95
    # 2^18 overflows float16: the first steps were skipped.
    assert 0 < 100 - value(optimizer.iterations) < 20


def test_slots_and_variables_are_those_of_the_wrapped_optimizer():
    weight = tf.Variable(1.0, name="kernel_with_slot")
    optimizer = ls.LossScaleOptimizer(
        v1.train.MomentumOptimizer(1.0, 0.5), ls.DynamicLossScale(8)
    )
    assert isinstance(optimizer, v1.train.Optimizer)
    assert "Momentum" == optimizer.get_name()
    optimizer.apply_gradients([(tf.constant(0.25), weight)])
    assert ["momentum"] == optimizer.get_slot_names()
    assert 0.25 == float(optimizer.get_slot(weight, "momentum"))
    assert ["kernel_with_slot/Momentum:0", "current_loss_scale:0", "good_steps:0"] == [
        variable.name for variable in optimizer.variables()
    ]
