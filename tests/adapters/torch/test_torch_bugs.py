"""Where torch's class corrupts weights, momentum or its scale, and ours does not.

Every defect is shown to happen in torch first: when torch repairs one, its test fails
and the page that lists them wants a change.
"""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    CLASSES,
    FUSED,
    init_scale_tensor,
    parameter,
    snapshot,
    step,
)

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402

LARGEST = float(np.finfo(np.float32).max)
NORMAL = float(np.finfo(np.float32).tiny)


def make(cls, **arguments):
    if cls is ls.GradScaler:
        arguments["max_consecutive_skips"] = None
    return init_scale_tensor(cls("cpu", **arguments))


# A scale that collapses


def collapsed(cls, skips, gradient, fused):
    """Return the weights after so many skips and one step that is finite."""
    weight = parameter([1.0, 2.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = make(cls)
    for _ in range(skips):
        step(scaler, optimizer, math.inf, [weight])
    weight.grad = torch.tensor([0.0, gradient])
    scaler.step(optimizer)
    scaler.update()
    return weight, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("skips", "gradient"), [(144, 1.0), (165, 1.0), (166, 0.0), (200, 1.0)]
)
def test_a_collapsed_scale_ruins_torchs_weights_and_not_ours(skips, gradient, fused):
    weight, scale = collapsed(torch.amp.GradScaler, skips, gradient, fused)
    ruined = not weight.isfinite().all()
    # Dividing by a scale of 2**-128 instead of multiplying holds out a little longer.
    assert ruined or (fused and skips < 166)
    assert scale < NORMAL
    weight, scale = collapsed(ls.GradScaler, skips, gradient, fused)
    assert weight.isfinite().all()
    assert scale >= NORMAL


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_only_unscaling_makes_infinite_is_found(fused):
    """The mild form: finite as it comes, infinite when it is divided by 2**-10."""
    found = []
    for cls in CLASSES.values():
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = make(cls, init_scale=2.0**-10)
        step(scaler, optimizer, 1e37, [weight])
        found.append((weight.item(), scaler.get_scale()))
    assert [(-math.inf, 2.0**-10), (1.0, 2.0**-11)] == found


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**-126, 1e-30, 0.3])
@pytest.mark.parametrize("fused", [False, True])
def test_what_unscaling_makes_infinite_is_an_overflow_and_nothing_else(scale, fused):
    """The check is neither too early nor too late: NumPy is asked on both sides."""
    inverse = np.float32(1.0 / np.float64(np.float32(scale)))
    edge = np.float32(LARGEST * np.float64(np.float32(scale)))
    around = [edge]
    for _ in range(3):
        around = [np.nextafter(around[0], np.float32(0)), *around]
        around += [np.nextafter(around[-1], np.float32(np.inf))]
    for gradient in around:
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scaler = make(ls.GradScaler, init_scale=scale)
        step(scaler, optimizer, float(gradient), [weight])
        with np.errstate(over="ignore"):
            unscaled = gradient * inverse
        # What is finite is still more than weights can take again and again.
        expected = "headroom" if np.isfinite(unscaled) else "inf"
        if not LARGEST * (1 - 1e-6) < unscaled < math.inf:
            assert expected == scaler.last_step.reason
        assert 1.0 == weight.item()


# Momentum that was never written


