"""A new scale given to `update`, compared with torch's."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    both,
    init_scale_tensor,
    one_weight,
    result_or_error,
    step,
)

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402


@both
def test_a_new_scale_replaces_the_rule_and_keeps_the_tracker(cls):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    weight, optimizer = one_weight()
    step(scaler, optimizer, 1.0, [weight])
    for new in (3.0, torch.tensor(5.0), torch.tensor(7.0, dtype=torch.float64)):
        weight.grad = torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update(new)
        assert (float(new), 1) == (scaler.get_scale(), scaler._get_growth_tracker())
        assert {} == dict(scaler._per_optimizer_states)
    scaler.update(2.5)  # needs no step
    assert scaler.get_scale() == 2.5


@both
def test_a_new_scale_is_copied(cls):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    new = torch.tensor(8.0)
    scaler.update(new)
    new.fill_(1.0)
    assert scaler.get_scale() == 8.0


@both
@pytest.mark.parametrize(
    "new",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(2.0, device="meta"),
    ],
    ids=["two numbers", "requires_grad", "another device"],
)
def test_an_invalid_new_scale_is_refused_in_torchs_words(cls, new):
    scaler = init_scale_tensor(cls("cpu", init_scale=4.0))
    text = (
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
        "torch.FloatTensor with requires_grad=False."
    )
    assert (AssertionError, text) == result_or_error(lambda: scaler.update(new))
    assert scaler.get_scale() == 4.0


@both
def test_an_integer_is_no_new_scale(cls):
    scaler = init_scale_tensor(cls("cpu"))
    with pytest.raises(AttributeError):
        scaler.update(2)


@pytest.mark.parametrize("new", [0.0, -1.0, math.inf, math.nan, torch.tensor(0.0)])
def test_a_new_scale_that_would_corrupt_is_refused_which_torch_does_not_do(new):
    init_scale_tensor(torch.amp.GradScaler("cpu")).update(new)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=4.0))
    with pytest.raises(SettingError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 4.0
