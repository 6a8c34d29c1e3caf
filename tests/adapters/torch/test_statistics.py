"""Statistics that the scaler takes for `on_step`: exactly those of NumPy."""

import math
import weakref
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.statistics import assert_measured_as_numpy_does, hard_tensors  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lossscale.diagnostics import Recorder, measure_tensors, read_run  # noqa: E402
from lossscale.torch import GradScaler, optim  # noqa: E402
from lossscale.torch.inspection import statistics  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Asked:
    """A callback that wants some steps, and keeps their statistics."""

    def __init__(self, *steps):
        self.steps, self.found = steps, {}

    def wants_statistics(self, step):
        return step in self.steps

    def __call__(self, report):
        self.found[report.index] = report.statistics


def params_like(grads):
    """Return parameters that have given gradients, and an optimizer of them."""
    params = {}
    for name, grad in grads.items():
        params[name] = torch.nn.Parameter(torch.zeros_like(grad))
    return params, torch.optim.SGD(list(params.values()), lr=0.1)


def step(scaler, params, optimizer, grads, take=None):
    scaler.scale(torch.ones(()))
    for name, grad in grads.items():
        params[name].grad = grad.clone()
    if take is not None:
        take(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


def sampled(grads, take=None, steps=(1,), **settings):
    """Return the statistics of one step with given gradients."""
    asked = Asked(*steps)
    params, optimizer = params_like(grads)
    scaler = GradScaler(
        "cpu", on_step=asked, names=params.items(), allow_fp16=True, **settings
    )
    step(scaler, params, optimizer, grads, take)
    return asked.found[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sampled_step_has_the_statistics_that_numpy_finds(dtype):
    grads = hard_tensors(dtype)
    assert_measured_as_numpy_does(sampled(grads), grads)


def test_tensors_of_several_dtypes_are_measured_together():
    grads = {}
    for dtype in DTYPES:
        grads |= {f"{dtype}.{n}": one for n, one in hard_tensors(dtype).items()}
    assert_measured_as_numpy_does(sampled(grads), grads)


def test_a_tensor_is_counted_in_pieces(monkeypatch):
    monkeypatch.setattr(statistics, "_PIECE", 7)
    grads = {"w": torch.arange(-20.0, 20.0).reshape(5, 8) / 3, "v": torch.ones(7)}
    assert_measured_as_numpy_does(sampled(grads), grads)


def clip(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, max_norm=1.0)


def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)


def unscale_and_clip(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, max_norm=1.0)


def accumulate(scaler, optimizer):
    scaler.accumulate(optimizer)


@pytest.mark.parametrize("take", [clip, unscale, unscale_and_clip, accumulate])
def test_the_gradients_are_those_that_still_carry_the_scale(take):
    grads = {"w": torch.tensor([[0.5, -0.25], [0.0, 3.0]])}
    found = sampled(grads, take)
    assert_measured_as_numpy_does(found, grads)


@pytest.mark.parametrize("kind", [partial(torch.optim.Adam, fused=True), optim.AdamW])
def test_an_optimizer_that_divides_by_itself_is_sampled_as_well(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1)
    asked = Asked(1)
    scaler = GradScaler("cpu", on_step=asked, names=[("w", weight)])
    grads = {"w": torch.tensor([1.0, 2.0, 0.0])}
    step(scaler, {"w": weight}, optimizer, grads)
    assert_measured_as_numpy_does(asked.found[1], grads)


def test_sparse_complex_and_strided_gradients_are_measured_by_their_numbers():
    dense = torch.arange(12.0).reshape(3, 4)
    grads = {
        "sparse": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
        "complex": torch.tensor([1.0 + 4.0j, 0.0 - 0.5j]),
        "strided": dense[:, ::2],
    }
    numbers = {
        "sparse": torch.tensor([2.0]),
        "complex": torch.view_as_real(grads["complex"]),
        "strided": grads["strided"],
    }
    assert_measured_as_numpy_does(sampled(grads), numbers)


def test_a_parameter_without_a_gradient_is_left_out():
    params, optimizer = params_like({"a": torch.ones(2), "b": torch.ones(2)})
    asked = Asked(1)
    scaler = GradScaler("cpu", on_step=asked, names=params.items())
    step(scaler, params, optimizer, {"b": torch.ones(2)})
    assert ["b"] == asked.found[1].names


def test_the_tensors_of_two_optimizers_are_in_one_sample():
    params, optimizer = params_like({"a": torch.ones(2)})
    others, other = params_like({"b": torch.ones(3)})
    asked = Asked(1)
    scaler = GradScaler("cpu", on_step=asked, names=[*params.items(), *others.items()])
    scaler.scale(torch.ones(()))
    params["a"].grad, others["b"].grad = torch.ones(2), torch.full((3,), 4.0)
    for one in (optimizer, other):
        scaler.step(one)
    scaler.update()
    expected = {"a": torch.ones(2), "b": torch.full((3,), 4.0)}
    assert_measured_as_numpy_does(asked.found[1], expected)


def test_only_the_steps_that_are_wanted_have_statistics():
    grads = {"w": torch.ones(2)}
    params, optimizer = params_like(grads)
    asked = Asked(2, 5)
    scaler = GradScaler("cpu", on_step=asked)
    for _ in range(6):
        step(scaler, params, optimizer, grads)
    assert [2, 5] == [i for i, found in asked.found.items() if found is not None]


def test_a_discarded_iteration_takes_its_sample_with_it():
    grads = {"w": torch.full((2,), 8.0)}
    params, optimizer = params_like(grads)
    asked = Asked(1)
    scaler = GradScaler("cpu", on_step=asked, names=params.items())
    scaler.scale(torch.ones(()))
    params["w"].grad = torch.ones(2)
    scaler.unscale_(optimizer)
    scaler.discard()
    step(scaler, params, optimizer, grads)
    assert_measured_as_numpy_does(asked.found[1], grads)


def test_the_sample_keeps_no_gradient_and_no_optimizer_alive():
    grads = {"w": torch.ones(2)}
    params, optimizer = params_like(grads)
    asked = Asked(1)
    scaler = GradScaler("cpu", on_step=asked)
    step(scaler, params, optimizer, grads)
    reference = weakref.ref(optimizer)
    params["w"].grad = None
    del optimizer, params
    assert reference() is None


class Counted(TorchDispatchMode):
    """Counts the operators of a piece of code."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_after_the_first_step(on_step):
    grads = {"w": torch.ones(2)}
    params, optimizer = params_like(grads)
    scaler = GradScaler("cpu", on_step=on_step)
    step(scaler, params, optimizer, grads)
    with Counted() as counted:
        step(scaler, params, optimizer, grads)
    return counted.names


def test_the_steps_between_have_no_operator_more():
    assert operators_after_the_first_step(None) == operators_after_the_first_step(
        Asked(1)
    )


def test_a_recorder_gets_the_statistics_of_every_fiftieth_step(tmp_path):
    grads = {"w": torch.tensor([0.0, 1e-7, 0.5, math.inf], dtype=torch.float16)}
    params, optimizer = params_like(grads)
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        scaler = GradScaler(
            "cpu", on_step=recorder, names=params.items(), allow_fp16=True
        )
        for _ in range(52):
            step(scaler, params, optimizer, grads)
    run = read_run(path)
    samples = list(run.statistics(run.start, run.end - run.start))
    assert [1, 51] == [sample.step for sample in samples]
    expected = measure_tensors({"w": grads["w"].numpy()})
    for sample in samples:
        ((name, size, amax, zeros, subnormals, first, counts),) = sample.tensors
        assert ("w", 4, 0.5) == (name, size, amax)
        assert (expected.zeros, expected.subnormals) == ([zeros], [subnormals])
        assert np.array_equal(expected.counts[0], counts)
        assert expected.first_exponent == first
