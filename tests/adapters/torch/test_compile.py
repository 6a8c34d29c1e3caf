"""What torch.compile makes of the operators, of `scale` and of a whole step."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale.torch import operators  # noqa: E402
from lossscale.torch.verdict import CLIP, FOUND, HEADER, NORM  # noqa: E402


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in (10, 33, 0)]


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_operators_say_what_comes_out_of_them(max_norm):
    scale = torch.tensor(8.0)
    torch.library.opcheck(operators.look, (gradients(), scale, max_norm))
    torch.library.opcheck(operators.unscale_, (gradients(), scale))
    torch.library.opcheck(operators.multiply_, (gradients(), torch.rand(HEADER + 3)))


def test_a_compiled_look_and_multiplication_are_those_of_eager_mode():
    def clip(tensors, scale):
        verdict = torch.ops.lossscale.look(tensors, scale, 0.5)
        torch.ops.lossscale.multiply_(tensors, verdict)
        return verdict

    ours, expected = gradients(), gradients()
    scale = torch.tensor(8.0)
    assert torch.equal(clip(expected, scale), compiled(clip)(ours, scale))
    for one, other in zip(expected, ours, strict=True):
        assert torch.equal(one, other)


def test_a_look_finds_the_norm_and_what_is_not_finite():
    scale = torch.tensor(8.0)
    tensors = gradients()
    joined = torch.cat(tensors).double() / 8.0
    verdict = torch.ops.lossscale.look(tensors, scale)
    assert 0.0 == verdict[FOUND].item()
    assert joined.norm().item() == pytest.approx(verdict[NORM].item(), rel=1e-6)
    assert 1.0 == verdict[CLIP].item()
    tensors[1][3] = math.nan
    assert 1.0 == torch.ops.lossscale.look(tensors, scale)[FOUND].item()


def test_scaling_compiles_into_one_graph_and_follows_the_scale():
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))
    run = compiled(lambda loss: scaler.scale(loss * 1.0))
    assert 16.0 == run(torch.tensor(2.0)).item()
    scaler.update(4.0)
    assert 8.0 == run(torch.tensor(2.0)).item()


# torch.compile looks at .grad of a tensor that has none, and torch warns of it.
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
        return model.weight.detach(), scaler.get_scale(), scaler.steps

    torch._dynamo.reset()
    expected = train(lambda step: step)
    ours = train(lambda step: torch.compile(step, backend="aot_eager"))
    assert torch.equal(expected[0], ours[0])
    assert expected[1:] == ours[1:]
    assert 4 == ours[2]


def test_a_look_without_a_limit_clips_nothing():
    import lossscale.torch.operators  # noqa: F401
    from lossscale.torch.verdict import CLIP, FACTOR, NORM

    verdict = torch.ops.lossscale.look([torch.tensor([24.0, 32.0])], torch.tensor(8.0))
    assert (5.0, 1.0, 0.125) == tuple(verdict[[NORM, CLIP, FACTOR]].tolist())
