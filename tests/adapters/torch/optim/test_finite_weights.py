"""A finite step never makes a half-precision weight infinite."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import StateError  # noqa: E402
from lossscale.torch import optim  # noqa: E402

LARGEST = 65_504.0
OPTIMIZERS = {
    "AdamW": lambda params, **more: optim.AdamW(
        params, lr=100.0, weight_decay=0.0, **more
    ),
    "SGD": lambda params, **more: optim.SGD(params, lr=100.0, momentum=0.5, **more),
}


def train(optimizer, param, gradient):
    scaler = ls.GradScaler("cpu", init_scale=1.0)
    for _ in range(3):
        scaler.scale(torch.zeros(()))
        param.grad = torch.full_like(param, gradient)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.applied


@pytest.mark.parametrize("choice", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [3, 2**13], ids=["small", "large"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_float16_weight_stops_at_the_largest_number(
    name, size, sign, masters, choice
):
    param = torch.nn.Parameter(torch.full((size,), sign * 65_440.0).half())
    optimizer = OPTIMIZERS[name]([param], master_weights=masters, **choice)
    train(optimizer, param, -sign)
    assert {sign * LARGEST} == set(param.tolist())
    if masters:
        (master,) = optimizer.master_parameters()
        assert bool((master * sign > LARGEST + 100.0).all())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bfloat16_weight_stops_at_the_largest_number(name):
    largest = torch.finfo(torch.bfloat16).max
    param = torch.nn.Parameter(torch.full((3,), largest, dtype=torch.bfloat16))
    optimizer = OPTIMIZERS[name]([param], master_weights=True)
    optimizer.param_groups[0]["lr"] = 3e35
    train(optimizer, param, -1.0)
    assert {largest} == set(param.tolist())
    (master,) = optimizer.master_parameters()
    assert bool((master > largest).all())


def test_a_weight_comes_back_when_its_master_does():
    param = torch.nn.Parameter(torch.full((3,), LARGEST, dtype=torch.float16))
    optimizer = optim.SGD([param], lr=1.0, master_weights=True)
    for gradient, expected in ((-96.0, LARGEST), (64.0, LARGEST), (64.0, 65_472.0)):
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        assert [expected] * 3 == param.tolist()


def test_a_weight_that_is_not_a_number_stays_that():
    param = torch.nn.Parameter(torch.tensor([torch.nan, 1.0]).half())
    optimizer = optim.AdamW([param], lr=1.0, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    assert [True, False] == param.isnan().tolist()


def test_float32_weights_beyond_float16_are_loaded_as_the_largest_number():
    model = torch.nn.Linear(2, 2).half()
    optimizer = optim.AdamW(model.parameters(), master_weights=True)
    weights = {"weight": torch.full((2, 2), 1e5), "bias": torch.full((2,), 2.0)}
    with pytest.warns(UserWarning, match="largest number: weight"):
        optimizer.load_float32_state_dict(model, weights)
    assert {LARGEST} == set(model.weight.flatten().tolist())
    weight, bias = optimizer.master_parameters()
    assert torch.equal(weights["weight"], weight)
    assert torch.equal(weights["bias"], bias)
    assert [2.0, 2.0] == model.bias.tolist()


def test_weights_without_masters_are_loaded_as_the_largest_number_too():
    model = torch.nn.Linear(2, 2, bias=False).half()
    optimizer = optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="largest number: weight"):
        optimizer.load_float32_state_dict(model, {"weight": torch.full((2, 2), -1e5)})
    assert {-LARGEST} == set(model.weight.flatten().tolist())


def test_renamed_float32_weights_are_refused_before_anything_is_changed():
    model = torch.nn.Linear(2, 2).half()

    def rename(_, weights, *__):
        for name in list(weights):
            weights[name.removeprefix("module.")] = weights.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    optimizer = optim.AdamW(model.parameters(), master_weights=True)
    before = [param.detach().clone() for param in model.parameters()]
    weights = {f"module.{x}": p.detach() + 1.0 for x, p in model.named_parameters()}
    with pytest.raises(StateError, match="no weights for bias"):
        optimizer.load_float32_state_dict(model, weights)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
