"""Steps that raise, are never taken, or are given up: what the next one does."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import both, parameter  # noqa: E402

import lossscale.torch as ls  # noqa: E402

SCALE = 1024.0


def problem(**settings):
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=0.5, **settings)


def backward(scaler, weight, factor=1.0):
    scaler.scale((weight * factor).sum()).backward()


class Once:
    """A hook that raises MemoryError the first time it is called."""

    def __init__(self):
        self.raised = False

    def __call__(self, *_):
        if not self.raised:
            self.raised = True
            raise MemoryError


def raise_once(scaler, optimizer, *, after=False):
    """Step an optimizer whose hook raises; the hook does nothing from then on."""
    register = (
        optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
    )
    register(Once())
    with pytest.raises(MemoryError):
        scaler.step(optimizer)


# A step that raised


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_after_a_step_that_raised_new_gradients_are_unscaled(fused, unscales):
    weight, optimizer = problem(fused=fused)
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    if unscales:
        scaler.unscale_(optimizer)
    raise_once(scaler, optimizer)
    optimizer.zero_grad()
    backward(scaler, weight)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert 0.5 == weight.item()


def test_torch_applies_scaled_gradients_after_a_step_that_raised():
    weight, optimizer = problem()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    raise_once(scaler, optimizer)
    optimizer.zero_grad()
    backward(scaler, weight)
    scaler.step(optimizer)
    assert 1.0 - 0.5 * SCALE == weight.item()


@both
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_before_the_update_may_be_tried_again(cls, fused):
    weight, optimizer = problem(fused=fused)
    scaler = cls("cpu", init_scale=SCALE)
    backward(scaler, weight)
    raise_once(scaler, optimizer)
    if fused and cls is torch.amp.GradScaler:
        # torch leaves its own behind, which is another defect.
        del optimizer.grad_scale, optimizer.found_inf
    scaler.step(optimizer)
    scaler.update()
    assert 0.5 == weight.item()


def test_gradients_that_were_written_to_after_the_step_raised_are_refused():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    raise_once(scaler, optimizer)
    optimizer.zero_grad(set_to_none=False)
    backward(scaler, weight)
    with pytest.raises(RuntimeError, match=r"whether they are scaled.*discard\(\)"):
        scaler.step(optimizer)
    assert 1.0 == weight.item()
    scaler.discard()
    scaler.step(optimizer)
    scaler.update()
    assert 0.5 == weight.item()


def test_a_fused_optimizers_gradients_stay_scaled_so_nothing_is_unclear():
    weight, optimizer = problem(fused=True)
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    raise_once(scaler, optimizer)
    optimizer.zero_grad(set_to_none=False)
    backward(scaler, weight)
    scaler.step(optimizer)
    assert 0.5 == weight.item()


def test_a_step_without_gradients_does_not_stop_the_next_one():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(weight.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    scaler.discard()
    backward(scaler, weight)
    scaler.step(optimizer)
    scaler.update()
    assert 0.5 == weight.item()


# An iteration that was given up between unscale_ and step


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["unscale_", "clip"])
@pytest.mark.parametrize("second", ["step", "clip"])
@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_gradients_after_an_iteration_that_was_given_up_are_new(
    first, second, factor, fused
):
    weight, optimizer = problem(fused=fused)
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    if first == "clip":
        scaler.clip_grad_norm_(optimizer, 100.0)
    else:
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    backward(scaler, weight, factor)
    if second == "clip":
        scaler.clip_grad_norm_(optimizer, 100.0)
    scaler.step(optimizer)
    scaler.update()
    assert (1.0 if math.isnan(factor) else 0.5) == weight.item()


def test_written_to_in_place_they_are_checked_as_they_are():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    scaler.unscale_(optimizer)
    optimizer.zero_grad(set_to_none=False)
    backward(scaler, weight, math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert (1.0, False) == (weight.item(), scaler.last_step.applied)


@both
def test_gradients_that_the_caller_replaces_after_unscaling_are_applied(cls):
    weight, optimizer = problem()
    scaler = cls("cpu", init_scale=SCALE)
    backward(scaler, weight)
    scaler.unscale_(optimizer)
    weight.grad = weight.grad * 0.5
    scaler.step(optimizer)
    scaler.update()
    assert 0.75 == weight.item()


@both
def test_two_optimizers_may_be_unscaled_between_their_losses(cls):
    weight, first = problem()
    other, second = problem()
    scaler = cls("cpu", init_scale=SCALE)
    backward(scaler, weight)
    scaler.unscale_(first)
    backward(scaler, other)
    torch.nn.utils.clip_grad_norm_([weight], 0.5)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (0.75, 0.5) == (pytest.approx(weight.item(), rel=1e-5), other.item())


# A step that was never taken


@pytest.mark.parametrize("way", ["unscale_ alone", "clip alone", "raised"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_was_not_taken_is_not_reported_as_applied(way, fused):
    weight, optimizer = problem(fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight)
    if way == "unscale_ alone":
        scaler.unscale_(optimizer)
    elif way == "clip alone":
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        raise_once(scaler, optimizer)
    scaler.update()
    scaler.step_scheduler(schedule)
    report = scaler.last_step
    assert (False, True, "not stepped") == (
        report.applied,
        report.skipped,
        report.reason,
    )
    assert report.applied_by(optimizer) is False
    assert (0.5, False) == (schedule.get_last_lr()[0], bool(scaler.step_applied()))


def test_steps_that_the_caller_takes_raise_no_alarm_and_count_as_none_skipped():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", max_consecutive_skips=2, on_collapse="raise")
    for _ in range(5):
        optimizer.zero_grad()
        backward(scaler, weight)
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
    assert (5, 0) == (scaler.total_steps, scaler.skipped_steps)


def test_the_scale_moves_as_torchs_does_when_no_step_is_taken():
    found = []
    for cls in (torch.amp.GradScaler, ls.GradScaler):
        weight, optimizer = problem()
        scaler = cls("cpu", init_scale=SCALE, growth_interval=2)
        for factor in (1.0, 1.0, math.inf, 1.0):
            optimizer.zero_grad()
            backward(scaler, weight, factor)
            scaler.unscale_(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert found[0] == found[1]


# An iteration that was given up


def test_what_was_accumulated_and_given_up_is_discarded():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight, 100.0)
    scaler.accumulate(optimizer)
    optimizer.zero_grad()
    scaler.discard()
    backward(scaler, weight)
    scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (0.5, 1) == (weight.item(), scaler.total_steps)


def test_discard_forgets_stages_losses_and_flags_and_reports_nothing():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu", init_scale=SCALE)
    backward(scaler, weight, math.nan)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.discard()
    assert scaler.last_step is None
    assert SCALE == scaler.get_scale()
    backward(scaler, weight)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (0.5, True, True) == (
        weight.item(),
        scaler.last_step.applied,
        scaler.last_step.loss_finite,
    )


def test_a_disabled_scaler_has_nothing_to_discard():
    assert ls.GradScaler("cpu", enabled=False).discard() is None
