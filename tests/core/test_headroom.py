"""How large a gradient may be: the bounds, and that sums below them stay finite."""

import numpy as np
import pytest

from lossscale.core import headroom


def optimizer(name, module="keras.src.optimizers", **settings):
    """Return an optimizer that a library is said to have."""

    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError

    kind = type(name, (), {"update_step": update_step, "__module__": module})
    made = kind()
    vars(made).update(settings)
    return made


def largest(inner, gradient="float32", variable="float32", elements=1, addends=1):
    return headroom.largest_gradient(
        inner, gradient, variable, elements=elements, addends=addends
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("fraction", [1.0, 0.75, 0.51, 0.5])
def test_a_sum_of_endless_addends_stops_growing_before_it_is_infinite(dtype, fraction):
    addend = np.dtype(dtype).type(headroom.largest_endless_addend(dtype) * fraction)
    # A sum passes every power of two to which one more addend makes a difference.
    power = np.dtype(dtype).type(2.0 ** np.floor(np.log2(addend)))
    while power + addend != power:
        power *= np.dtype(dtype).type(2.0)
    assert np.isfinite(power)


def test_float16_sums_of_endless_addends_are_finite_one_by_one():
    rng = np.random.default_rng(0)
    bound = headroom.largest_endless_addend("float16")
    total = np.float16(0)
    for _ in range(20_000):
        total += np.float16(rng.uniform(0.5, 1.0) * bound)
    assert np.isfinite(total)


@pytest.mark.parametrize(
    "name", ["SGD", "Lion", "Adam", "Adamax", "Adagrad", "Ftrl", "RMSprop", "Unknown"]
)
def test_no_ordinary_gradient_is_too_large_in_float32(name):
    assert largest(optimizer(name)) > 1e15


def test_averages_of_squares_hold_the_largest_square():
    assert largest(optimizer("Adam"), elements=10**9) == headroom.largest_square(
        "float32"
    )


def test_sums_of_squares_hold_an_endless_number_of_them():
    bound = np.float32(largest(optimizer("Adagrad"), elements=10**9))
    assert 2e15 < bound < 3e15
    assert bound**2 <= headroom.largest_endless_addend("float32")


def test_momentum_without_decay_of_the_gradient_lowers_the_bound():
    plain = largest(optimizer("SGD", momentum=0.0))
    assert plain == largest(optimizer("SGD"))
    assert plain / 10 == pytest.approx(largest(optimizer("SGD", momentum=0.9)))
    assert plain / 16 == largest(optimizer("SGD", momentum=object()))


def test_an_optimizer_that_is_not_known_is_taken_to_add_up_all_squares():
    known, own = optimizer("Adam"), optimizer("Adam", module="my_package.adam")
    assert largest(known, elements=100) == pytest.approx(
        10 * largest(own, elements=100)
    )


def test_what_is_clipped_is_bounded_by_what_reaches_the_state():
    assert 1e38 < largest(optimizer("Adam", clipvalue=1.0))
    # The norm itself is a sum of squares.
    assert largest(optimizer("SGD", clipnorm=1.0), elements=4) == pytest.approx(
        headroom.largest_square("float32") / 2
    )
    # Clipping to more than the state holds does not help.
    assert largest(optimizer("Adam", clipvalue=1e30)) == largest(optimizer("Adam"))
    assert largest(optimizer("Adam", clipvalue=1e3), variable="float16") < 256
    assert largest(optimizer("Adam", clipvalue=10.0), variable="float16") > 1e38


def test_the_narrower_of_two_dtypes_decides():
    sgd = optimizer("SGD")
    assert 65504.0 == largest(sgd, "float32", "float16")
    assert 65504.0 == largest(sgd, "float16", "float32")
    assert largest(sgd) == largest(sgd, "float64", "float32")


def test_replicas_and_micro_batches_share_the_bound():
    assert largest(optimizer("Adam"), addends=8) == largest(optimizer("Adam")) / 8
