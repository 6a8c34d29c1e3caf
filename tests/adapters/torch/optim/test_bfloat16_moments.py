"""Second moments in bfloat16 follow those in float32."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.optimizers import check_equal, set_grads, tensors_of  # noqa: E402
from helpers.rounding import round_stochastically  # noqa: E402

from lossscale.torch import optim  # noqa: E402
from lossscale.torch.optim.rounding import round_stochastically_  # noqa: E402

BFLOAT16 = torch.bfloat16


def train(gradients, **more):
    """Return the second moments after so many steps with each gradient."""
    weight = torch.nn.Parameter(torch.ones(256))
    optimizer = optim.AdamW([weight], lr=0.0, **more)
    found = []
    for gradient, steps in gradients:
        weight.grad = torch.full_like(weight, gradient)
        for _ in range(steps):
            optimizer.step()
        found.append(optimizer.state[weight]["exp_avg_sq"].double().numpy().copy())
    return found


def test_a_second_moment_follows_smaller_gradients():
    """Rounded to nearest it would stay at 0.25 from the first steps on."""
    gradients = ((1.0, 1000), (1e-3, 1500))
    exact = [square[0] for square in train(gradients)]
    found = train(gradients, moments_dtype=BFLOAT16)
    for expected, squares in zip(exact, found, strict=True):
        # The noise of 256 elements: 2 percent of each, more while it falls.
        assert expected == pytest.approx(squares.mean(), rel=0.02)
        assert squares.std() < 0.15 * expected


def test_the_noise_is_that_of_the_hash():
    generator = np.random.default_rng(0)
    values = generator.lognormal(sigma=4.0, size=5000).astype(np.float32)
    values[:4] = [0.0, np.inf, np.nan, 2.0**-140]
    for step in (1, 2, 77, 2**24):
        found = torch.tensor(values)
        round_stochastically_(found, torch.tensor(float(step)))
        expected = round_stochastically(values, step)
        np.testing.assert_array_equal(expected, found.numpy())
        assert torch.equal(found.to(BFLOAT16).float().nan_to_num(), found.nan_to_num())


def test_positions_beyond_32_bits_have_a_hash():
    from lossscale.torch.optim.rounding import _hash

    index = torch.tensor([5, 2**31 + 5, 2**32 + 5, 2**33 + 5])
    assert 4 == len(set(_hash(index, torch.tensor(1, dtype=torch.int32)).tolist()))


def test_numbers_of_bfloat16_stay():
    values = torch.randn(1000).to(BFLOAT16).float()
    rounded = values.clone()
    round_stochastically_(rounded, torch.tensor(3.0))
    assert torch.equal(values, rounded)


def test_the_mean_of_many_steps_is_the_number_itself():
    values = torch.linspace(1.0, 2.0, 64)
    total = torch.zeros(64, dtype=torch.float64)
    for step in range(4000):
        rounded = values.clone()
        round_stochastically_(rounded, torch.tensor(float(step)))
        total += rounded
    # Five standard deviations of the mean of 4,000 roundings.
    bound = 5 * 2.0**-7 * 0.5 / 4000**0.5
    assert bool(((total / 4000 - values).abs() < bound).all())


def test_pieces_have_the_noise_of_the_whole(monkeypatch):
    from lossscale.torch.optim import rounding

    values = torch.rand(1000)
    whole, pieces = values.clone(), values.clone()
    round_stochastically_(whole, torch.tensor(3.0))
    monkeypatch.setattr(rounding, "_PIECE", 64)
    round_stochastically_(pieces, torch.tensor(3.0))
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_a_resumed_training_equals_the_uninterrupted_one(dtype):
    def make():
        params = [torch.nn.Parameter(torch.ones(9, 7, dtype=dtype).t())]
        return optim.AdamW(params, lr=0.01, moments_dtype=BFLOAT16), params

    whole, params = make()
    first, others = make()
    for number in range(6):
        if number == 3:
            resumed, again = make()
            again[0].data.copy_(others[0])
            resumed.load_state_dict(first.state_dict())
            first, others = resumed, again
        for optimizer, own in ((whole, params), (first, others)):
            set_grads(own, number)
            optimizer.step()
    check_equal(tensors_of(whole), tensors_of(first))


def test_the_largest_second_moment_is_rounded_to_nearest():
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([weight], moments_dtype=BFLOAT16, amsgrad=True)
    weight.grad = torch.full((5,), 1.01)
    optimizer.step()
    square = torch.tensor(0.001) * 1.01**2
    assert {square.bfloat16().item()} == set(
        optimizer.state[weight]["max_exp_avg_sq"].tolist()
    )
