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
    state_of,
    value,
    variable,
)

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    ContextError,
    GradientError,
    SettingError,
    StructureError,
)

v1 = tf.compat.v1
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
every_mode = pytest.mark.parametrize("mode", MODES)
BAD = (np.nan, np.inf, -np.inf)


def possible(mode, kind):
    """Leave out what the wrapped optimizer itself does not do."""
    if mode == "graph" and kind in ("keras 3", "tf_keras"):
        pytest.skip(f"{kind} optimizers are not made for graphs of TensorFlow 1")


def weights_after(mode, kind, gradients, loss_scale, optimizers=OPTIMIZERS, **options):
    """Return the weight after each of some gradients, from 1, at a rate of 1."""

    def build():
        weight = variable(kind, 1.0)
        optimizer = ls.LossScaleOptimizer(
            optimizers[kind](1.0), loss_scale(), **options
        )

        def step(gradient):
            applied = optimizer.apply_gradients([(gradient, weight)])
            with tf.control_dependencies([] if applied is None else [applied]):
                return tf.convert_to_tensor(weight), optimizer._current()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        return [tuple(x.item() for x in run(np.float32(g))) for g in gradients]


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "must be an optimizer"),
        ("sgd", "must be an optimizer"),
        (object(), "must be an optimizer"),
        (keras.optimizers.SGD, "must be an optimizer"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "scales its loss already",
        ),
        (
            tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()),
            "scales its loss already",
        ),
        (keras.optimizers.SGD(loss_scale_factor=8.0), "loss_scale_factor"),
    ],
    ids=["None", "text", "object", "class", "keras", "tf_keras", "factor"],
)
def test_what_cannot_be_wrapped_is_refused(wrong, words):
    with pytest.raises(SettingError, match=words):
        ls.LossScaleOptimizer(wrong, 8)


@pytest.mark.parametrize("kind", ["keras 3", "tf_keras"])
def test_what_a_session_cannot_run_is_refused_there(kind):
    """Alone, too, these optimizers never move a weight in a graph of TensorFlow 1."""
    with tf.Graph().as_default():
        weight = tf.Variable(1.0)
        optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
        with pytest.raises(ContextError, match=r"tf_keras\.optimizers\.legacy"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])


def test_the_loss_scale_cannot_be_none_and_nothing_else_either():
    descent = v1.train.GradientDescentOptimizer(1.0)
    for wrapper in (ls.LossScaleOptimizer, ls.MixedPrecisionLossScaleOptimizer):
        with pytest.raises(ValueError, match="cannot be None"):
            wrapper(descent, None)
        with pytest.raises(ValueError, match="A loss scale is"):
            wrapper(descent, "Dynamic")
    with pytest.raises(SettingError, match="LossScaleOptimizer wraps Keras's too"):
        ls.MixedPrecisionLossScaleOptimizer(keras.optimizers.SGD(), 8)


@kinds
def test_what_scales_its_loss_already_is_refused(kind):
    """The scale inside would never hear of the steps that the one outside skips."""
    inner = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 4)
    with pytest.raises(SettingError, match="scales its loss already"):
        ls.LossScaleOptimizer(inner, 8)


def test_the_wrapper_of_tensorflow_is_refused():
    descent = v1.train.GradientDescentOptimizer(1.0)
    original = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(descent, 4)
    with pytest.raises(SettingError, match="scales its loss already"):
        ls.MixedPrecisionLossScaleOptimizer(original, 8)


@kinds
def test_an_optimizer_is_not_wrapped_twice(kind):
    optimizer = OPTIMIZERS[kind](1.0)
    ls.LossScaleOptimizer(optimizer, 4)
    with pytest.raises(SettingError, match="already wrapped"):
        ls.LossScaleOptimizer(optimizer, 8)


@kinds
def test_an_optimizer_whose_scale_was_refused_can_still_be_wrapped(kind):
    optimizer = OPTIMIZERS[kind](1.0)
    with pytest.raises(SettingError, match="A loss scale is"):
        ls.LossScaleOptimizer(optimizer, "Dynamic")
    with pytest.raises(TypeError, match="count_skipped_steps"):
        ls.LossScaleOptimizer(optimizer, 8, count_skipped_steps=1)
    assert 8.0 == float(ls.LossScaleOptimizer(optimizer, 8).loss_scale())


@pytest.mark.parametrize("kind", ["keras 3", "tf_keras", "tf_keras legacy"])
def test_an_optimizer_with_one_inside_that_scales_nothing_is_wrapped(kind):
    class Outer(OPTIMIZERS[kind]):
        def __init__(self, rate):
            super().__init__(rate)
            self.inner_optimizer = OPTIMIZERS[kind](rate)

    weight = variable(kind, 5.0)
    optimizer = ls.LossScaleOptimizer(Outer(1.0), 8)
    optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
    assert 2.0 == value(weight)


