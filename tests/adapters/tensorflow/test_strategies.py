"""Distribution strategies: one bad replica is bad for all, all copies stay equal."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_optimizers import MOMENTUM, OPTIMIZERS, value  # noqa: E402
from helpers.tensorflow_optimizers import variable as make_variable  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale import Dynamic, Headroom  # noqa: E402
from lossscale.errors import ContextError, GradientError  # noqa: E402


def mirrored(count):
    # TensorFlow numbers the collectives of each strategy from the start, so that two
    # strategies of one process meet each other's; reducing on one device avoids it.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(count)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


STRATEGIES = {
    "mirrored 2": lambda: mirrored(2),
    "mirrored 4": lambda: mirrored(4),
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
    "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1", "CPU:2"], "CPU:0"
    ),
}
strategies = pytest.mark.parametrize("name", STRATEGIES)
compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


def replica():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def copies(variable):
    """Return all copies of a variable that a strategy keeps."""
    return [value(copy) for copy in getattr(variable, "values", [variable])]


def check_equal_copies(expected, *variables):
    for variable in variables:
        found = copies(variable)
        if found != [expected] * len(found):
            message = f"{variable.name}: expected {expected}, got the copies {found}"
            raise AssertionError(message)


def skip_what_tf_keras_refuses(name, kind):
    if name == "central storage" and kind.startswith("tf_keras"):
        pytest.skip("tf_keras has no loss scaling under CentralStorageStrategy")


def test_tf_keras_itself_refuses_the_central_storage_strategy():
    message = "Loss scaling is not supported with"
    strategy = STRATEGIES["central storage"]()
    with strategy.scope(), pytest.raises(ValueError, match=message):
        ls.LossScaleOptimizer(OPTIMIZERS["tf_keras"](1.0), 8)


@strategies
@compiled
@kinds
def test_one_bad_replica_makes_the_step_bad_for_all(name, compiled, kind):
    skip_what_tf_keras_refuses(name, kind)
    strategy = STRATEGIES[name]()
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = make_variable(kind, 10.0)
        loss_scale = ls.DynamicLossScale(8, 2, 2)
        optimizer = ls.LossScaleOptimizer(MOMENTUM[kind](1.0), loss_scale)

    def step(bad):
        wrong = tf.equal(tf.cast(replica(), tf.int32), bad)
        gradient = tf.where(wrong, np.float32(np.nan), np.float32(1 / count))
        optimizer.apply_gradients([(gradient, weight)])

    def run(bad):
        strategy.run(step, args=(bad,))

    run = tf.function(run) if compiled else run
    # Momentum 0.5: steps of 1, 1.5 and 1.75; a skipped step leaves no trace.
    expected = [(9.0, 8.0), (9.0, 4.0), (7.5, 4.0), (5.75, 8.0), (5.75, 4.0)]
    for bad, (weights, scale) in zip((-1, count - 1, -1, -1, 0), expected, strict=True):
        run(tf.constant(bad))
        check_equal_copies(weights, weight if kind != "keras 3" else weight.value)
        check_equal_copies(scale, loss_scale.current_loss_scale)


@strategies
@compiled
def test_managers_work_under_strategies_where_contribs_never_did(name, compiled):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = tf.Variable(10.0)
        step_counter = tf.Variable(
            0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        manager = ls.ExponentialUpdateLossScaleManager(8, 1, 2, 2, 0.5)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = ls.LossScaleOptimizer(descent, manager)

    def step(gradient):
        own = gradient / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(own, weight)], global_step=step_counter)

    def run(gradient):
        strategy.run(step, args=(gradient,))

    run = tf.function(run) if compiled else run
    seen = []
    for gradient in (1.0, np.inf, np.inf, 1.0):
        run(tf.constant(gradient, tf.float32))
        found = weight, manager.loss_scale, step_counter
        seen.append(tuple(value(variable) for variable in found))
        check_equal_copies(seen[-1][0], weight)
        check_equal_copies(seen[-1][1], manager.loss_scale)
    assert [(9.0, 16.0, 1), (9.0, 16.0, 1), (9.0, 8.0, 1), (8.0, 16.0, 2)] == seen


@strategies
def test_the_loss_is_scaled_in_each_replica(name):
    """minimize with a fixed scale of 10: 5 goes to 3 at rate 2."""
    strategy = STRATEGIES[name]()
    count = strategy.num_replicas_in_sync
    seen = []
    with strategy.scope():
        weight = tf.Variable(5.0)
        descent = tf.compat.v1.train.GradientDescentOptimizer(2.0)
        optimizer = ls.LossScaleOptimizer(descent, 10)

    @tf.custom_gradient
    def spy(x):
        def backward(upstream):
            tf.py_function(lambda y: seen.append(float(y)), [upstream], [])
            return upstream

        return tf.identity(x), backward

    def step():
        optimizer.minimize(lambda: spy(weight) / count, var_list=[weight])

    strategy.run(step)
    assert [float(np.float32(10) / np.float32(count))] * count == seen
    check_equal_copies(3.0, weight)


@strategies
@compiled
def test_gradients_that_overflow_as_a_sum_are_not_applied(name, compiled):
    """Small enough in every replica, too large once the optimizer adds them up."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = tf.Variable(1.0)
        table = tf.Variable([[1.0], [1.0]])
        descent = tf.compat.v1.train.GradientDescentOptimizer(1e-30)
        optimizer = ls.LossScaleOptimizer(descent, ls.DynamicLossScale(8, 2, 2))

    def step(gradient):
        sparse = tf.IndexedSlices(tf.reshape(gradient, (1, 1)), tf.constant([1]))
        optimizer.apply_gradients([(gradient, weight), (sparse, table)])

    def run(gradient):
        strategy.run(step, args=(gradient,))

    run = tf.function(run) if compiled else run
    run(tf.constant(5e28))
    alone = strategy.num_replicas_in_sync == 1
    # No lower scale makes a true gradient smaller.
    assert 8.0 == float(optimizer.loss_scale())
    assert int(alone) == value(optimizer.loss_scale.good_steps)
    assert np.isfinite(value(weight))
    assert np.isfinite(value(table)).all()
    assert alone == (value(weight) != 1.0)


