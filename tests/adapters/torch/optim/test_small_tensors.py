"""Small tensors of a CPU are updated together, copied to one; the bits are torch's.

The oracle is torch's foreach AdamW on float32 weights, with the gradients that ours is
given, unscaled in float32. Sizes that no vector register divides are among the shapes,
because a processor may treat the end of a tensor in its own way.
"""

import pytest
import torch

from lossscale.torch.optim import Adam, AdamW
from lossscale.torch.optim.masters import MASTER

SHAPES = [(1,), (3,), (7,), (17,), (33,), (5, 7), (64,), (2, 3, 4), (130,), (999,), ()]
SHAPES += [(5000,), (40_000,), (8,)]
"""The last but one is large, and updated by itself in between."""
STEPS = 4

SETTINGS = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "no decay": {"weight_decay": 0.0},
}


def make_weights(*, transposed: bool) -> list[torch.Tensor]:
    """Return float32 weights; transposed ones are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [w.t() if transposed and w.dim() == 2 else w for w in weights]


def make_grads(step: int, weights, *, missing: bool) -> list[torch.Tensor | None]:
    """Return gradients; with `missing` each parameter lacks one now and then."""
    generator = torch.Generator().manual_seed(1 + step)
    grads = [torch.randn(weight.shape, generator=generator) for weight in weights]
    if not missing:
        return grads
    return [g if (step + i) % 3 else None for i, g in enumerate(grads)]


@pytest.mark.parametrize("missing", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("transposed", [False, True], ids=["dense", "transposed"])
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 1024.0], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_and_moments_are_torchs(setting, scale, half, transposed, missing):
    weights = make_weights(transposed=transposed)
    # With masters every other parameter is in half precision, as norms are not.
    dtypes = [
        half if half and i % 2 == 0 else torch.float32 for i in range(len(SHAPES))
    ]
    starts = [w.to(d).float() for w, d in zip(weights, dtypes, strict=True)]
    theirs = [torch.nn.Parameter(start.clone()) for start in starts]
    ours = [torch.nn.Parameter(s.to(d)) for s, d in zip(starts, dtypes, strict=True)]
    torchs = torch.optim.AdamW(theirs, 1e-2, foreach=True, **SETTINGS[setting])
    optimizer = AdamW(ours, 1e-2, master_weights=True, **SETTINGS[setting])
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.found_inf = torch.tensor(0.0)
    for step in range(STEPS):
        grads = make_grads(step, starts, missing=missing)
        for mine, other, grad, dtype in zip(ours, theirs, grads, dtypes, strict=True):
            mine.grad = other.grad = None
            if grad is not None:
                mine.grad = (grad * (scale or 1.0)).to(dtype)
                # A power of two: dividing by it is exact.
                other.grad = mine.grad.float() / (scale or 1.0)
        optimizer.step()
        torchs.step()
    for mine, other, dtype in zip(ours, theirs, dtypes, strict=True):
        state = optimizer.state[mine]
        master = state.get(MASTER, mine)
        assert torch.equal(master, other)
        assert torch.equal(mine, other.to(dtype))
        for name, value in torchs.state[other].items():
            assert torch.equal(state[name], value), name


def test_weights_beyond_float16_stop_at_its_largest_number():
    largest = torch.finfo(torch.float16).max
    weights = [torch.nn.Parameter(torch.full((3,), largest).half()) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.full((3,), -1.0).half()
    optimizer = Adam(weights, 1000.0, master_weights=True)
    optimizer.step()
    for _ in range(3):
        optimizer.step()
    for weight in weights:
        assert weight.tolist() == [largest] * 3
        assert (optimizer.state[weight][MASTER] > largest + 3000).all()


def test_a_parameter_that_was_cast_to_float32_follows_its_master():
    weights = [torch.nn.Parameter(torch.ones(3).half()) for _ in range(4)]
    optimizer = AdamW(weights, 2.0**-6, weight_decay=0.0, master_weights=True)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        for weight in weights:
            weight.grad = None
            weight.data = weight.data.float()
    for weight in weights:
        assert torch.equal(weight, optimizer.state[weight][MASTER])
        assert not torch.equal(weight, torch.full((3,), 1 - 2.0**-6))


def test_a_step_that_raises_counts_nothing_and_can_be_taken_again():
    weights = []
    for raises in (True, False):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        optimizer = AdamW(params, lr=0.5)
        for number in range(2):
            for param in params:
                param.grad = torch.full_like(param, 1.0 + number)
            if raises and number:
                optimizer.param_groups[0]["lr"] = "x"
                with pytest.raises(TypeError):
                    optimizer.step()
                assert 1.0 == optimizer.state[params[0]]["step"].item()
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.step()
        weights.append(params[0].detach())
    assert torch.equal(*weights)