@pytest.mark.parametrize("name", ["DynamicLossScale", "FixedLossScale"])
def test_a_loss_scale_of_tensorflow_is_told_from_ours(name):
    original = getattr(v1.mixed_precision, name)(8.0)
    descent = v1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(SettingError, match="TensorFlow's own") as caught:
        ls.LossScaleOptimizer(descent, original)
    assert f"{name}.from_config(" in str(caught.value)
    converted = getattr(ls, name).from_config(original.get_config())
    assert 8.0 == float(ls.LossScaleOptimizer(descent, converted).loss_scale())


@pytest.mark.parametrize("flag", [np.inf, np.nan, "yes"])
def test_a_flag_that_is_none_names_the_argument(flag):
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2)
    with pytest.raises(GradientError, match="finite_grads must be one boolean"):
        manager.update_loss_scale(flag)
    manager.update_loss_scale((True,))
    assert 1 == int(manager.good_steps)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_custom_scale_in_float64_is_cast(mode):
    class Own(ls.LossScale):
        def __call__(self):
            return tf.constant(8.0, tf.float64)

        def update(self, grads):
            del grads
            return None, True

        def get_config(self):
            return {}

    weight = tf.Variable(5.0)
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), Own())

    def step():
        optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])

    (tf.function(step) if mode == "function" else step)()
    assert 2.0 == float(weight)


@kinds
@pytest.mark.parametrize("forgotten", ["get_unscaled_gradients", "get_scaled_loss"])
def test_a_call_that_was_forgotten_is_named(kind, forgotten):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
    if forgotten == "get_scaled_loss":
        optimizer.get_unscaled_gradients([tf.constant(1.0)])
    else:
        optimizer.get_scaled_loss(tf.constant(1.0))
    with pytest.warns(UserWarning, match=rf"without {forgotten}\(\)") as record:
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert __file__ == record[0].filename


@kinds
def test_a_loop_that_scales_and_unscales_is_not_warned(kind):
    weight = variable(kind, 1.0)
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), 8)
    optimizer.apply_gradients([(tf.constant(0.5), weight)])  # by one's own means
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.convert_to_tensor(weight) * 0.5)
    gradients = tape.gradient(loss, [value_of(weight)])
    unscaled = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients([(unscaled[0], weight)])
    optimizer.minimize(lambda: 0.5 * weight, var_list=[weight])
    assert -0.5 == value(weight)


def value_of(weight):
    """Return the `tf.Variable` of a variable."""
    return weight.value if isinstance(weight, keras.Variable) else weight


def test_gradients_that_are_none_are_named():
    weight = tf.Variable(1.0, name="kernel")
    optimizer = ls.LossScaleOptimizer(
        v1.train.GradientDescentOptimizer(1.0), ls.DynamicLossScale(8, 1)
    )
    with pytest.raises(GradientError, match="kernel"):
        optimizer.apply_gradients([(tf.constant(1), weight)])
    assert 8.0 == float(optimizer.loss_scale())


@kinds
@pytest.mark.parametrize("optimizers", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_whatever_gradients_arrive_weights_and_slots_stay_finite(kind, optimizers):
    rng = np.random.default_rng(7)
    weight = variable(kind, np.ones(6, np.float32))
    optimizer = ls.LossScaleOptimizer(
        optimizers[kind](1e-3), ls.DynamicLossScale(2.0**15, 3, floor=2.0**-20)
    )

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    awful = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 7e28, 1e-45, 0.0, -0.0])
    for _ in range(300):
        gradient = rng.standard_normal(6)
        if rng.random() < 0.5:
            gradient[rng.integers(6)] = rng.choice(awful)
        step(tf.constant(gradient, tf.float32))
        assert np.isfinite(value(weight)).all()
        assert all(np.isfinite(np.asarray(x)).all() for x in state_of(optimizer))
        assert 2.0**-20 <= float(optimizer.loss_scale()) < np.inf


@kinds
def test_rows_are_added_up_in_float16_for_a_float16_variable(kind):
    table = variable(kind, [[1.0], [2.0]], "float16")
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))
    rows = np.full((271, 1), 20.0, np.float16)
    rows[0] = 60000.0
    indices = tf.zeros(len(rows), tf.int32)
    sparse = tf.IndexedSlices(tf.constant(rows), indices, tf.constant([2, 1]))
    optimizer.apply_gradients([(sparse, table)])
    assert [[1.0], [2.0]] == value(table)


@kinds
def test_a_gradient_of_another_shape_changes_nothing(kind):
    first, second = variable(kind, [1.0, 1.0]), variable(kind, [1.0, 1.0])
    optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8, 1))
    with pytest.raises(StructureError, match=r"shape \(3,\)"):
        optimizer.apply_gradients([(tf.ones(2), first), (tf.ones(3), second)])
    wide = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([0]))
    with pytest.raises(StructureError, match="shape"):
        optimizer.apply_gradients([(tf.ones(2), first), (wide, second)])
    assert ([1.0, 1.0], 8.0) == (value(first), float(optimizer.loss_scale()))


def test_an_optimizer_that_changes_gradients_after_the_check_is_refused():
    descent = tf_keras.optimizers.legacy.SGD(1.0, gradient_transformers=[list])
    with pytest.raises(SettingError, match="after the check"):
        ls.LossScaleOptimizer(descent, 8)


