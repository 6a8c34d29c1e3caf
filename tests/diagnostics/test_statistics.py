"""Tensor statistics, compared with plain arithmetic on every single number."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lossscale.diagnostics import exponent_histogram, measure_tensors
from lossscale.diagnostics.formats import FORMATS, headroom
from lossscale.errors import GradientError

DTYPES = [np.float16, np.float32, np.float64]


def arrays(dtype):
    width = np.dtype(dtype).itemsize * 8
    numbers = st.floats(width=width, allow_nan=True, allow_infinity=True)
    return hnp.arrays(dtype, st.integers(0, 40), elements=numbers)


def exponents_of(array):
    """Return the exponent of each number, by Python's own arithmetic."""
    numbers = [abs(float(value)) for value in array]
    return [
        math.frexp(number)[1] - 1
        for number in numbers
        if number != 0 and math.isfinite(number)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_histogram_counts_every_finite_number_once(dtype):
    @given(arrays(dtype))
    def check(array):
        first, counts = exponent_histogram(array)
        exponents = exponents_of(array)
        assert len(exponents) == counts.sum()
        for index, count in enumerate(counts.tolist()):
            assert exponents.count(first + index) == count
        if exponents:
            assert (min(exponents), max(exponents)) == (first, first + counts.size - 1)

    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_measurements_are_those_of_every_single_number(dtype):
    @given(arrays(dtype))
    def check(array):
        found = measure_tensors({"w": array})
        values = [float(value) for value in array]
        smallest = float(np.finfo(dtype).smallest_normal)
        finite = [abs(value) for value in values if math.isfinite(value)]
        assert [len(values)] == found.sizes
        assert [max(finite, default=0.0)] == found.amax
        share = 1 / max(1, len(values))
        assert [values.count(0.0) * share] == pytest.approx(found.zeros)
        small = [v for v in values if v != 0 and abs(v) < smallest]
        assert [len(small) * share] == pytest.approx(found.subnormals)

    check()


def test_tensors_of_one_step_share_a_range_of_exponents():
    found = measure_tensors(
        {"a": np.array([1.0, 4.0]), "b": np.array([0.0]), "c": np.array([0.5])}
    )
    assert (-1, [[0, 1, 0, 1], [0] * 4, [1, 0, 0, 0]]) == (
        found.first_exponent,
        found.counts,
    )


def test_other_number_formats_are_measured_in_their_own_range():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    values = np.array([2.0**-7, 2.0**-6, 0.0, 448.0], np.float32)
    e4m3 = measure_tensors({"w": values.astype(ml_dtypes.float8_e4m3fn)})
    assert ([0.25], [448.0]) == (e4m3.subnormals, e4m3.amax)
    wide = measure_tensors({"w": values.astype(ml_dtypes.bfloat16)})
    assert [0.0] == wide.subnormals


def test_integers_have_no_statistics():
    with pytest.raises(GradientError, match="int64"):
        measure_tensors({"w": np.arange(3)})


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_the_ranges_are_numpys(name):
    info = np.finfo(name)
    range_ = FORMATS[name]
    assert info.max == range_.largest
    assert info.maxexp - 1 == range_.largest_exponent
    assert info.minexp == range_.smallest_normal
    assert math.log2(float(info.smallest_subnormal)) == range_.smallest


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("bfloat16", "bfloat16"),
        ("float8_e5m2", "float8_e5m2"),
        ("float8_e4m3", "float8_e4m3fn"),
    ],
)
def test_the_other_ranges_are_those_of_ml_dtypes(name, type_name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    info = ml_dtypes.finfo(getattr(ml_dtypes, type_name))
    range_ = FORMATS[name]
    assert float(info.max) == range_.largest
    assert math.log2(float(info.smallest_normal)) == range_.smallest_normal
    assert math.log2(float(info.smallest_subnormal)) == range_.smallest


def test_headroom_is_how_often_the_largest_gradient_could_double():
    assert 0.0 == headroom(65504.0, 1.0, "float16")
    assert 3.0 == headroom(65504.0 / 16, 2.0, "float16")
    assert headroom(0.0, 2.0, "float16") is None
    assert headroom(math.inf, 2.0, "float16") is None
    assert headroom(1e-300, 1.0, "float64") > 1000
