"""No fault in a gradient reaches the weights through the classic wrapper on torch."""

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_classic import BAD, DENSE, make_optimizer  # noqa: E402

import lossscale.torch.classic as ls  # noqa: E402


def faulty(rng, weight, kind):
    """Return a gradient with one bad number somewhere, or with none."""
    gradient = torch.randn(weight.shape, dtype=torch.float32).to(weight.dtype)
    largest = torch.finfo(weight.dtype).max
    if kind != "clean":
        fault = rng.choice([*BAD, largest, -largest, largest / 3])
        parts = torch.view_as_real(gradient) if weight.is_complex() else gradient
        parts.view(-1)[rng.randrange(parts.numel())] = fault
    return gradient


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16,),
        (torch.complex64, torch.float32),
    ],
    ids=["float", "bfloat16", "float16", "complex"],
)
@pytest.mark.parametrize("make", DENSE)
@pytest.mark.parametrize("style", ["apply_gradients", "step"])
def test_no_weight_ever_becomes_infinite_or_nan(make, dtypes, style):
    is_complex = any(dtype.is_complex for dtype in dtypes)
    if is_complex and make in ("fused adam", "adafactor"):
        pytest.skip(f"{make} has no complex parameters")
    rng = random.Random(f"{make} {dtypes}")
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(5, 3, dtype=dtype)) for dtype in dtypes]
    optimizer = ls.LossScaleOptimizer(
        make_optimizer(make, weights, dtype=dtypes[0]),
        ls.DynamicLossScale(2.0**10, 3, floor=2.0**-100),
    )
    moved = 0
    for _ in range(40):
        kind = rng.choice(["clean", "clean", "faulty"])
        before = [weight.detach().clone() for weight in weights]
        pairs = [(faulty(rng, weight, kind), weight) for weight in weights]
        if style == "step":
            for gradient, weight in pairs:
                weight.grad = gradient
            optimizer.step()
        else:
            optimizer.apply_gradients(pairs)
        assert all(weight.isfinite().all() for weight in weights)
        for state in optimizer.state.values():
            for slot in state.values():
                assert not torch.is_tensor(slot) or slot.isfinite().all()
        moved += not all(map(torch.equal, before, weights))
    assert moved > 5


# torch's own Adagrad makes sparse tensors in a way that torch warns about.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", ["sgd", "sparse adam", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_row_of_an_embedding_ever_becomes_infinite_or_nan(make, dtype):
    table = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype)
    torch.nn.init.ones_(table.weight)
    optimizer = ls.LossScaleOptimizer(
        make_optimizer(make, list(table.parameters()), dtype=dtype),
        ls.DynamicLossScale(2.0**10, 3),
    )
    rng = random.Random(0)
    for _ in range(40):
        rows = torch.tensor(rng.choices(range(6), k=4))
        factor = rng.choice([0.01, 0.01, 0.1, *BAD, torch.finfo(dtype).max])
        optimizer.zero_grad()
        optimizer.backward((table(rows) * factor).sum())
        optimizer.step()
        assert table.weight.isfinite().all()
    assert not torch.equal(torch.ones(6, 3, dtype=dtype), table.weight)


# Finite gradients that the optimizer cannot square


@pytest.mark.parametrize("value", [1e20, -3e38])
@pytest.mark.parametrize(
    "loss_scale",
    [
        lambda: ls.DynamicLossScale(8.0),
        lambda: ls.ExponentialUpdateLossScaleManager(8.0, 2, 1),
    ],
    ids=["loss scale", "manager"],
)
def test_a_gradient_that_cannot_be_squared_is_skipped_and_leaves_the_scale(
    loss_scale, value
):
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([weight])
    scale = loss_scale()
    wrapper = ls.LossScaleOptimizer(inner, scale)
    wrapper.apply_gradients([(torch.tensor([value, 1.0]), weight)])
    is_manager = isinstance(scale, ls.LossScaleManager)
    after = scale.get_loss_scale() if is_manager else scale()
    assert ([1.0, 1.0], 8.0, 0) == (weight.tolist(), after.item(), len(inner.state))