@pytest.mark.parametrize("factor", [np.nan, 0.5])
def test_what_an_aggregator_returns_is_checked_and_applied_as_it_is(factor):
    def aggregate(pairs):
        return [(gradient * factor, weight) for gradient, weight in pairs]

    weight = tf.Variable(1.0)
    descent = tf_keras.optimizers.legacy.SGD(1.0, gradient_aggregator=aggregate)
    optimizer = ls.LossScaleOptimizer(descent, ls.DynamicLossScale(2.0))
    optimizer.minimize(lambda: weight * 1.0, [weight])
    expected = (1.0, 1.0) if np.isnan(factor) else (0.5, 2.0)
    assert expected == (float(weight), float(optimizer.loss_scale()))


def test_settings_are_not_set_in_vain_and_iterations_can_be_set():
    optimizer = ls.LossScaleOptimizer(tf_keras.optimizers.SGD(1.0), 8)
    for name in ("nesterov", "momentum"):
        with pytest.raises(AttributeError, match=f"inner_optimizer.{name}"):
            setattr(optimizer, name, 0.5)
    optimizer.iterations = tf.Variable(7, dtype=tf.int64)
    assert 7 == value(optimizer.inner_optimizer.iterations)
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 4
    optimizer.note = "of one's own"
    assert "of one's own" == optimizer.note


def test_arguments_that_a_keras_optimizer_does_not_take_are_refused():
    weight = keras.Variable(1.0)
    optimizer = ls.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8)
    with pytest.raises(TypeError, match="gate_gradients"):
        optimizer.minimize(lambda: 1.0 * weight, [weight], gate_gradients=1)
    optimizer.minimize(lambda: 1.0 * weight, [weight], grad_loss=tf.constant(3.0))
    assert -0.5 == value(weight)


def test_the_gradient_of_the_loss_may_be_given_for_a_float16_loss():
    with tf.Graph().as_default(), v1.Session() as session:
        weight = tf.Variable(5.0)
        optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 10)
        loss = tf.cast(weight, tf.float16)
        ((plain, _),) = optimizer.compute_gradients(loss, [weight])
        ((tripled, _),) = optimizer.compute_gradients(
            loss, [weight], grad_loss=tf.constant(3.0, tf.float16)
        )
        (scaled,) = tf.gradients(optimizer.get_scaled_loss(loss), [weight])
        session.run(v1.global_variables_initializer())
        assert [1.0, 3.0, 10.0] == session.run([plain, tripled, scaled])


def test_a_manager_may_return_a_tensor_in_a_graph():
    class Doubling(ls.LossScaleManager):
        def __init__(self):
            self.value = tf.Variable(8.0, trainable=False)

        def get_loss_scale(self):
            return tf.convert_to_tensor(self.value)

        def update_loss_scale(self, finite_grads):
            return tf.identity(self.value.assign(self.value * 2.0))

    with tf.Graph().as_default(), v1.Session() as session:
        weight, manager = tf.Variable(1.0), Doubling()
        optimizer = ls.LossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), manager
        )
        train = optimizer.apply_gradients([(tf.constant(0.5), weight)])
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert 16.0 == session.run(manager.value)


def test_the_op_of_a_loss_scale_of_ones_own_runs_in_a_session():
    class Counting(ls.LossScale):
        def __init__(self):
            self.asked = tf.Variable(0, trainable=False)

        def __call__(self):
            return tf.constant(8.0)

        def update(self, grads):
            return self.asked.assign_add(1), tf.constant(True)

        def get_config(self):
            return {}

    with tf.Graph().as_default(), v1.Session() as session:
        weight, loss_scale = tf.Variable(1.0), Counting()
        optimizer = ls.LossScaleOptimizer(
            v1.train.GradientDescentOptimizer(1.0), loss_scale
        )
        train = optimizer.apply_gradients([(tf.constant(0.5), weight)])
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        assert 3 == session.run(loss_scale.asked)


def test_gradients_come_in_the_dtype_of_their_variable_and_are_checked():
    half = tf.Variable(1.0, dtype=tf.float16)
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 2.0**17)
    scaled = optimizer.get_scaled_loss(tf.constant(2.0, tf.float16))
    assert (tf.float32, 2.0**18) == (scaled.dtype, float(scaled))
    optimizer = ls.LossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 8)
    ((gradient, _),) = optimizer.compute_gradients(lambda: half * 2.0, [half])
    assert tf.float16 == gradient.dtype
    with pytest.raises(GradientError):
        optimizer.get_unscaled_gradients([tf.constant(1)])


def test_autograph_leaves_our_methods_alone():
    for kind, names in (
        (ls.LossScaleOptimizer, ("minimize", "apply_gradients", "get_scaled_loss")),
        (ls.DynamicLossScale, ("update", "__call__")),
        (ls.ExponentialUpdateLossScaleManager, ("update_loss_scale",)),
    ):
        for name in names:
            method = vars(kind)[name]  # decorated here, not only inherited
            assert callable(method.__wrapped__)
            assert "autograph" in method.__code__.co_filename
