"""Whole steps of torch's GradScaler and ours: the same calls on both classes."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    BAD,
    both,
    init_scale_tensor,
    parameter,
    step,
)

import lossscale.torch as ls  # noqa: E402


def problem(gradient=1.0, fused=False, **settings):
    """Return one weight of 1 and an optimizer that subtracts its gradient."""
    weight = parameter([1.0])
    weight.grad = torch.tensor([gradient])
    return weight, torch.optim.SGD([weight], lr=1.0, fused=fused, **settings)


@both
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_skipped_step_returns_none_and_leaves_gradients_unscaled(cls, bad, explicit):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    weight, other = parameter([1.0]), parameter([1.0])
    weight.grad, other.grad = torch.tensor([bad]), torch.tensor([8.0])
    optimizer = torch.optim.SGD([weight, other], lr=1.0)
    if explicit:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) is None
    assert (1.0, 1.0, 2.0) == (weight.item(), other.item(), other.grad.item())
    scaler.update()
    assert (2.0, 0) == (scaler.get_scale(), scaler._get_growth_tracker())


@both
def test_what_the_optimizer_returns_is_returned(cls):
    class Returning(torch.optim.SGD):
        def step(self, closure=None, *, word="none"):
            super().step()
            return closure, word

    weight, _ = problem()
    scaler = init_scale_tensor(cls("cpu"))
    optimizer = Returning([weight], lr=1.0)
    assert scaler.step(optimizer, None, word="given") == (None, "given")


@both
def test_gradients_that_are_broken_after_unscaling_are_not_checked_again(cls):
    weight, optimizer = problem()
    scaler = init_scale_tensor(cls("cpu"))
    scaler.unscale_(optimizer)
    weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    assert weight.item() == -math.inf


@both
def test_each_of_several_optimizers_skips_alone(cls):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    good, first = problem(8.0)
    bad, second = problem(math.inf)
    third_weight, third = problem(8.0, fused=True)
    for optimizer in (first, second, third):
        scaler.step(optimizer)
    scaler.update()
    assert (-1.0, 1.0, -1.0) == (good.item(), bad.item(), third_weight.item())
    assert scaler.get_scale() == 2.0


@both
def test_update_changes_the_tensors_in_place(cls):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0, growth_interval=1))
    before = scaler._scale, scaler._growth_tracker
    for gradient in (1.0, math.inf, 1.0):
        weight, optimizer = problem()
        step(scaler, optimizer, gradient, [weight])
    scaler.update(3.0)
    scaler.load_state_dict(scaler.state_dict())
    assert before[0] is scaler._scale
    assert before[1] is scaler._growth_tracker


# Sparse gradients


@both
@pytest.mark.parametrize("bad", [None, *BAD])
def test_sparse_gradients_are_unscaled_and_checked(cls, bad):
    table = torch.nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = cls("cpu", init_scale=4.0)
    rows = table(torch.tensor([1, 3, 1]))
    scaler.scale(rows.sum() * (1.0 if bad is None else bad)).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = [1.0, -1.0, 1.0, 0.0] if bad is None else [1.0] * 4
    assert moved == table.weight[:, 0].tolist()
    assert (4.0 if bad is None else 2.0) == scaler.get_scale()


@pytest.mark.parametrize("scale", [4.0, 0.25])
def test_duplicates_of_a_sparse_gradient_that_overflow_together_are_found(scale):
    weight = parameter([1.0, 1.0])
    weight.grad = torch.sparse_coo_tensor(
        [[0, 0]], [3e38, 3e38], (2,), check_invariants=True
    )
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=scale))
    scaler.step(optimizer)
    assert [1.0, 1.0] == weight.tolist()


def test_gradients_of_another_layout_are_grouped_again():
    """Only the second step has a gradient that is refused, and a sparse one."""
    first, second = parameter([1.0]), parameter([1.0], torch.float16)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    first.grad = torch.tensor([8.0])
    scaler.step(optimizer)
    scaler.update()
    first.grad, second.grad = torch.tensor([8.0]), torch.ones(1, dtype=torch.float16)
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(optimizer)


def test_a_dense_gradient_may_be_sparse_a_step_later():
    table = parameter([[1.0], [1.0]])
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    twice = torch.sparse_coo_tensor(
        [[1, 1]], [[8.0], [8.0]], (2, 1), check_invariants=True
    )
    for gradient in (torch.full((2, 1), 8.0), twice):
        table.grad = gradient
        scaler.step(optimizer)
        scaler.update()
    assert [[0.0], [-2.0]] == table.tolist()
