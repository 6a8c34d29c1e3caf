"""Summaries by torch's own operations: the cases of the kernels, against NumPy."""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.get_default_device().type != "cpu":
    pytest.skip("torch's default device is not the CPU", allow_module_level=True)

from kernels import gpu_cases  # noqa: E402

from lossscale.torch.inspection import eager, host  # noqa: E402
from lossscale.torch.inspection.groups import invert  # noqa: E402
from lossscale.torch.inspection.request import InspectionRequest  # noqa: E402
from lossscale.torch.inspection.summary import (  # noqa: E402
    AMAX,
    FOUND_INF,
    HEADER,
    NORM,
    NOT_MEASURED,
    GradientSummary,
)

CASES = gpu_cases.cases("cpu", chunk=128, many=300)


def measure_on_host(grads, scale, inverse, request, bounds):
    """Return the host's summary as a buffer, as the device's is."""
    layout = host.HostLayout(grads, bounds)
    inverse = inverse.item()
    numbers, amaxes, _ = host.measure(grads, scale.item(), inverse, request, layout)
    return torch.tensor(numbers + (amaxes or []))


def measure_all_on_host(grads, scale, inverse, request, bounds):
    """Return the host's summary with the largest magnitudes, as the device has them."""
    request = request._replace(measure_amax=True)
    return measure_on_host(grads, scale, inverse, request, bounds)


MEASURES = {"host": measure_all_on_host, "device": eager.measure_on_device}


class Eager:
    """Torch's operations, in the place of the kernels."""

    def __init__(self, measure):
        self._measure = measure
        self._bounds = []

    def set_bounds(self, bounds):
        self._bounds = bounds

    def measure(self, gradients, scale, request, *, inverted):
        inverse = scale if inverted else invert(scale)
        if inverted:
            scale = invert(inverse)
        bounds = self._bounds[: len(gradients)] or [math.inf] * len(gradients)
        return self._measure(gradients, scale, inverse, request, bounds)

    def multiply_(self, gradients, factor):
        eager.multiply_(gradients, factor)


class Combined(Eager):
    """The same of the gradients at even and odd places, put together."""

    def measure(self, gradients, scale, request, *, inverted):
        part = request.for_group()
        parts = [own for own in (gradients[::2], gradients[1::2]) if own]
        measured = super().measure
        buffers = [measured(own, scale, part, inverted=inverted) for own in parts]
        whole = eager.combine(buffers, torch.device("cpu"), request)
        amaxes = torch.empty(len(gradients))
        even = len(parts[0])
        amaxes[::2], amaxes[1::2] = whole[HEADER:][:even], whole[HEADER:][even:]
        return torch.cat([whole[:HEADER], amaxes])


PARAMETERS = [pytest.param(case, id=case.name) for case in CASES]


KINDS = (
    [torch.float32],
    [torch.float16],
    [torch.float32, torch.float16, torch.bfloat16],
)


@pytest.fixture(params=[0, host.FLAT_ELEMENTS], ids=["each_tensor", "one_copy"])
def flat_elements(request, monkeypatch):
    """Read every gradient by itself, or copy small ones to one tensor first."""
    monkeypatch.setattr(host, "FLAT_ELEMENTS", request.param)


@pytest.mark.usefixtures("flat_elements")
@pytest.mark.parametrize("case", PARAMETERS)
def test_the_hosts_way_is_what_numpy_says(case):
    gpu_cases.check(case, Eager(measure_all_on_host), strict=False)


@pytest.mark.usefixtures("flat_elements")
@pytest.mark.parametrize("dtypes", KINDS, ids=["float32", "float16", "mixed"])
def test_the_host_finds_the_tensors_that_are_not_finite(dtypes):
    rng = np.random.default_rng(0)
    values = [0.5, math.inf, -math.inf, math.nan]
    for _ in range(300):
        arrays = [
            rng.choice(values, p=[0.85, 0.05, 0.05, 0.05], size=shape).astype("f4")
            for shape in rng.integers(1, 5, size=(rng.integers(1, 6), 2))
        ]
        expected = [
            math.nan if np.isnan(array).any() else float(np.abs(array).max())
            for array in arrays
        ]
        kinds = zip(arrays, itertools.cycle(dtypes))
        gradients = [torch.from_numpy(array).to(dtype) for array, dtype in kinds]
        layout = host.HostLayout(gradients, [math.inf] * len(gradients))
        result = host.measure(gradients, 2.0, 0.5, InspectionRequest(), layout)
        if np.isfinite(expected).all():
            assert result.amax_per_tensor is None
            assert result.numbers[FOUND_INF] == 0.0
            continue
        assert result.numbers[FOUND_INF] == 1.0
        for found, kind in zip(result.amax_per_tensor, expected, strict=True):
            assert math.isnan(found) == math.isnan(kind)
            assert math.isinf(found) == math.isinf(kind)


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_devices_way_is_what_numpy_says(case):
    gpu_cases.check(case, Eager(eager.measure_on_device), strict=False)


