"""Whatever gradients come, weights stay finite; compared with Keras's own class."""

import numpy as np
import pytest
from helpers.keras_backend import QUIET, keras, numpy
from helpers.keras_steps import Steps, check_finite

from lossscale import Dynamic
from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
START = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
BAD = np.full(4, np.inf, np.float32)
SPECIAL = np.array(
    [np.inf, -np.inf, np.nan, 3e38, -3e38, 1e38, 1e30, 1e20, 1e-40, 1e-45, 0, 1, -1],
    np.float32,
)
OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "Adafactor",
    "RMSprop",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    "Muon",
)


def is_finite(steps):
    return all(np.isfinite(each).all() for each in steps.weights())


def test_keras_writes_nan_after_a_run_of_overflows_and_this_class_does_not():
    lasted = {}
    for make in (Original, LossScaleOptimizer):
        steps = Steps(make(keras.optimizers.SGD(0.5)), START)
        overflows = 0
        while steps.scale() > 0 and overflows < 200:
            steps.step(BAD)
            overflows += 1
        # The loss times the scale is now 0 at most, and so are the gradients.
        steps.step(np.zeros(4, np.float32))
        lasted[make] = overflows, is_finite(steps)
    # From 2**15 to 0 in halves: 15 + 149 + 1, or 15 + 126 + 1 without subnormals.
    assert lasted[Original] in {(165, False), (142, False)}
    assert (200, True) == lasted[LossScaleOptimizer]


def test_keras_never_comes_back_from_infinity_and_this_class_does():
    ends = {}
    for make in (Original, LossScaleOptimizer):
        optimizer = make(keras.optimizers.SGD(0.5), 2.0**126, 1)
        steps = Steps(optimizer, START)
        for _ in range(3):
            steps.step(np.ones(4, np.float32))
        grown = steps.scale()
        steps.step(BAD)
        ends[make] = grown, steps.scale()
    assert (np.inf, np.inf) == ends[Original]
    assert (2.0**127, 2.0**126) == ends[LossScaleOptimizer]


def test_keras_applies_a_gradient_that_unscaling_makes_infinite():
    for make, finite in ((Original, False), (LossScaleOptimizer, True)):
        steps = Steps(make(keras.optimizers.SGD(1.0), 0.25), START)
        steps.step(np.full(4, 3e38, np.float32))
        assert finite == is_finite(steps)
        assert (0.125 if finite else 0.25) == steps.scale()


def test_a_gradient_that_float16_weights_cannot_hold_skips_the_step():
    for make, finite in ((Original, False), (LossScaleOptimizer, True)):
        steps = Steps(make(keras.optimizers.SGD(1.0), 1.0), START, dtype="float16")
        steps.step(np.array([1.0, 60000.0, 1.0, 1.0], np.float32))
        assert 1 == steps.iterations()
        steps.step(np.array([1.0, 1e5, 1.0, 1.0], np.float32))
        assert finite == is_finite(steps)
    # No lower scale makes a true gradient smaller.
    assert (1, 1.0) == (steps.iterations(), steps.scale())


def test_float16_gradients_are_unscaled_in_float32():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0**15)
    steps = Steps(optimizer, np.zeros(2))
    # In float16 both quotients would be 0; Keras's class divides in it on torch.
    steps.step(np.array([2.0**-10, 2.0**-24], np.float16))
    assert [-(2.0**-25), -(2.0**-39)] == steps.weights()[0].tolist()


def test_clipping_saves_a_gradient_that_float16_weights_could_not_hold():
    inner = keras.optimizers.SGD(1.0, clipvalue=2.0)
    steps = Steps(LossScaleOptimizer(inner, 1.0), np.zeros(2), dtype="float16")
    steps.step(np.array([1e5, 1.0], np.float32))
    assert [-2.0, -1.0] == steps.weights()[0].tolist()


def test_accumulated_gradients_may_not_add_up_to_infinity():
    for make, finite in ((Original, False), (LossScaleOptimizer, True)):
        inner = keras.optimizers.SGD(1e-3, gradient_accumulation_steps=2)
        steps = Steps(make(inner, 1.0), START)
        for _ in range(4):
            steps.step(np.full(4, 3e38, np.float32))
        assert finite == is_finite(steps)


def test_gradients_of_float16_weights_are_accumulated():
    # Keras's class hands float32 to float16 accumulators: a TypeError on two backends.
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
    steps = Steps(LossScaleOptimizer(inner, 8.0), START, dtype="float16")
    for value in (1.0, 3e5, 1.0, np.inf, 2.0, 4.0):
        steps.step(np.full(4, value * steps.scale(), np.float32))
    assert 4 == numpy(inner._iterations)
    assert (START - 0.5 * 2.0).tolist() == steps.weights()[0].tolist()


def test_a_norm_beyond_float32_skips_the_step():
    for make, finite in ((Original, False), (LossScaleOptimizer, True)):
        inner = keras.optimizers.SGD(0.1, global_clipnorm=2.0)
        steps = Steps(make(inner, 1.0), START)
        steps.step(np.full(4, 1e38, np.float32))
        assert finite == is_finite(steps)
    inner = keras.optimizers.SGD(0.1, clipnorm=20.0)
    steps = Steps(LossScaleOptimizer(inner, 1.0), START)
    steps.step(np.full(4, 1e38, np.float32))
    assert START.tolist() == steps.weights()[0].tolist()


