"""Whether the loss was finite is known, and advice says only what follows."""

import math
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import init_scale_tensor, parameter, step  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale import Fixed  # noqa: E402
from lossscale.errors import CollapseWarning  # noqa: E402


def problem(**settings):
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=0.5, **settings)


def advice(scaler, take_step):
    """Return what the alarm says after three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            take_step()
    (warning,) = caught
    assert warning.category is CollapseWarning
    return str(warning.message)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_the_reason(value):
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert ("loss", False) == (scaler.last_step.reason, scaler.last_step.loss_finite)
    assert 32768.0 == scaler.get_scale()  # as torch moves it


def test_a_loss_is_known_to_be_finite_where_gradients_are_not():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    scaler.scale(weight.sqrt().sum() * 0.0 + (weight - 1.0).sqrt().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert ("inf", True) == (scaler.last_step.reason, scaler.last_step.loss_finite)


def test_one_of_several_losses_is_enough():
    weight, optimizer = problem()
    for values in ((1.0, math.nan), (math.nan, 1.0)):
        optimizer.zero_grad()
        scaler = ls.GradScaler("cpu")
        losses = [(weight * value).sum() for value in values]
        for loss in scaler.scale(losses):
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.loss_finite is False


def test_of_a_vector_nothing_is_known():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    scaler.scale(weight.expand(3) * 2.0).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.loss_finite is None


def test_a_nan_that_the_scale_has_made_is_not_blamed_on_the_forward_pass():
    """Inf - inf in a backward pass: four skips later the same run trains."""
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=512.0, max_consecutive_skips=3)

    def take_step():
        optimizer.zero_grad()
        # From a scale of 64 on, two gradients of the weight are inf and -inf.
        loss = weight * 1e37 - weight * 1e37 + weight
        scaler.scale(loss.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    text = advice(scaler, take_step)
    assert "Reasons: 3 nan." in text
    assert "The loss was finite" in text
    assert "forward pass" not in text
    for _ in range(3):
        take_step()
    assert scaler.last_step.applied


def test_a_loss_that_stays_nan_is_looked_for_in_the_forward_pass():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", max_consecutive_skips=3)

    def take_step():
        optimizer.zero_grad()
        scaler.scale((weight * math.nan).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    text = advice(scaler, take_step)
    assert "Reasons: 3 loss." in text
    assert "forward pass" in text


def test_gradients_that_are_too_large_are_to_be_clipped():
    weight = parameter([1.0])
    optimizer = torch.optim.Adam([weight])
    scaler = init_scale_tensor(ls.GradScaler("cpu", max_consecutive_skips=3))
    text = advice(scaler, lambda: step(scaler, optimizer, 3e38, [weight]))
    assert "clip_grad_norm_()" in text
    assert "lower scale" not in text


def test_infinities_at_a_low_scale_are_not_the_scales():
    weight, optimizer = problem()
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", init_scale=4.0, max_consecutive_skips=3)
    )
    text = advice(scaler, lambda: step(scaler, optimizer, math.inf, [weight]))
    assert "at a scale of 1 or below" in text


def test_a_scale_that_cannot_move_is_said_so():
    weight, optimizer = problem()
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", policy=Fixed(65536.0), max_consecutive_skips=3)
    )
    text = advice(scaler, lambda: step(scaler, optimizer, math.inf, [weight]))
    assert "The scale has not moved" in text


def test_where_the_loss_is_not_known_nothing_is_said_of_it():
    weight, optimizer = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu", max_consecutive_skips=3))
    scaler.update(65536.0)
    text = advice(scaler, lambda: step_without_loss(scaler, optimizer, weight))
    assert "The loss was" not in text


def step_without_loss(scaler, optimizer, weight):
    weight.grad = torch.full_like(weight, math.inf)
    scaler.step(optimizer)
    scaler.update()


# What is measured


def test_the_largest_magnitude_is_measured_if_asked_for_and_unscaled_as_the_norm_is():
    weight, optimizer = problem()
    other = parameter([1.0])
    optimizer.add_param_group({"params": [other]})
    for asked in (False, True):
        scaler = init_scale_tensor(
            ls.GradScaler("cpu", init_scale=8.0, measure_amax=asked)
        )
        weight.grad, other.grad = torch.tensor([24.0]), torch.tensor([-32.0])
        scaler.step(optimizer)
        scaler.update()
        assert (4.0 if asked else None) == scaler.last_step.amax
        assert 5.0 == scaler.last_step.norm


def test_a_complex_loss_is_scaled():
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    assert 8.0 + 16.0j == scaler.scale(torch.tensor(1.0 + 2.0j))


def test_a_loss_inside_vmap_is_scaled():
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    slopes = torch.func.vmap(torch.func.grad(lambda x: scaler.scale(x**2)))
    assert [16.0, 32.0] == slopes(torch.tensor([1.0, 2.0])).tolist()