@pytest.mark.parametrize("case", PARAMETERS)
def test_parts_that_are_combined_are_the_whole(case):
    gpu_cases.check(case, Combined(eager.measure_on_device), strict=False)


@pytest.mark.parametrize("way", MEASURES)
def test_gaps_and_transposed_tensors_are_read_and_written_where_they_are(way):
    memory = torch.arange(24.0).view(4, 6)
    gradients = [memory[:, ::2], torch.arange(6.0).view(2, 3).t()]
    request = InspectionRequest(unscale_in_place=True, measure_norm=True)
    buffer = Eager(MEASURES[way]).measure(
        gradients, torch.tensor(2.0), request, inverted=False
    )
    assert (
        pytest.approx(math.sqrt(sum(x * x for x in range(0, 24, 2)) + 55.0) / 2.0)
        == buffer[NORM].item()
    )
    assert torch.equal(torch.arange(0.0, 24.0, 2.0) / 2.0, memory[:, ::2].flatten())
    assert torch.equal(torch.arange(1.0, 24.0, 2.0), memory[:, 1::2].flatten())


def test_the_host_says_what_it_did_not_measure():
    gradients = [torch.ones(3)]
    two, half = torch.tensor(2.0), torch.tensor(0.5)
    request = InspectionRequest(unscale_in_place=True)
    buffer = measure_on_host(gradients, two, half, request, [math.inf])
    assert NOT_MEASURED == buffer[AMAX].item()
    assert pytest.approx(math.sqrt(3.0) / 2.0) == buffer[NORM].item()
    assert HEADER == len(buffer)
    assert [0.5, 0.5, 0.5] == gradients[0].tolist()


def test_a_norm_that_one_part_did_not_measure_is_measured_by_none():
    two, half = torch.tensor(2.0), torch.tensor(0.5)
    parts = [
        eager.measure_on_device(
            [torch.ones(3)], two, half, InspectionRequest(measure_norm=norm), [math.inf]
        )
        for norm in (True, False)
    ]
    whole = eager.combine(parts, torch.device("cpu"), InspectionRequest())
    assert NOT_MEASURED == whole[NORM].item()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_check_by_either_way_finds_the_number_and_changes_none(number):
    for measure in MEASURES.values():
        for size in (3, 2**16):
            gradients = [torch.full((size,), 0.3), torch.full((size,), 0.3)]
            gradients[1][-1] = number
            before = [gradient.clone() for gradient in gradients]
            buffer = Eager(measure).measure(
                gradients, torch.tensor(3.0), InspectionRequest(), inverted=False
            )
            assert 1.0 == buffer[FOUND_INF].item()
            assert [True, False] == torch.isfinite(buffer[HEADER:]).tolist()
            for old, new in zip(before, gradients, strict=True):
                assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_the_buffer_of_a_flag_says_no_more_than_the_flag():
    scale = torch.tensor(8.0)
    for flag in (0.0, 1.0, 3.0):
        summary = GradientSummary.of_flag(torch.tensor(flag), scale)
        found = float(flag != 0.0)
        numbers = [found, 0.0, -1.0, -1.0, 8.0, 0.125, 8.0, 1.0, 0.0, -1.0]
        assert numbers == summary.numbers


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e38])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_host_finds_the_same_tensors_with_and_without_magnitudes(dtype, value):
    if value == 1e38 and dtype is torch.float16:
        value = 60000.0
    bounds = [math.inf] * 3
    flags = []
    for measure in (measure_on_host, measure_all_on_host):
        grads = [torch.ones(4, dtype=dtype) for _ in range(3)]
        grads[1][2] = value
        two, half = torch.tensor(2.0), torch.tensor(0.5)
        buffer = measure(grads, two, half, InspectionRequest(), bounds)
        found = buffer[HEADER:].isfinite().tolist() or [True] * 3
        flags.append((buffer[:2].tolist(), found, buffer[NORM].item()))
    assert repr(flags[1]) == repr(flags[0])