def after_a_skipped_first_step(cls, **settings):
    """Return an optimizer that has skipped its first step, in dirty memory."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True, **settings)
    scaler = make(cls, init_scale=4.0)
    weight.grad = torch.full_like(weight, math.inf)
    # What is freed here is what an allocation of the same size gets next.
    dirt = [torch.full((1000,), math.nan) for _ in range(50)]
    del dirt
    scaler.step(optimizer)
    scaler.update()
    return weight, optimizer, scaler


def test_torch_keeps_momentum_that_was_never_written():
    _, optimizer, _ = after_a_skipped_first_step(torch.amp.GradScaler)
    (state,) = optimizer.state.values()
    buffer = state["momentum_buffer"]
    assert buffer is not None
    if not buffer.any():
        pytest.skip("the memory happened to be clean: nothing can be shown")
    assert not torch.equal(torch.zeros(1000), buffer)


@pytest.mark.parametrize(
    ("dampening", "nesterov"), [(0.0, False), (0.0, True), (0.5, False)]
)
def test_after_a_skipped_first_step_fused_momentum_starts_as_if_unskipped(
    dampening, nesterov
):
    settings = {"dampening": dampening, "nesterov": nesterov, "weight_decay": 0.1}
    weight, optimizer, scaler = after_a_skipped_first_step(ls.GradScaler, **settings)
    plain = torch.nn.Parameter(torch.ones(1000))
    oracle = torch.optim.SGD([plain], lr=1.0, momentum=0.9, fused=True, **settings)
    assert weight.tolist() == plain.tolist()
    for number in (1.0, -2.0, 0.5):
        weight.grad = torch.full_like(weight, number * scaler.get_scale())
        plain.grad = torch.full_like(plain, number)
        scaler.step(optimizer)
        scaler.update()
        oracle.step()
        assert snapshot(oracle) == snapshot(optimizer)


@pytest.mark.parametrize("name", FUSED)
def test_a_skipped_first_step_leaves_no_trace_in_a_fused_optimizer(name):
    weight, plain = parameter([1.0, 2.0]), parameter([1.0, 2.0])
    optimizer, oracle = FUSED[name]([weight], fused=True), FUSED[name]([plain])
    scaler = make(ls.GradScaler, init_scale=4.0)
    for _ in range(3):
        step(scaler, optimizer, math.nan, [weight])
    assert [1.0, 2.0] == weight.tolist()
    for _ in range(3):
        weight.grad = torch.tensor([3.0, -5.0]) * scaler.get_scale()
        plain.grad = torch.tensor([3.0, -5.0])
        scaler.step(optimizer)
        scaler.update()
        oracle.step()
    torch.testing.assert_close(plain, weight, rtol=1e-6, atol=0)


# Growth


@pytest.mark.parametrize("way", ["setter", "state"])
def test_lowering_the_interval_ends_growth_in_torch_and_not_in_ours(way):
    found = []
    for cls in CLASSES.values():
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler = make(cls, init_scale=4.0, growth_interval=10)
        for _ in range(5):
            step(scaler, optimizer, 1.0, [weight])
        if way == "setter":
            scaler.set_growth_interval(3)
        else:
            scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3})
        scales = []
        for _ in range(7):
            step(scaler, optimizer, 1.0, [weight])
            scales.append(scaler.get_scale())
        found.append(scales)
    assert [[4.0] * 7, [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0]] == found


@pytest.mark.parametrize("factor", [2.0, 16.0, 1.7, 3e38])
@pytest.mark.parametrize("arguments", [True, False])
def test_growth_never_leaves_float32(factor, arguments):
    """MPS and the sharded class have no such guard; ours is the same everywhere."""
    numbers = {"init_scale": 1e38, "growth_factor": factor, "growth_interval": 1}
    scaler = ls.GradScaler("cpu", policy=Dynamic(**numbers, max_scale=LARGEST))
    if arguments:
        scaler = ls.GradScaler("cpu", **numbers)
    init_scale_tensor(scaler)
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(5):
        step(scaler, optimizer, 1.0, [weight])
        assert 1e38 * (1 - 1e-7) <= scaler.get_scale() <= LARGEST


# float64 gradients beyond float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-4])
def test_a_finite_float64_gradient_beyond_float32_is_finite(fused, scale):
    """torch's kernel for CUDA takes it for an infinity; its CPU path is right."""
    for cls in CLASSES.values():
        weight = parameter([1.0], torch.float64)
        optimizer = torch.optim.SGD([weight], lr=1e-60, fused=fused)
        scaler = make(cls, init_scale=scale)
        step(scaler, optimizer, 1e60, [weight])
        assert scaler.get_scale() == scale
        assert weight.item() == pytest.approx(1.0 - 1.0 / scale, rel=1e-12)
    step(scaler, optimizer, math.inf, [weight])
    assert scaler.get_scale() == scale / 2


def test_such_a_gradient_is_reported_as_finite():
    weight = parameter([1.0], torch.float64)
    optimizer = torch.optim.SGD([weight], lr=1e-60, fused=True)
    scaler = make(ls.GradScaler, init_scale=2.0**-4)
    step(scaler, optimizer, 1e60, [weight])
    assert (True, ()) == (scaler.last_step.applied, scaler.last_step.nonfinite_names)


# An error within a fused step


@pytest.mark.parametrize("preset", [None, 3.0])
def test_an_error_in_a_fused_step_leaves_nothing_behind(preset):
    class Failing(torch.optim.SGD):
        _step_supports_amp_scaling = True
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise OSError
            self.divisor = None if self.grad_scale is None else self.grad_scale.item()

    divisors = []
    for cls in CLASSES.values():
        weight = parameter([1.0])
        weight.grad = torch.tensor([1.0])
        optimizer = Failing([weight], lr=1.0)
        scaler = make(cls, init_scale=4.0)
        if preset is not None:
            optimizer.grad_scale = torch.tensor(preset)
        with pytest.raises(OSError):  # noqa: PT011
            scaler.step(optimizer)
        left = hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")
        optimizer.fails = False
        scaler.step(optimizer)
        divisors.append((left, optimizer.divisor))
    own = preset or 1.0
    assert ((True, True), 16.0 * own) == divisors[0]
    assert ((preset is not None, False), 4.0 * own) == divisors[1]


# Settings at the edges


def test_a_policy_without_a_floor_of_its_own_stays_safe():
    for policy in (Dynamic(init_scale=2.0**-126), Fixed(2.0**-126)):
        weight = parameter([1.0])
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = init_scale_tensor(
            ls.GradScaler("cpu", policy=policy, max_consecutive_skips=None)
        )
        for gradient in (1.0, math.nan, 0.0, 3e38):
            step(scaler, optimizer, gradient, [weight])
            assert weight.isfinite().all()
            assert scaler.get_scale() == 2.0**-126
        # 1 / 2**-126 is finite in float32, so gradients are unscaled by it.
        step(scaler, optimizer, 2.0**-146, [weight])
        assert weight.item() == 1.0 - 2.0**-20


def test_a_parameter_without_a_gradient_gets_no_momentum():
    weight, other = parameter([1.0]), parameter([1.0])
    optimizer = torch.optim.SGD([weight, other], lr=1.0, momentum=0.9, fused=True)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([8.0])
    scaler.step(optimizer)
    assert [weight] == list(optimizer.state)
