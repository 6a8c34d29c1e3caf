"""What torch.compile makes of the operators, of `scale` and of a whole step."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale.torch.inspection import custom_ops  # noqa: E402


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in (10, 33, 0)]


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_operators_say_what_comes_out_of_them(max_norm):
    scale = torch.tensor(8.0)
    torch.library.opcheck(custom_ops.check_grads, (gradients(), scale, max_norm))
    torch.library.opcheck(custom_ops.unscale_grads_, (gradients(), scale))
    torch.library.opcheck(custom_ops.multiply_grads_, (gradients(), torch.rand(())))


def test_a_compiled_check_and_multiplication_are_those_of_eager_mode():
    def clip(tensors, scale):
        checked = torch.ops.lossscale.check_grads(tensors, scale, 0.5)
        torch.ops.lossscale.multiply_grads_(tensors, checked[3])
        return checked

    ours, expected = gradients(), gradients()
    scale = torch.tensor(8.0)
    pairs = zip(clip(expected, scale), compiled(clip)(ours, scale), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    for one, other in zip(expected, ours, strict=True):
        assert torch.equal(one, other)


def test_a_check_finds_the_norm_and_what_is_not_finite():
    scale = torch.tensor(8.0)
    tensors = gradients()
    joined = torch.cat(tensors).double() / 8.0
    found_inf, norm, grad_scale, factor, _ = torch.ops.lossscale.check_grads(
        tensors, scale, None
    )
    assert (0.0, 8.0, 0.125) == (found_inf.item(), grad_scale.item(), factor.item())
    assert joined.norm().item() == pytest.approx(norm.item(), rel=1e-6)
    tensors[1][3] = math.nan
    found_inf, *_, amaxes = torch.ops.lossscale.check_grads(tensors, scale, None)
    assert 1.0 == found_inf.item()
    assert [False, True, False] == torch.isnan(amaxes).tolist()


def test_scaling_compiles_into_one_graph_and_follows_the_scale():
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))
    run = compiled(lambda loss: scaler.scale(loss * 1.0))
    assert 16.0 == run(torch.tensor(2.0)).item()
    scaler.update(4.0)
    assert 8.0 == run(torch.tensor(2.0)).item()


# torch.compile reads .grad of a tensor that has none, and torch warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_whole_step_under_torch_compile_is_the_step_without():
    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ls.GradScaler("cpu", growth_interval=2)
        batch = torch.randn(2, 4)

        def step():
            optimizer.zero_grad()
            scaler.scale((model(batch) ** 2).mean()).backward()
            scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()

        run = wrap(step)
        for _ in range(4):
            run()
        return model.weight.detach(), scaler.get_scale(), scaler.total_steps

    torch._dynamo.reset()
    expected = train(lambda step: step)
    ours = train(lambda step: torch.compile(step, backend="aot_eager"))
    assert torch.equal(expected[0], ours[0])
    assert expected[1:] == ours[1:]
    assert 4 == ours[2]
