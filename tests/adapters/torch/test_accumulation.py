"""Micro-batches: only the bad ones are dropped."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    BAD,
    init_scale_tensor,
    parameter,
)

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import GradientError  # noqa: E402


def accumulated(scaler, batches, fused, dtype=torch.float32):
    """Accumulate these gradients, one after the other, and step."""
    weight = parameter([1.0, 1.0], dtype)
    other = parameter([1.0], dtype)
    optimizer = torch.optim.SGD([weight, other], lr=1.0, fused=fused)
    init_scale_tensor(scaler)
    for batch in batches:
        first = torch.tensor(batch, dtype=dtype) * scaler.get_scale()
        weight.grad, other.grad = first.to(dtype), torch.ones(1, dtype=dtype)
        scaler.accumulate(optimizer)
        assert weight.grad is None
    scaler.step(optimizer)
    scaler.update()
    return weight, other


@pytest.mark.parametrize("fused", [False, True])
def test_only_the_bad_micro_batch_is_dropped(fused):
    batches = [[0.25, 0.5], [math.inf, 1.0], [1.0, -2.0], [1.0, math.nan]]
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    weight, other = accumulated(scaler, batches, fused)
    numbers = np.array(batches, np.float32)
    good = numbers[np.isfinite(numbers).all(axis=1)]
    expected = 1.0 - good.sum(axis=0) * (len(batches) / len(good))
    assert expected.tolist() == weight.tolist()
    assert other.item() == 1.0 - 2 * 0.125 * 2
    # The step was taken; the scale is lower all the same.
    assert (4.0, True, 0) == (
        scaler.get_scale(),
        scaler.last_step.applied,
        scaler.skipped_steps,
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_if_every_micro_batch_is_bad_the_step_is_skipped(bad, fused):
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    weight, other = accumulated(scaler, [[bad, 1.0], [0.0, bad]], fused)
    assert ([1.0, 1.0], 1.0) == (weight.tolist(), other.item())
    assert (4.0, 1) == (scaler.get_scale(), scaler.skipped_steps)


@pytest.mark.parametrize("bad", BAD)
def test_micro_batches_that_were_all_bad_are_reported(bad):
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    accumulated(scaler, [[bad, 1.0], [0.0, bad]], False)
    reason = "nan" if math.isnan(bad) else "inf"
    assert scaler.last_step.reason == reason
    assert [reason] == list(scaler.last_step.nonfinite.values())


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_bad_one_accumulation_is_torchs(fused):
    batches = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    scaler = ls.GradScaler("cpu", init_scale=2.0**10)
    weight, _ = accumulated(scaler, batches.tolist(), fused)
    expected = parameter([1.0, 1.0])
    optimizer = torch.optim.SGD([expected], lr=1.0, fused=fused)
    torchs = init_scale_tensor(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    expected.grad = torch.zeros(2)
    for batch in batches:
        expected.grad += torch.from_numpy(batch) * 2.0**10
    torchs.step(optimizer)
    assert expected.tolist() == weight.tolist()


def test_a_sum_that_overflows_is_found():
    scaler = ls.GradScaler("cpu", init_scale=1.0)
    weight, _ = accumulated(scaler, [[3e38, 0.0], [3e38, 0.0]], False)
    assert [1.0, 1.0] == weight.tolist()
    assert scaler.last_step.skipped


def test_float16_gradients_are_added_up_in_float32():
    """In float16 the sum of 2048, 1 and 1 is 2048, and the weight would be -2047."""
    scaler = ls.GradScaler("cpu", init_scale=1.0, allow_fp16=True)
    batches = [[2048.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    weight, _ = accumulated(scaler, batches, False, torch.float16)
    assert weight.tolist() == [-2048.0, 1.0]  # -2049 is no float16 number


def test_clipping_takes_the_sum():
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    for _ in range(3):
        weight.grad = torch.tensor([8.0])
        scaler.accumulate(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.5).item() == 3.0
    scaler.step(optimizer)
    assert weight.item() == pytest.approx(-0.5, rel=1e-5)


def test_a_dropped_loss_that_is_not_finite_leaves_the_scale():
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    scaler = ls.GradScaler("cpu", policy=policy)
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for factor in (1.0, math.inf):
        scaler.scale((weight * factor).sum()).backward()
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (-1.0, 8.0) == (weight.item(), scaler.get_scale())


def test_a_tensor_subclass_is_refused_and_nothing_is_lost():
    class Own(torch.Tensor):
        pass

    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([8.0]).as_subclass(Own)
    with pytest.raises(GradientError, match="these gradients are Own"):
        scaler.accumulate(optimizer)
    assert 8.0 == weight.grad.item()


def test_what_was_added_up_is_not_forgotten_by_a_step_with_a_closure():
    """It may be refused or taken in, but not dropped without a word."""
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([8.0])
    scaler.accumulate(optimizer)
    closure = lambda: scaler.scale((weight * 2.0).sum()).backward()  # noqa: E731
    try:
        scaler.step(optimizer, closure=closure)
    except (RuntimeError, ValueError):
        return
    assert weight.item() == -2.0


def test_a_sum_is_reported_at_the_scale_of_its_parts_and_by_the_right_name():
    weights = [parameter([1.0]) for _ in range(3)]
    names = [(f"w{at}", weight) for at, weight in enumerate(weights)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0, names=names))
    for bad in (8.0, math.nan):  # the first has no gradient
        weights[1].grad, weights[2].grad = torch.ones(1), torch.tensor([bad])
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (True, 8.0, {"w2": "nan"}) == (
        scaler.last_step.applied,
        scaler.last_step.scale,
        scaler.last_step.nonfinite,
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_every_dtype_is_added_up_in_float32_or_wider(dtype):
    """1 + 2**-20 + 2**-20 is lost in bfloat16, 2**-40 in float32."""
    real = dtype.to_real() if dtype.is_complex else dtype
    small = 2.0**-40 if real is torch.float64 else 2.0**-8
    weight = parameter([0.0], dtype)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0))
    for number in (1.0, *[small / 2] * 4):
        weight.grad = torch.tensor([number], dtype=dtype)
        scaler.accumulate(optimizer)
    scaler.unscale_(optimizer)
    assert torch.tensor(1.0 + 2 * small, dtype=dtype) == weight.grad
    assert dtype is weight.grad.dtype


def test_the_report_of_a_sum_has_the_magnitude_that_came():
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    for gradient in (16.0, 24.0, math.inf):
        weight.grad = torch.tensor([gradient])
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    # The one tensor was infinite in the last micro-batch: no finite one is left.
    assert 0.0 == scaler.last_step.amax
    for gradient in (16.0, 24.0):
        weight.grad = torch.tensor([gradient])
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert 24.0 / 4.0 == scaler.last_step.amax


@pytest.fixture
def _bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_bfloat16_by_default")
def test_micro_batches_are_counted_in_float32():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    for _ in range(300):
        scaler.scale(weight.sum()).backward()
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    assert -300.0 == weight.item()


def test_a_loss_that_is_not_finite_holds_the_scale_for_several_optimizers():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    scaler = ls.GradScaler("cpu", policy=policy)
    for factor in (math.nan, 1.0):
        loss = sum(weight.sum() for weight in weights) * factor
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.accumulate(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert 8.0 == scaler.get_scale()
    assert [0.8, 0.8] == pytest.approx([weight.item() for weight in weights])
