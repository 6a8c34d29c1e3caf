"""What `GradScaler` knows about our optimizers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale.torch import optim  # noqa: E402

OPTIMIZERS = {
    "AdamW": lambda params: optim.AdamW(params, master_weights=True),
    "SGD": lambda params: optim.SGD(params, 0.1, 0.9, master_weights=True),
    "dampened SGD": lambda params: optim.SGD(
        params, 0.1, 0.9, 0.5, master_weights=True
    ),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def make(name, gradient, scale=1.0, dtype=torch.float16):
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    scaler = ls.GradScaler("cpu", init_scale=scale)
    scaler.scale(weight.float().sum()).backward()
    weight.grad.fill_(gradient)
    return weight, OPTIMIZERS[name]([weight]), scaler


@EACH
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "accumulate", "none"])
def test_float16_gradients_need_no_switch(name, call):
    weight, optimizer, scaler = make(name, 1.0, scale=2.0)
    if call == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 10.0, write_back=True)
    elif call != "none":
        getattr(scaler, call)(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    (master,) = optimizer.master_parameters()
    other = torch.nn.Parameter(torch.ones(3))
    expected = OPTIMIZERS[name]([other])
    other.grad = torch.full((3,), 0.5)
    expected.step()
    assert torch.equal(other.detach(), master)
    assert torch.equal(other.detach().half(), weight)


def accumulate_and_step(optimizer, weight, gradients, scale=1.0):
    scaler = ls.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient * scale)
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("gradients", "scale"),
    [((1e-8, 2e-8), 2.0**16), ((40_000.0, 40_000.0), 1.0)],
    ids=["small", "large"],
)
def test_sums_that_float16_cannot_hold_reach_the_master(gradients, scale, momentum):
    """Unscaled, 1e-8 would be zero in float16; 80,000 would be infinite."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = optim.SGD([weight], 2.0**-4, momentum, master_weights=True)
    scaler = accumulate_and_step(optimizer, weight, gradients, scale)
    assert scaler.last_step.applied
    halves = torch.tensor(gradients).mul(scale).half().double() / scale
    expected = -(2.0**-4) * halves.sum().item()
    (master,) = optimizer.master_parameters()
    assert [expected] * 3 == pytest.approx(master.tolist(), rel=1e-6, abs=0.0)
    assert torch.equal(master.half(), weight)


def test_a_small_sum_reaches_a_float16_weight_without_a_master():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = optim.SGD([weight], lr=64.0)
    accumulate_and_step(optimizer, weight, (1e-8, 2e-8), 2.0**16)
    assert [-64.0 * 3e-8] * 3 == pytest.approx(weight.tolist(), rel=0.02)


def test_small_parts_of_a_sum_are_not_rounded_away():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = optim.SGD([weight], lr=1.0, master_weights=True)
    accumulate_and_step(optimizer, weight, [1.0, 2.0**-12, 2.0**-12])
    (master,) = optimizer.master_parameters()
    assert -(2.0**-11) == master.item()


def test_backward_goes_on_in_float16_after_a_sum():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = optim.SGD([weight], lr=0.0, master_weights=True)
    for _ in range(2):
        accumulate_and_step(optimizer, weight, [1.0, 2.0])
        assert torch.float32 == weight.grad.dtype
        optimizer.zero_grad()
        (2 * weight).sum().backward()
        assert torch.float16 == weight.grad.dtype


