"""The installed originals and ours, side by side on the same random steps.

`tf.compat.v1.mixed_precision` and tf_keras still have live classes. Settings,
structures of gradients and overflows are drawn at random from fixed seeds, and
everything that can be read is compared bit for bit after every step. The last tests
show what is meant to differ.
"""

import random

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.sequences import draw, overflow_pattern  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

originals = tf.compat.v1.mixed_precision
BAD_VALUES = (np.nan, np.inf, -np.inf)
DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
POWERS = (2.0, 4.0, 16.0)
OTHERS = (1.7, 3.0, 1.1, 1.0000001, 10.0)
HUGE = 3e38
"""Finite in float32, and twice that is not."""


def random_settings(rng, multipliers=POWERS + OTHERS):
    return draw(
        rng,
        initial_loss_scale=(0.1, 1.0, 1.5, 7.3, 2.0**15, 1e30, 3e38),
        increment_period=(1, 2, 3, 5),
        multiplier=multipliers,
    )


def random_structure(rng, depth=0):
    """Return a function that makes a structure of gradients around one value."""
    kind = rng.choice(("leaf", "leaf", "sparse", "list", "tuple", "dict"))
    if depth < 2 and kind in {"list", "tuple", "dict"}:
        parts = [random_structure(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        others = [rng.choice((None, None, np.ones(2, np.float32))) for _ in range(2)]
        if kind == "dict":
            return lambda x: (
                {"other": others[0]}
                | {f"part {place}": part(x) for place, part in enumerate(parts)}
            )
        wrap = list if kind == "list" else tuple
        return lambda x: wrap([*others, *(part(x) for part in parts)])
    dtype, size, place = rng.choice(DTYPES), rng.randint(1, 4), rng.randint(0, 3)
    if kind == "sparse":
        shape = rng.choice((None, (9, 2)))
        return lambda x: tf.IndexedSlices(
            _with(x, dtype, (size, 2), place),
            tf.range(size),
            None if shape is None else tf.constant(shape),
        )
    return lambda x: _with(x, dtype, (size,), place)


def _with(value, dtype, shape, place):
    """Return ones with the value in one place."""
    count = int(np.prod(shape))
    chosen = tf.reshape(tf.one_hot(place % count, count, True, False), shape)
    return tf.where(chosen, tf.cast(value, dtype), tf.ones((), dtype))


def values_for(rng, flags):
    """Return a gradient for each step, finite or not."""
    return [rng.choice((1.0, 0.0, -2.5) if flag else BAD_VALUES) for flag in flags]


def state_of(loss_scale, update):
    """Return all there is to see of either class after an update."""
    good = getattr(loss_scale, "_num_good_steps", None)
    good = loss_scale.good_steps if good is None else good
    return float(loss_scale()), int(good), bool(update[1])


# Loss scales


def test_a_thousand_random_sequences_eagerly():
    rng = random.Random(11)
    for _ in range(1000):
        config = random_settings(rng)
        theirs, ours = (
            originals.DynamicLossScale(**config),
            ls.DynamicLossScale(**config),
        )
        assert theirs.get_config() == ours.get_config()
        structure = random_structure(rng)
        flags = overflow_pattern(rng, rng.randint(3, 6))
        for value in values_for(rng, flags):
            grads = structure(np.float32(value))
            expected = state_of(theirs, theirs.update(grads))
            update = ours.update(grads)
            assert update[0] is None
            assert expected == state_of(ours, update), (config, flags)


def abreast(loss_scales, structures):
    """Return a function that updates many loss scales, each from its own structure."""

    @tf.function(autograph=False)
    def step(values):
        found = []
        pairs = zip(loss_scales, structures, tf.unstack(values), strict=True)
        for loss_scale, structure, value in pairs:
            update, should_apply = loss_scale.update(structure(value))
            with tf.control_dependencies([update]):
                good = getattr(loss_scale, "_num_good_steps", None)
                good = loss_scale.good_steps if good is None else good
                found.append((loss_scale(), tf.identity(good), should_apply))
        return [tf.stack(column) for column in zip(*found, strict=True)]

    return step


def restart(loss_scales, scales):
    for loss_scale, scale in zip(loss_scales, scales, strict=True):
        theirs = isinstance(loss_scale, originals.DynamicLossScale)
        variables = (
            (loss_scale._current_loss_scale, loss_scale._num_good_steps)
            if theirs
            else (loss_scale.current_loss_scale, loss_scale.good_steps)
        )
        variables[0].assign(scale)
        variables[1].assign(0)


def test_a_thousand_random_sequences_in_functions():
    """With powers of two: for others, a graph of the original does not divide."""
    rng = random.Random(12)
    lanes = 50
    configs = [random_settings(rng, POWERS) for _ in range(lanes)]
    structures = [random_structure(rng) for _ in range(lanes)]
    pair = [
        [make(**config) for config in configs]
        for make in (originals.DynamicLossScale, ls.DynamicLossScale)
    ]
    steps = [abreast(loss_scales, structures) for loss_scales in pair]
    for _ in range(20):
        scales = [random_settings(rng)["initial_loss_scale"] for _ in range(lanes)]
        for loss_scales in pair:
            restart(loss_scales, scales)
        values = [values_for(rng, overflow_pattern(rng, 10)) for _ in range(lanes)]
        for column in np.array(values, np.float32).T:
            expected, found = (step(tf.constant(column)) for step in steps)
            for want, have in zip(expected, found, strict=True):
                assert want.numpy().tolist() == have.numpy().tolist()


def test_a_function_divides_as_the_original_does_eagerly():
    rng = random.Random(13)
    lanes = 40
    configs = [random_settings(rng, OTHERS) for _ in range(lanes)]
    structures = [random_structure(rng) for _ in range(lanes)]
    theirs = [originals.DynamicLossScale(**config) for config in configs]
    ours = [ls.DynamicLossScale(**config) for config in configs]
    step = abreast(ours, structures)
    for _ in range(5):
        scales = [random_settings(rng)["initial_loss_scale"] for _ in range(lanes)]
        restart(theirs, scales)
        restart(ours, scales)
        values = [values_for(rng, overflow_pattern(rng, 8)) for _ in range(lanes)]
        for column in np.array(values, np.float32).T:
            found = [part.numpy().tolist() for part in step(tf.constant(column))]
            expected = [
                state_of(original, original.update(value))
                for original, value in zip(theirs, column, strict=True)
            ]
            assert expected == list(zip(*found, strict=True))


def test_fixed_scales_are_told_apart_by_nothing():
    rng = random.Random(14)
    for _ in range(100):
        value = rng.choice((1, 1.0, 3.3, 1000, 2.0**15, 3e38))
        theirs, ours = originals.FixedLossScale(value), ls.FixedLossScale(value)
        grads = random_structure(rng)(np.float32(rng.choice((1.0, *BAD_VALUES))))
        assert theirs.update(grads) == ours.update(grads) == (None, True)
        assert float(theirs()) == float(ours())
        assert (theirs.get_config(), repr(theirs)) == (ours.get_config(), repr(ours))


# Optimizers of TensorFlow 1

INNER = {
    "descent": tf.compat.v1.train.GradientDescentOptimizer,
    "momentum": lambda rate: tf.compat.v1.train.MomentumOptimizer(rate, 0.9),
    "adam": tf.compat.v1.train.AdamOptimizer,
}


class Training:
    """Two variables, an optimizer around the same inner one, and a step counter."""

    def __init__(self, wrap, inner, loss_scale, **options):
        # The optimizers list their slots by the names of these.
        self.dense = tf.Variable([1.0, -2.0, 0.5], name="dense")
        table = np.arange(12, dtype=np.float32).reshape(6, 2)
        self.table = tf.Variable(table, name="table")
        self.inner = inner
        self.optimizer = wrap(inner, loss_scale, **options)
        self.loss_scale = loss_scale
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def apply(self, grads):
        pairs = list(zip(grads, (self.dense, self.table), strict=True))
        assert self.optimizer.apply_gradients(pairs, global_step=self.steps) is None

    def minimize(self, factors, rows):
        def loss():
            chosen = tf.gather(self.table, rows)
            return tf.reduce_sum(self.dense * factors) + tf.reduce_sum(chosen**2)

        self.optimizer.minimize(
            loss, global_step=self.steps, var_list=[self.dense, self.table]
        )

    def state(self):
        """Return every bit there is: weights, slots, steps, scale and counter."""
        found = [self.dense, self.table, self.steps, *self.inner.variables()]
        if isinstance(self.loss_scale, originals.DynamicLossScale):
            found += [self.loss_scale._current_loss_scale]
            found += [self.loss_scale._num_good_steps]
        elif isinstance(self.loss_scale, ls.DynamicLossScale):
            found += [self.loss_scale.current_loss_scale, self.loss_scale.good_steps]
        return [variable.numpy().tobytes() for variable in found]


def random_gradients(rng, numbers, finite):
    """Return a dense and a sparse gradient, one of them None or bad at times."""
    dense = numbers.normal(size=3).astype(np.float32)
    rows = numbers.normal(size=(2, 2)).astype(np.float32)
    if not finite:
        broken = rng.choice((dense, rows))
        broken.flat[rng.randrange(broken.size)] = rng.choice(BAD_VALUES)
    indices = tf.constant(rng.sample(range(6), 2))
    pair = tf.constant(dense), tf.IndexedSlices(tf.constant(rows), indices, [6, 2])
    if np.isfinite(dense).all() and rng.random() < 0.2:
        return None, pair[1]
    return pair


@pytest.mark.parametrize("inner", INNER)
def test_random_training_with_an_optimizer_of_tensorflow_1(inner):
    rng, numbers = random.Random(15), np.random.default_rng(15)
    for _ in range(70):
        config = random_settings(rng)
        theirs = Training(
            originals.MixedPrecisionLossScaleOptimizer,
            INNER[inner](0.1),
            originals.DynamicLossScale(**config),
        )
        ours = Training(
            ls.MixedPrecisionLossScaleOptimizer,
            INNER[inner](0.1),
            ls.DynamicLossScale(**config),
        )
        by_loss = rng.random() < 0.5
        for finite in overflow_pattern(rng, 5):
            if by_loss:
                factors, _ = random_gradients(rng, numbers, finite=True)
                factors = tf.ones(3) if factors is None else factors
                factors = factors if finite else factors * rng.choice(BAD_VALUES)
                rows = tf.constant(rng.sample(range(6), 3))
                for training in (theirs, ours):
                    training.minimize(factors, rows)
            else:
                grads = random_gradients(rng, numbers, finite)
                for training in (theirs, ours):
                    training.apply(grads)
            assert theirs.state() == ours.state(), config


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("multiplier", [2.0, 16.0])
def test_a_long_training_in_a_function(inner, multiplier):
    rng, numbers = random.Random(18), np.random.default_rng(18)
    config = random_settings(rng, (multiplier,))
    pair = [
        Training(wrap, INNER[inner](0.1), make(**config))
        for wrap, make in (
            (originals.MixedPrecisionLossScaleOptimizer, originals.DynamicLossScale),
            (ls.MixedPrecisionLossScaleOptimizer, ls.DynamicLossScale),
        )
    ]
    steps = [tf.function(training.minimize, autograph=False) for training in pair]
    for finite in [True, False] * 5 + overflow_pattern(rng, 30):
        factors = tf.constant(numbers.normal(size=3), tf.float32)
        factors = factors if finite else factors * rng.choice(BAD_VALUES)
        rows = tf.constant(rng.sample(range(6), 3))
        for step in steps:
            step(factors, rows)
        assert pair[0].state() == pair[1].state()


def test_a_fixed_scale_applies_bad_gradients_only_when_asked_to():
    rng, numbers = random.Random(16), np.random.default_rng(16)
    descent = INNER["momentum"]
    mixed = ls.MixedPrecisionLossScaleOptimizer
    for _ in range(20):
        theirs = Training(
            originals.MixedPrecisionLossScaleOptimizer,
            descent(0.1),
            originals.FixedLossScale(8.0),
        )
        asked = Training(
            mixed, descent(0.1), ls.FixedLossScale(8.0), skip_nonfinite=False
        )
        safe = Training(mixed, descent(0.1), ls.FixedLossScale(8.0))
        flags = [True, *overflow_pattern(rng, 4), False]
        for finite in flags:
            grads = random_gradients(rng, numbers, finite)
            for training in (theirs, asked, safe):
                training.apply(grads)
            assert theirs.state() == asked.state()
            weights = np.concatenate([safe.dense, tf.reshape(safe.table, [-1])])
            assert np.isfinite(weights).all()
        assert sum(flags) == int(safe.steps)
        assert len(flags) == int(theirs.steps)


# Optimizers of tf_keras

KERAS = {
    "momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf_keras.optimizers.Adam(0.1),
}


def keras_state(optimizer, inner, weight, loss_scale, counter):
    # The counter of steps is among the variables of the optimizer inside.
    found = [weight, loss_scale, counter, *inner.variables]
    assert int(optimizer.iterations) == int(inner.iterations)
    return [np.asarray(variable).tobytes() for variable in found]


@pytest.mark.parametrize("kind", KERAS)
def test_random_training_with_an_optimizer_of_tf_keras(kind):
    rng, numbers = random.Random(17), np.random.default_rng(17)
    for _ in range(50):
        # Above 2**126 ours takes every step for a bad one: row T14 of the page.
        scale, period = rng.choice((1.0, 7.3, 2.0**15, 1e30)), rng.choice((1, 2, 3))
        inner = KERAS[kind](), KERAS[kind]()
        weights = tf.Variable([1.0, -2.0, 0.5]), tf.Variable([1.0, -2.0, 0.5])
        theirs = tf_keras.mixed_precision.LossScaleOptimizer(
            inner[0], initial_scale=scale, dynamic_growth_steps=period
        )
        loss_scale = ls.DynamicLossScale(scale, period, 2)
        ours = ls.LossScaleOptimizer(inner[1], loss_scale, count_skipped_steps=True)
        for finite in overflow_pattern(rng, 6):
            factors = tf.constant(numbers.normal(size=3), tf.float32)
            factors = factors if finite else factors * rng.choice(BAD_VALUES)
            for optimizer, weight in zip((theirs, ours), weights, strict=True):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(factors * weight**2)
                    scaled = optimizer.get_scaled_loss(loss)
                grads = optimizer.get_unscaled_gradients(
                    tape.gradient(scaled, [weight])
                )
                optimizer.apply_gradients(zip(grads, [weight], strict=True))
            expected = keras_state(
                theirs, inner[0], weights[0], theirs.loss_scale, theirs.dynamic_counter
            )
            found = keras_state(
                ours, inner[1], weights[1], loss_scale(), loss_scale.good_steps
            )
            assert expected == found, (scale, period)


# What is meant to differ


def both(*arguments):
    return originals.DynamicLossScale(*arguments), ls.DynamicLossScale(*arguments)


def test_an_update_returns_none_where_the_original_returned_its_counter():
    theirs, ours = both(8, 3, 2)
    grads = [tf.constant(1.0)]
    assert isinstance(theirs.update(grads)[0], tf.Variable)
    assert ours.update(grads)[0] is None


def test_a_graph_divides_where_the_original_multiplied_by_a_rounded_reciprocal():
    values = []
    for loss_scale in both(1000, 1, 1.7):
        step = abreast([loss_scale], [lambda value: [value]])
        for _ in range(4):
            step(tf.constant([np.nan]))
        values.append(float(loss_scale()))
    exact = np.float32(1000)
    for _ in range(4):
        exact /= np.float32(1.7)
    assert values[0] != exact == values[1]


def test_rows_of_one_index_that_overflow_as_a_sum_are_bad_as_they_were_to_2_4():
    grads = [tf.IndexedSlices(tf.constant([HUGE, HUGE]), tf.constant([1, 1]))]
    assert [True, False] == [bool(made.update(grads)[1]) for made in both(8, 1, 2)]


@pytest.mark.parametrize("wrong", [tf.constant(1), tf.constant(True)])
def test_a_gradient_that_is_no_float_is_a_type_error(wrong):
    theirs, ours = both(8, 1, 2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        theirs.update([wrong])
    with pytest.raises(TypeError, match="The gradient"):
        ours.update([wrong])


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -8.0])
def test_settings_that_break_training_are_refused(value):
    originals.DynamicLossScale(value)
    with pytest.raises(SettingError):
        ls.DynamicLossScale(value)


def test_a_scale_does_not_move_in_a_step_that_raises():
    weight = tf.Variable(1.0)
    descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    theirs, ours = both(8, 1, 2)
    wrapped = originals.MixedPrecisionLossScaleOptimizer(descent, theirs)
    with pytest.raises(ValueError, match="No gradients"):
        wrapped.apply_gradients([(None, weight)])
    with pytest.raises(ValueError, match="no gradient"):
        ls.LossScaleOptimizer(descent, ours).apply_gradients([(None, weight)])
    assert (16.0, 8.0) == (float(theirs()), float(ours()))


def test_a_loss_scale_of_ones_own_is_asked_which_the_original_never_did():
    def refusing(base):
        class Refusing(base):
            def __call__(self):
                return tf.constant(4.0)

            def update(self, grads):
                return None, tf.constant(False)

            def get_config(self):
                return {}

        return Refusing()

    found = []
    for wrapper, base in (
        (originals.MixedPrecisionLossScaleOptimizer, originals.LossScale),
        (ls.MixedPrecisionLossScaleOptimizer, ls.LossScale),
    ):
        weight = tf.Variable(1.0)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = wrapper(descent, refusing(base))
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
        found.append(float(weight))
    assert [0.0, 1.0] == found


def test_weights_in_float16_are_trained_where_the_original_raised():
    def minimize(wrapper):
        weight = tf.Variable(1.0, dtype=tf.float16)
        descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        wrapper(descent, 8).minimize(lambda: 0.5 * weight, var_list=[weight])
        return float(weight)

    with pytest.raises(tf.errors.InvalidArgumentError):
        minimize(originals.MixedPrecisionLossScaleOptimizer)
    assert 0.5 == minimize(ls.MixedPrecisionLossScaleOptimizer)
