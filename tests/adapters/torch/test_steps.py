"""Several optimizers at once, penalties, losses, dtypes, no gradients, disabled."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    BAD,
    FUSED,
    init_scale_tensor,
    parameter,
    snapshot,
    step,
)

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

# Several optimizers


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("explicit", [False, True])
def test_all_step_or_none(fused, explicit):
    weights = [parameter([1.0]), parameter([1.0])]
    optimizers = [
        torch.optim.Adam([weight], lr=1.0, fused=one)
        for weight, one in zip(weights, fused, strict=True)
    ]
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    for bad in (None, 0, 1):
        before = [snapshot(optimizer) for optimizer in optimizers]
        for at, weight in enumerate(weights):
            weight.grad = torch.tensor([math.nan if at == bad else 8.0])
        if explicit:
            scaler.unscale_(optimizers[0])
        scaler.step_all(*optimizers)
        scaler.update()
        same = [
            old == snapshot(optimizer)
            for old, optimizer in zip(before, optimizers, strict=True)
        ]
        assert [bad is not None] * 2 == same
        assert (bad is None) == scaler.last_step.applied
    assert scaler.get_scale() == 2.0


# Penalties


@pytest.mark.parametrize("scale", [2.0**10, 3.0])
def test_a_gradient_penalty_is_that_of_no_scaling(scale):
    found = []
    for scaler in (None, ls.GradScaler("cpu", init_scale=scale)):
        weight = parameter([1.5, -2.0])
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (weight**3).sum()
            if scaler is None:
                (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
                (loss + gradient.norm()).backward()
                optimizer.step()
            else:
                (gradient,) = scaler.grad(loss, weight)
                scaler.scale(loss + gradient.norm()).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=0 if scale > 3 else 1e-6, atol=0)


def test_an_input_that_the_loss_does_not_depend_on_has_no_gradient():
    weight, other = parameter([1.0]), parameter([1.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    found = scaler.grad(weight.sum(), [weight, other], allow_unused=True)
    assert (1.0, None) == (found[0].item(), found[1])


# Losses that are not finite


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_a_loss_that_is_not_finite_skips_and_may_hold_the_scale(hold, fused):
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=hold)
    scaler = ls.GradScaler("cpu", policy=policy)
    scaler.scale((weight * math.nan).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (1.0, 8.0 if hold else 4.0) == (weight.item(), scaler.get_scale())
    assert "loss" == scaler.last_step.reason
    # A loss that only its gradients overflow from lowers the scale.
    step(scaler, optimizer, math.inf, [weight])
    assert (4.0 if hold else 2.0) == scaler.get_scale()


def test_a_loss_that_is_not_finite_skips_though_its_gradients_are():
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    scaler = ls.GradScaler("cpu", policy=policy)
    scaler.scale(weight.sum() + math.inf).backward()
    assert weight.grad.item() == 8.0
    scaler.step(optimizer)
    scaler.update()
    assert (1.0, 8.0, False) == (
        weight.item(),
        scaler.get_scale(),
        scaler.last_step.loss_finite,
    )


# Other dtypes


def test_float16_is_refused_with_names_and_two_ways_out():
    module = torch.nn.Linear(1, 1).half()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", module=module))
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    with pytest.raises(ValueError, match="Attempting to unscale FP16") as raised:
        scaler.step(optimizer)
    for part in ("weight, bias", "torch.autocast", "allow_fp16=True"):
        assert part in str(raised.value)


@pytest.mark.parametrize("scale", [2.0**4, 3e5, 1 / 3, 2.0**-6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_unscaled_with_one_rounding(dtype, scale):
    """The factor 1 / 3e5 is no normal float16 number: it must stay in float32."""
    torch.manual_seed(0)
    gradient = (torch.randn(500) * 300).to(dtype)
    weight = torch.nn.Parameter(torch.zeros(500, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=scale, allow_fp16=True))
    weight.grad = gradient.clone()
    scaler.unscale_(optimizer)
    inverse = np.float32(1.0 / np.float64(np.float32(scale)))
    expected = torch.from_numpy(gradient.float().numpy() * inverse).to(dtype)
    assert expected.tolist() == weight.grad.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_narrow_gradients_that_unscaling_overflows_are_found(dtype, fused):
    largest = torch.finfo(dtype).max
    weight = parameter([1.0], dtype)
    optimizer = torch.optim.SGD([weight], lr=1e-9, fused=fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=0.5, allow_fp16=True))
    step(scaler, optimizer, largest, [weight])
    assert (1.0, "inf") == (weight.item(), scaler.last_step.reason)
    step(scaler, optimizer, largest / 2**23, [weight])
    assert scaler.last_step.applied


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("bad", [None, *BAD])
def test_complex_parameters_are_unscaled_and_checked(name, bad):
    weight = parameter([1.0 + 2.0j, 3.0], torch.complex64)
    plain = parameter([1.0 + 2.0j, 3.0], torch.complex64)
    optimizer, oracle = FUSED[name]([weight]), FUSED[name]([plain])
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    plain.grad = torch.tensor([1.0 - 2.0j, 0.5j])
    weight.grad = plain.grad * 8.0
    if bad is not None:
        weight.grad[0] = complex(1.0, bad)
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        oracle.step()
    assert plain.tolist() == weight.tolist()
    assert (8.0 if bad is None else 4.0) == scaler.get_scale()


# No gradients


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_gradients_may_count_as_clean(fused):
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = init_scale_tensor(
        ls.GradScaler(
            "cpu", init_scale=8.0, growth_interval=1, on_no_gradients="ignore"
        )
    )
    scaler.step(optimizer)
    scaler.update()
    assert (16.0, 1, 0) == (
        scaler.get_scale(),
        scaler.total_steps,
        scaler.skipped_steps,
    )
    assert (True, 8.0, ()) == (
        scaler.last_step.applied,
        scaler.last_step.scale,
        scaler.last_step.nonfinite_names,
    )


def test_an_update_without_a_step_may_count_as_clean():
    scaler = init_scale_tensor(
        ls.GradScaler(
            "cpu", init_scale=8.0, growth_interval=1, on_no_gradients="ignore"
        )
    )
    scaler.update()
    assert (16.0, 1) == (scaler.get_scale(), scaler.total_steps)
    assert scaler.last_step.applied
    assert scaler.last_step.scale == 8.0
    assert "applied" in repr(scaler.last_step)


# Disabled


def test_disabled_every_new_method_does_what_would_be_done_without():
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ls.GradScaler("cpu", enabled=False)
    (gradient,) = scaler.grad((weight**2).sum(), weight)
    assert gradient.item() == 2.0
    weight.grad = torch.tensor([2.0])
    scaler.accumulate(optimizer)
    assert weight.grad.item() == 2.0
    assert scaler.step_all(optimizer) == [None]
    assert weight.item() == -1.0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scaler.step_scheduler(scheduler)
    assert scheduler.get_last_lr() == [0.5]
    assert (True, None, None) == (
        scaler.step_applied().item(),
        scaler.last_step,
        scaler.flush(),
    )
    assert (0, 0, 0) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.consecutive_skips,
    )


@pytest.mark.parametrize("name", ["policy", "state"])
def test_disabled_there_is_still_a_policy_and_a_state(name):
    assert getattr(ls.GradScaler("cpu", enabled=False), name) is not None


def test_the_float16_that_is_refused_is_the_one_that_is_named():
    weights = [parameter([1.0])] + [parameter([1.0], torch.float16) for _ in range(8)]
    names = [(f"w{at}", weight) for at, weight in enumerate(weights)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", names=names))
    for weight in weights[1:]:  # the first has no gradient
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="of w1, w2, w3, w4, w5, w6 and 2 more are"):
        scaler.unscale_(optimizer)


def test_a_graph_is_kept_for_a_second_penalty_if_that_is_asked():
    weight = parameter([3.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    loss = (weight**2).sum()
    for keep in (True, False):
        (found,) = scaler.grad(loss, weight, create_graph=False, retain_graph=keep)
        assert (6.0, False) == (found.item(), found.requires_grad)
    with pytest.raises(RuntimeError, match="second time"):
        scaler.grad(loss, weight, create_graph=False)


def test_a_conjugated_gradient_is_unscaled_where_it_is():
    weight = parameter([1.0 + 1.0j, 2.0], torch.complex64)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([8.0 + 16.0j, 8.0j]).conj()
    assert weight.grad.is_conj()
    scaler.unscale_(optimizer)
    assert [1.0 - 2.0j, -1.0j] == weight.grad.tolist()


def test_step_all_refuses_an_optimizer_that_is_there_twice():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = ls.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(SettingError, match="twice"):
        scaler.step_all(optimizer, optimizer)
    assert 1.0 == weight.item()
    scaler.step_all(optimizer)
    assert 0.9 == pytest.approx(weight.item())