@pytest.mark.parametrize("gradients", [(40_000.0, 40_000.0), (1.0,)], ids=str)
def test_sums_are_clipped_in_float32(gradients):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = optim.SGD([weight], lr=1.0, master_weights=True)
    scaler = ls.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        scaler.accumulate(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert sum(gradients) == norm.item()
    (master,) = optimizer.master_parameters()
    assert -0.5 == pytest.approx(master.item(), rel=1e-5)


CALLS = {
    "none": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 100.0),
    "clip and write back": lambda scaler, optimizer: scaler.clip_grad_norm_(
        optimizer, 100.0, write_back=True
    ),
    "accumulate": lambda scaler, optimizer: scaler.accumulate(optimizer),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_half_weights_without_masters_are_updated_in_float32(name, dtype):
    """In float16 the epsilon of Adam is zero, and so is the square of 2**-14."""
    settings = {"lr": 0.01} | ({"momentum": 0.5} if name == "SGD" else {})
    found = {}
    for call, prepare in CALLS.items():
        weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 9, dtype=dtype))
        optimizer = getattr(optim, name)([weight], **settings)
        scaler = ls.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(3):
            scaler.scale(torch.zeros(()))
            # Unscaled it is a number of float16 still.
            weight.grad = torch.linspace(0.0, 2.0**-4, 9).to(dtype)
            prepare(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        found[call] = {"weight": weight.detach(), **optimizer.state[weight]}
    for call, tensors in found.items():
        for key, tensor in tensors.items():
            assert tensor.isfinite().all(), (call, key)
            assert torch.equal(found["none"][key], tensor), (call, key)


def test_float16_gradients_of_torchs_optimizers_still_need_it():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    scaler = ls.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.float().sum()).backward()
    with pytest.raises(ValueError, match="allow_fp16"):
        scaler.unscale_(torch.optim.SGD([weight]))


@EACH
def test_a_gradient_that_float32_masters_can_hold_is_applied_at_the_first_step(name):
    """A float16 momentum could hold 300 but not its square, nor many of 30,000."""
    for gradient in (300.0, 30_000.0):
        _, optimizer, scaler = make(name, gradient)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied


@pytest.mark.parametrize("moments", [None, torch.bfloat16], ids=str)
def test_a_finite_gradient_whose_square_leaves_float32_skips_the_step(moments):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([weight], moments_dtype=moments)
    scaler = ls.GradScaler("cpu", init_scale=1.0)
    for gradient, applied in ((1e18, True), (1e20, False)):
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(gradient)
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert applied == scaler.last_step.applied
        assert applied != torch.equal(before, weight)
        assert optimizer.state[weight]["exp_avg_sq"].isfinite().all()
    assert "headroom" == scaler.last_step.reason


def test_a_large_model_has_the_headroom_of_torchs_adam():
    """The squares of elements are averaged one by one; their number does not matter."""
    weight = torch.nn.Parameter(torch.ones(10_000))
    for kind in (torch.optim, optim):
        optimizer = kind.AdamW([weight], fused=True)
        scaler = ls.GradScaler("cpu", init_scale=1.0)
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(1e18)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied


@EACH
def test_a_skipped_first_step_leaves_no_state_that_differs(name):
    weight, optimizer, scaler = make(name, torch.inf, scale=2.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.skipped
    weight.grad.fill_(1.0)
    scaler.scale(weight.float().sum() * 0.0)  # a new iteration
    scaler.step(optimizer)
    scaler.update()
    (master,) = optimizer.master_parameters()
    other = torch.nn.Parameter(torch.ones(3))
    expected = OPTIMIZERS[name]([other])
    other.grad = torch.ones(3)
    expected.step()
    assert torch.equal(other.detach(), master)
    for key, value in expected.state[other].items():
        assert torch.equal(value, optimizer.state[weight][key]), key


def test_a_schedule_is_held_back_by_a_skipped_step():
    weight, optimizer, scaler = make("AdamW", torch.inf, scale=2.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for gradient in (torch.inf, 1.0):
        scaler.scale(weight.float().sum() * 0.0)
        weight.grad.fill_(gradient)
        scaler.step(optimizer)
        scaler.update()
        scaler.step_scheduler(schedule)
    assert [5e-4] == schedule.get_last_lr()


def test_several_optimizers_are_skipped_together():
    first, one, scaler = make("AdamW", 1.0, scale=2.0)
    second = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    second.grad = torch.full((2,), torch.inf, dtype=torch.float16)
    other = OPTIMIZERS["SGD"]([second])
    scaler.step_all(one, other)
    scaler.update()
    assert [1.0] * 3 == first.tolist()
    assert [1.0] * 2 == second.tolist()