def test_an_infinity_is_skipped_and_not_clipped():
    for clip in ({"clipvalue": 1.0}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}):
        steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.5, **clip), 8.0), START)
        steps.step(np.array([np.inf, 1.0, 1.0, 1.0], np.float32))
        assert START.tolist() == steps.weights()[0].tolist()
        assert 4.0 == steps.scale()


def test_clipping_sees_unscaled_gradients():
    inner = keras.optimizers.SGD(1.0, global_clipnorm=5.0)
    steps = Steps(LossScaleOptimizer(inner, 1024.0), np.zeros(2))
    steps.step(np.array([6.0, 8.0], np.float32) * 1024.0)
    assert np.allclose([-3.0, -4.0], steps.weights()[0], rtol=1e-6, atol=0)


def storm(numbers, shape, scale):
    """Gradients as a broken training step makes them; about a third are finite."""
    gradient = numbers.normal(size=shape) * scale
    kind = numbers.random()
    if kind < 0.7:
        pool = SPECIAL if kind < 0.3 else SPECIAL[3:]
        hit = numbers.random(shape) < 0.3
        gradient = np.where(hit, numbers.choice(pool, size=shape), gradient)
    return gradient.astype(np.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_storm_makes_weights_or_moments_infinite(name):
    numbers = np.random.default_rng(7)
    make = getattr(keras.optimizers, name)
    taken = 0
    # Adafactor is NaN where squares vanish, with no scaling at all: not after clipping.
    clips = ({}, {"global_clipnorm": 2.0}, {"clipvalue": 3.0})
    for clip in clips[: 1 if name == "Adafactor" else None]:
        optimizer = LossScaleOptimizer(make(1e-3, **clip), 2.0**10, 3)
        steps = Steps(optimizer, np.ones((4, 4)), np.ones(5))
        for step in range(40):
            steps.step(
                *(storm(numbers, each.shape, steps.scale()) for each in steps.variables)
            )
            check_finite(steps.weights(), f"{name} {clip} step {step}")
        state = [numpy(each) for each in optimizer.inner_optimizer.variables]
        check_finite(state, f"moments of {name} {clip}")
        taken += steps.iterations()
    assert taken > 5  # a class that skips everything would pass as well


def test_no_storm_makes_float16_weights_infinite():
    numbers = np.random.default_rng(9)
    policy = Dynamic(init_scale=2.0**10, growth_interval=3, min_scale=2.0**-10)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-3), policy=policy)
    steps = Steps(optimizer, np.ones(16), dtype="float16")
    for step in range(150):
        steps.step(storm(numbers, (16,), steps.scale()))
        check_finite(steps.weights(), f"step {step}")
        assert policy.min_scale <= steps.scale() <= policy.max_scale
    assert steps.iterations() > 30


def test_steps_of_keras_that_do_not_corrupt_are_taken_under_large_gradients_too():
    # Just below the bound on what is squared, 2**64.
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), 1.0)
    steps = Steps(optimizer, START)
    steps.step(np.full(4, 1.8e19, np.float32))
    assert 1 == steps.iterations()
    steps.step(np.full(4, 1.9e19, np.float32))
    assert 1 == steps.iterations()


def test_many_float16_weights_leave_each_gradient_its_room():
    # A bound on the sum of squares would be 8 here, and training would stand still.
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.5), 1.0)
    steps = Steps(optimizer, np.zeros(1000), dtype="float16")
    steps.step(np.full(1000, 100.0, np.float32))
    assert 1 == steps.iterations()
    steps.step(np.full(1000, 300.0, np.float32))  # its square is infinite in float16
    assert 1 == steps.iterations()


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("Adam", {"clipvalue": 1000.0}),
        ("Adam", {"global_clipnorm": 1000.0}),
        ("SGD", {"clipvalue": 1e5}),
        ("SGD", {"clipnorm": 1e6}),
        ("SGD", {"global_clipnorm": -1.0}),
        ("RMSprop", {"clipvalue": 1000.0}),
    ],
)
def test_clipping_to_more_than_float16_holds_does_not_count_as_safe(name, clip):
    variable = keras.Variable(np.ones(4, np.float16), dtype="float16")
    optimizer = LossScaleOptimizer(getattr(keras.optimizers, name)(0.01, **clip), 1.0)
    optimizer.build([variable])
    for number in (2e5, 1.0, 1.0):
        gradient = keras.ops.convert_to_tensor(np.full(4, number, np.float32))
        optimizer.apply([gradient], [variable])
    values = [numpy(variable), *(numpy(each) for each in optimizer.variables)]
    assert all(np.isfinite(each).all() for each in values)


def test_a_subclass_with_an_update_of_its_own_is_taken_to_square():
    class ByNorm(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            norm = keras.ops.sqrt(keras.ops.sum(gradient * gradient))
            super().update_step(gradient / norm, variable, learning_rate)

    variable = keras.Variable(START)
    optimizer = LossScaleOptimizer(ByNorm(0.01), 1.0)
    optimizer.build([variable])
    large = keras.ops.convert_to_tensor(np.full(4, 1e25, np.float32))
    optimizer.apply([large], [variable])
    assert START.tolist() == numpy(variable).tolist()