@strategies
@kinds
@pytest.mark.parametrize("count_skipped", [False, True])
def test_counters_move_on_a_skipped_step_only_for_those_who_ask(
    name, kind, count_skipped
):
    skip_what_tf_keras_refuses(name, kind)
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = make_variable(kind, 10.0)
        counter = tf.Variable(
            0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        optimizer = ls.LossScaleOptimizer(
            OPTIMIZERS[kind](1.0), 8, count_skipped_steps=count_skipped
        )
    given = {"global_step": counter} if kind == "v1" else {}

    @tf.function
    def run(gradient):
        # Computed in the replica: Keras 3 cannot reduce what has no device yet.
        strategy.run(
            lambda own: optimizer.apply_gradients([(1.0 * own, weight)], **given),
            args=(gradient,),
        )

    for gradient in (1.0, np.nan, 1.0):
        run(tf.constant(gradient, tf.float32))
    found = counter if kind == "v1" else optimizer.iterations
    assert (3 if count_skipped else 2) == value(found)


@strategies
def test_an_update_wants_the_cross_replica_context_and_says_so(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        manager = ls.ExponentialUpdateLossScaleManager(8, 1)
    for update in (
        lambda: loss_scale.update([tf.constant(1.0)]),
        lambda: manager.update_loss_scale(tf.constant(True)),
    ):
        with pytest.raises(ContextError, match=r"replica context.*merge_call"):
            strategy.run(update)
    check_equal_copies(8.0, loss_scale.current_loss_scale, manager.loss_scale)


@strategies
@compiled
def test_the_advice_of_that_error_works(name, compiled):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        manager = ls.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)

    def step(bad):
        wrong = tf.equal(tf.cast(replica(), tf.int32), bad)
        grads = [tf.where(wrong, np.float32(np.inf), np.float32(1))]
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, given: loss_scale.update(given)[0], args=(grads,)
        )
        finite = tf.reduce_all(tf.math.is_finite(grads[0]))
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, given: manager.update_loss_scale(given), args=(finite,)
        )

    def run(bad):
        strategy.run(step, args=(bad,))

    run = tf.function(run) if compiled else run
    for bad, expected in ((-1, 16.0), (0, 8.0), (-1, 16.0)):
        run(tf.constant(bad))
        check_equal_copies(expected, loss_scale.current_loss_scale, manager.loss_scale)


