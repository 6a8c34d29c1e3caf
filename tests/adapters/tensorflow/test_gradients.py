"""Gradients of every kind that TensorFlow has, in every mode."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_modes import MODES  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale import Fixed, ScaleState  # noqa: E402
from lossscale.errors import GradientError, StructureError  # noqa: E402

every_mode = pytest.mark.parametrize("mode", MODES)
HUGE = 1.8e19
"""Its square is finite in float32, and that of twice as much is not."""


def is_finite_step(mode, build_gradient, value, scale=1.0):
    """Return whether `unscale` finds a gradient, made from a value, finite."""

    def build():
        state = ls.init(Fixed(scale))
        return lambda x: ls.unscale([build_gradient(x)], state)[1].finite

    with MODES[mode](build, np.float32(value)) as run:
        return bool(run(np.float32(value)))


def slices(x, indices=(0, 2), dense_shape=(4, 2)):
    rows = tf.stack([tf.stack([x, 1.0])] + [tf.ones(2)] * (len(indices) - 1))
    shape = None if dense_shape is None else tf.constant(dense_shape)
    return tf.IndexedSlices(rows, tf.constant(indices), shape)


@every_mode
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dense_shape", [(4, 2), None])
def test_the_values_of_sparse_gradients_are_checked(mode, value, dense_shape):
    def made(x):
        return slices(x, dense_shape=dense_shape)

    assert not is_finite_step(mode, made, value)
    assert is_finite_step(mode, made, 1.0)


@every_mode
def test_rows_of_the_same_index_must_be_squarable_as_a_sum(mode):
    """Optimizers add such rows up after the check."""

    def doubled(x):
        return tf.IndexedSlices(tf.stack([x, x]), tf.constant([3, 3]))

    def apart(x):
        return tf.IndexedSlices(tf.stack([x, 0.0, x]), tf.constant([3, 1, 2]))

    assert not is_finite_step(mode, doubled, HUGE)
    assert is_finite_step(mode, doubled, HUGE / 2)
    assert is_finite_step(mode, apart, HUGE)

    def shuffled(x):
        return tf.IndexedSlices(tf.stack([x, 0.0, x]), tf.constant([3, 1, 3]))

    assert not is_finite_step(mode, shuffled, HUGE)
    assert is_finite_step(mode, shuffled, HUGE / 2)


def test_a_sparse_gradient_without_rows_is_finite():
    empty = tf.IndexedSlices(tf.zeros((0, 3)), tf.zeros((0,), tf.int64))
    assert bool(ls.unscale([empty], ls.init(Fixed(8.0)))[1].finite)


@every_mode
def test_a_half_precision_sum_of_rows_is_that_of_half_precision(mode):
    def doubled(x):
        rows = tf.cast(tf.stack([x, x]), tf.float16)
        return tf.IndexedSlices(rows, tf.constant([3, 3]))

    def build():
        loss_scale = ls.DynamicLossScale()
        return lambda x: loss_scale.update([doubled(x)])[1]

    with MODES[mode](build, np.float32(1)) as run:
        assert not bool(run(np.float32(60000.0)))
        assert bool(run(np.float32(30000.0)))


def test_sparse_gradients_stay_sparse_and_are_divided():
    state = ls.init(Fixed(4.0))
    given = slices(tf.constant(8.0))
    (found,), signal = ls.unscale([given], state, measure=("amax", "norm"))
    assert isinstance(found, tf.IndexedSlices)
    assert [[2.0, 0.25], [0.25, 0.25]] == found.values.numpy().tolist()
    assert given.indices is found.indices
    assert given.dense_shape is found.dense_shape
    assert 8.0 == float(signal.amax)
    assert np.sqrt(4 + 3 / 16) == pytest.approx(float(signal.norm))


@every_mode
def test_ragged_gradients_are_checked_by_their_values_and_stay_ragged(mode):
    def made(x):
        return tf.RaggedTensor.from_row_lengths(tf.stack([x, 1.0, 2.0]), [1, 0, 2])

    assert is_finite_step(mode, made, 1.0)
    assert not is_finite_step(mode, made, np.nan)
    if mode == "eager":
        (found,), _ = ls.unscale([made(tf.constant(8.0))], ls.init(Fixed(4.0)))
        assert [[2.0], [], [0.25, 0.5]] == found.to_list()


@every_mode
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", range(4))
def test_one_bad_value_among_mixed_dtypes_is_enough(mode, bad, place):
    kinds = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

    def made(x):
        ones = [tf.ones(3, kind) for kind in kinds]
        ones[place] = tf.cast(tf.stack([1.0, x]), kinds[place])
        return {"a": [ones[0], None], "b": (ones[1], {"c": ones[2:]})}

    assert not is_finite_step(mode, made, bad)
    assert is_finite_step(mode, made, 1.0)


@every_mode
def test_bfloat16_is_divided_in_float32(mode):
    def build():
        state = ls.init(Fixed(3.0))
        return lambda x: ls.unscale([tf.cast(x, tf.bfloat16)], state)[0][0]

    with MODES[mode](build, np.float32(1)) as run:
        assert np.float32(1) * (np.float32(1) / np.float32(3)) == run(np.float32(1))


def test_float64_beyond_float32_is_finite():
    signal = ls.unscale([tf.constant(1e150, tf.float64)], ls.init(Fixed(1.0)))[1]
    assert bool(signal.finite)


@pytest.mark.parametrize(
    "wrong",
    [1, True, 1j, "text", [1, 2]],
    ids=["int", "bool", "complex", "text", "list of ints"],
)
def test_what_is_no_float_is_named_and_changes_nothing(wrong):
    loss_scale = ls.DynamicLossScale(8, 1)
    for grads in ({"table": wrong}, {"table": tf.constant(wrong)}):
        with pytest.raises(GradientError, match=r"gradient at \['table'\].*expected"):
            loss_scale.update(grads)
        with pytest.raises(TypeError, match=r"\['table'\]"):
            ls.unscale(grads, ls.init(Fixed(1.0)))
        with tf.Graph().as_default(), pytest.raises(GradientError):
            ls.DynamicLossScale().update({"table": wrong})
    assert 8.0 == float(loss_scale())


def test_other_things_that_are_no_gradients_are_named():
    sparse = tf.sparse.from_dense([1.0])
    for wrong in (sparse, object(), iter([1.0]), {1.0}):
        with pytest.raises(GradientError, match=r"\[0\]"):
            ls.unscale([wrong], ls.init(Fixed(1.0)))


def test_numbers_and_numpy_arrays_are_gradients_too():
    grads = [1.0, np.ones(2, np.float16), np.float64(3)]
    found, signal = ls.unscale(grads, ls.init(Fixed(2.0)))
    assert [0.5, [0.5, 0.5], 1.5] == [x.numpy().tolist() for x in found]
    assert bool(signal.finite)


def test_containers_that_a_module_wraps_are_nests_too():
    module = tf.Module()
    module.grads = {"a": [tf.constant(8.0)], "b": (tf.constant(4.0), None)}
    found, _ = ls.unscale(module.grads, ls.init(Fixed(4.0)))
    assert (2.0, 1.0, None) == (
        float(found["a"][0]),
        float(found["b"][0]),
        found["b"][1],
    )


@every_mode
def test_select_takes_sparse_and_ragged_leaves_whole(mode):
    def build():
        def step(finite):
            # XLA has no branches whose results differ in shape.
            indices = (0, 1) if mode == "xla" else (1,)
            new = {"s": slices(tf.constant(np.nan), indices), "d": tf.constant(1.0)}
            old = {"s": slices(tf.constant(5.0)), "d": tf.constant(2.0)}
            chosen = ls.select(finite, new, old)
            return tf.reduce_sum(chosen["s"].values), chosen["d"]

        return step

    with MODES[mode](build, True) as run:
        assert [8.0, 2.0] == [float(x) for x in run(False)]
        total, dense = run(True)
        assert np.isnan(total)
        assert 1.0 == dense


def test_select_refuses_leaves_that_would_be_stretched():
    with pytest.raises(StructureError, match=r"\['w'\]"):
        ls.select(True, {"w": tf.zeros(3)}, {"w": tf.zeros(())})
    with pytest.raises(StructureError, match="float16"):
        ls.select(True, tf.zeros(3, tf.float16), tf.zeros(3))


@pytest.mark.parametrize("flags", [[True, True], np.array([[1.0, np.nan]]), []])
def test_a_flag_of_another_shape_never_makes_a_vector_of_the_state(flags):
    from lossscale import Dynamic, Signal

    with pytest.raises(GradientError, match="one boolean"):
        ls.update(Dynamic(), ls.init(Dynamic()), Signal(flags))


def test_a_vector_of_scales_moves_by_a_vector_of_flags():
    from lossscale import Dynamic, Signal

    policy = Dynamic(growth_interval=1)
    counters = tf.zeros(3, tf.int32)
    state = ScaleState(tf.constant([8.0, 8.0, 8.0]), counters, counters)
    after = ls.update(policy, state, Signal(tf.constant([True, False, True])))
    assert [16.0, 4.0, 16.0] == after.scale.numpy().tolist()


def test_a_loss_that_is_no_float_is_refused():
    for wrong in (tf.constant(3), True, "3", 1j):
        with pytest.raises(GradientError, match="The loss is"):
            ls.scale(wrong, ls.init(Fixed(8.0)))
    assert 8.0 == float(ls.scale(1, ls.init(Fixed(8.0))))


def test_subnormal_gradients_are_counted_though_tensorflow_flushes_them():
    tiny = np.array([1e-42, 0.0, 1.0, -3e-45], np.float32)
    names = ("zero_fraction", "subnormal_fraction")
    _, signal = ls.unscale([tf.constant(tiny)], ls.init(Fixed(1.0)), measure=names)
    assert (0.25, 0.5) == (
        float(signal.zero_fraction),
        float(signal.subnormal_fraction),
    )
    nothing = ls.unscale([], ls.init(Fixed(1.0)), measure=(*names, "amax", "norm"))[1]
    found = [
        nothing.zero_fraction,
        nothing.subnormal_fraction,
        nothing.amax,
        nothing.norm,
    ]
    assert [0.0] * 4 == [float(x) for x in found]


@every_mode
def test_a_scale_whose_reciprocal_vanishes_makes_the_step_bad(mode):
    """TensorFlow takes 1 / 2**127 for zero: all gradients would be 0, and clean."""

    def build():
        weight = tf.Variable(1.0)
        loss_scale = ls.DynamicLossScale(2.0**127, 1000)
        optimizer = ls.LossScaleOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), loss_scale
        )

        def step(factor):
            applied = optimizer.minimize(lambda: factor * weight, var_list=[weight])
            with tf.control_dependencies([] if applied is None else [applied]):
                return tf.convert_to_tensor(weight), loss_scale()

        return step

    with MODES[mode](build, np.float32(0)) as run:
        seen = [[x.item() for x in run(np.float32(0.5))] for _ in range(2)]
    assert [[1.0, 2.0**126], [0.5, 2.0**126]] == seen


def test_the_largest_numbers_of_every_dtype_are_finite_rows():
    for kind in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        numbers = tf.constant([float(kind.max)], kind)
        largest = tf.IndexedSlices(numbers, tf.constant([0]))
        signal = ls.unscale([largest], ls.init(Fixed(1.0)))[1]
        # float16 rows become float32, which can square all of them.
        assert (kind == tf.float16) == bool(signal.finite)
        assert (kind != tf.float16) == bool(signal.too_large)
        assert bool(ls.DynamicLossScale().update([largest])[1])