@strategies
def test_gradients_are_applied_in_each_replica_and_nowhere_else(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = tf.Variable(1.0)
        for scale in (8, "dynamic"):
            descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            optimizer = ls.LossScaleOptimizer(descent, scale)
            with pytest.raises(ContextError, match=r"strategy\.run"):
                optimizer.apply_gradients([(tf.constant(1.0), weight)])
    check_equal_copies(1.0, weight)


@strategies
@pytest.mark.parametrize("made", ["before", "inside"])
@compiled
def test_a_scale_made_outside_the_scope_works_inside(name, made, compiled):
    strategy = STRATEGIES[name]()
    outside = ls.DynamicLossScale(8, 1, 2)
    with strategy.scope():
        loss_scale = outside if made == "before" else ls.DynamicLossScale(8, 1, 2)

        def update(gradient):
            return loss_scale.update([gradient])[1]

        update = tf.function(update) if compiled else update
        assert bool(update(tf.constant(1.0)))
        assert 16.0 == float(loss_scale())
        assert not bool(update(tf.constant(np.nan, tf.float32)))
        assert 8.0 == float(loss_scale())
    check_equal_copies(8.0, loss_scale.current_loss_scale)


@strategies
def test_a_scale_made_in_a_scope_works_after_it(name):
    with STRATEGIES[name]().scope():
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        manager = ls.ExponentialUpdateLossScaleManager(8, 1)
    loss_scale.update([tf.constant(1.0)])
    manager.update_loss_scale(True)
    check_equal_copies(16.0, loss_scale.current_loss_scale, manager.loss_scale)


@strategies
def test_flags_of_all_replicas_are_combined(name):
    """What strategy.run returned is a flag too."""
    strategy = STRATEGIES[name]()
    last = strategy.num_replicas_in_sync - 1
    with strategy.scope():
        manager = ls.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)
        good = strategy.run(lambda: tf.constant(True))
        mixed = strategy.run(lambda: tf.not_equal(tf.cast(replica(), tf.int32), last))
        manager.update_loss_scale(good)
        check_equal_copies(16.0, manager.loss_scale)
        manager.update_loss_scale(mixed)
    check_equal_copies(8.0, manager.loss_scale)


@strategies
def test_fixed_scales_work_in_either_context(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        fixed, manager = ls.FixedLossScale(8), ls.FixedLossScaleManager(8)
        assert (None, True) == fixed.update([tf.constant(1.0)])

    def step():
        assert (None, True) == fixed.update([tf.constant(1.0)])
        assert manager.update_loss_scale(tf.constant(True)) is None
        return fixed() + manager.get_loss_scale()

    results = strategy.experimental_local_results(strategy.run(step))
    assert {16.0} == {float(result) for result in results}


@strategies
def test_a_step_that_the_optimizer_refuses_leaves_the_scale_alone(name):
    strategy = STRATEGIES[name]()

    class Refuses(tf.compat.v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            message = "no device"
            raise OSError(message)

    with strategy.scope():
        weight = tf.Variable(1.0)
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        optimizer = ls.LossScaleOptimizer(Refuses(1.0), loss_scale)
    with pytest.raises(OSError, match="no device"):
        strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), weight)]))
    check_equal_copies(8.0, loss_scale.current_loss_scale)
    check_equal_copies(1.0, weight)


def test_mirrored_with_collectives_as_tensorflow_makes_it():
    """The default reduction, which the other tests do without."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(10.0)
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = ls.LossScaleOptimizer(descent, loss_scale)

    @tf.function
    def run(bad):
        def step():
            wrong = tf.equal(tf.cast(replica(), tf.int32), bad)
            gradient = tf.where(wrong, np.float32(np.nan), np.float32(0.5))
            optimizer.apply_gradients([(gradient, weight)])

        strategy.run(step)

    for bad, expected in ((-1, (9.0, 16.0)), (1, (9.0, 8.0)), (-1, (8.0, 16.0))):
        run(tf.constant(bad))
        check_equal_copies(expected[0], weight)
        check_equal_copies(expected[1], loss_scale.current_loss_scale)


@strategies
@compiled
def test_the_variables_may_be_left_to_the_tape(name, compiled):
    """Each replica's tape then names that replica's own copies."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = tf.Variable(10.0)
        descent = tf.compat.v1.train.MomentumOptimizer(1.0, 0.5)
        optimizer = ls.LossScaleOptimizer(descent, ls.DynamicLossScale(8, 1, 2))

    def run():
        strategy.run(
            lambda: optimizer.minimize(
                lambda: weight / strategy.num_replicas_in_sync * 1.0
            )
        )

    run = tf.function(run) if compiled else run
    for expected in (9.0, 7.5):
        run()
        assert expected == pytest.approx(value(weight))
        check_equal_copies(value(weight), weight)


@strategies
def test_what_is_no_gradient_is_named_across_replicas_too(name):
    with STRATEGIES[name]().scope():
        loss_scale = ls.DynamicLossScale(8, 1, 2)
        with pytest.raises(GradientError, match=r"\['table'\]"):
            loss_scale.update({"table": tf.constant(1)})
        assert bool(loss_scale.update({"table": 1.0, "none": None})[1])
    check_equal_copies(16.0, loss_scale.current_loss_scale)


@strategies
@pytest.mark.parametrize("kind", ["loss scale", "manager"])
def test_a_session_of_tensorflow_1_moves_all_copies(name, kind):
    """Nothing orders ops there but what an op says it waits for."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        strategy = STRATEGIES[name]()
        with strategy.scope():
            weight = tf.Variable(1.0)
            counter = tf.Variable(
                0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )
            scale = (
                ls.DynamicLossScale(8, 1)
                if kind == "loss scale"
                else ls.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)
            )
            optimizer = ls.LossScaleOptimizer(
                v1.train.GradientDescentOptimizer(1.0), scale, count_skipped_steps=True
            )
            fed = v1.placeholder(tf.float32, ())
            share = fed / strategy.num_replicas_in_sync
            train = strategy.run(
                lambda: optimizer.apply_gradients([(share * 1.0, weight)], counter)
            )
            read = [weight.read_value(), optimizer._current(), counter.read_value()]
            session.run(v1.global_variables_initializer())
            seen = []
            for gradient in (0.5, np.nan):
                local = strategy.experimental_local_results(train)
                session.run(local, {fed: gradient})
                seen.append(session.run(read))
    assert [[0.5, 16.0, 1], [0.5, 8.0, 2]] == seen


def test_an_update_looks_at_gradients_and_not_at_their_sum():
    with mirrored(2).scope():
        assert bool(ls.DynamicLossScale(8).update([tf.constant(3e38)])[1])


@kinds
def test_rows_that_cancel_in_one_replica_do_not_in_the_sum_of_all(kind):
    strategy = mirrored(2)
    with strategy.scope():
        table = make_variable(kind, [[1.0], [1.0]])
        optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))

    @tf.function
    def run():
        def step():
            first = tf.equal(tf.cast(replica(), tf.int32), 0)
            rows = tf.where(first, [[1.6e38], [0.0]], [[3e38], [-3e38]])
            sparse = tf.IndexedSlices(rows, tf.constant([0, 0]), tf.constant([2, 1]))
            optimizer.apply_gradients([(sparse, table)])

        strategy.run(step)

    run()
    assert [[1.0], [1.0]] == value(table)


@pytest.mark.parametrize("kind", ["v1", "keras 3"])
def test_a_third_of_the_largest_float16_number_is_rounded_up(kind):
    strategy = mirrored(3)
    with strategy.scope():
        weight = make_variable(kind, 0.0, "float16")
        optimizer = ls.LossScaleOptimizer(OPTIMIZERS[kind](1.0), ls.DynamicLossScale(8))
    largest_third = np.float16(65504) / np.float16(3)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(3) * largest_third)

    @tf.function
    def run(gradient):
        strategy.run(
            lambda own: optimizer.apply_gradients([(own * 1, weight)]), args=(gradient,)
        )

    run(tf.constant(largest_third))
    assert 0.0 == value(weight)
    run(tf.constant(np.float16(20000)))
    assert -60000.0 == value(weight)


@compiled
def test_a_policy_reads_the_largest_gradient_of_all_replicas(compiled):
    strategy = mirrored(2)
    with strategy.scope():
        weight = tf.Variable([1.0])
        descent = tf.compat.v1.train.GradientDescentOptimizer(0.0)
        policy = Headroom(Dynamic(init_scale=8.0))
        optimizer = ls.LossScaleOptimizer(descent, policy)

    def step():
        gradient = tf.gather(tf.constant([[2.0], [4.0]]), replica())
        optimizer.apply_gradients([(gradient, weight)])

    run = tf.function(strategy.run) if compiled else strategy.run
    run(step)
    check_equal_copies(4.0, optimizer.loss_scale.peak)
    check_equal_copies(16.0, optimizer.loss_scale.scale)
