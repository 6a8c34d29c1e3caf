"""Optimizers that ask for the loss themselves: LBFGS, SAM and their kind."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    init_scale_tensor,
    parameter,
    snapshot,
)

import lossscale.torch as ls  # noqa: E402


class Sam(torch.optim.Optimizer):
    """Climbs along the gradient, asks again, comes back and steps from there."""

    def __init__(self, params, lr=0.01, rho=0.01):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["old"] = weight.clone()
                self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1
                weight.add_(weight.grad, alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(self.state[weight]["old"])
                weight.sub_(weight.grad, alpha=group["lr"])
        return loss


CLOSED = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=5),
    "line search": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
    ),
    "SAM": Sam,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
}


def closed(name, scaler=None, bad_call=None, as_keyword=True):
    """Take three steps with a closure; return the optimizer and the losses."""
    weight = parameter([1.5, -0.5])
    optimizer = CLOSED[name]([weight])
    calls = [0]

    def closure():
        optimizer.zero_grad()
        loss = ((weight - torch.tensor([0.25, 2.0])) ** 4).sum()
        calls[0] += 1
        (loss if scaler is None else scaler.scale(loss)).backward()
        if calls[0] == bad_call:
            weight.grad[1] = math.inf
        return loss

    losses = []
    for _ in range(3):
        if scaler is None:
            losses.append(optimizer.step(closure))
        else:
            result = (
                scaler.step(optimizer, closure=closure)
                if as_keyword
                else scaler.step(optimizer, closure)
            )
            losses.append(result)
            scaler.update()
    return optimizer, losses


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_closures_take_the_steps_of_no_scaling_to_the_bit(name, as_keyword):
    expected, torchs = closed(name)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    found, ours = closed(name, scaler, as_keyword=as_keyword)
    assert snapshot(expected) == snapshot(found)
    assert [loss.item() for loss in torchs] == [loss.item() for loss in ours]
    assert (3, 0) == (scaler.total_steps, scaler.skipped_steps)


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("bad_call", [1, 2])
def test_an_overflow_in_any_evaluation_restores_weights_and_state(name, bad_call):
    if name in ("SGD", "fused Adam"):
        bad_call = 2  # they ask once a step: it is the second step
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=2.0**10))
    optimizer, losses = closed(name, scaler, bad_call)
    skipped = [loss is None for loss in losses]
    first = name not in ("SGD", "fused Adam")
    assert [first, not first, False] == skipped
    assert (2.0**9, 1) == (scaler.get_scale(), scaler.skipped_steps)
    # The other two steps are those that two steps without a scaler take.
    oracle = CLOSED[name]([parameter([1.5, -0.5])])
    weight = oracle.param_groups[0]["params"][0]

    def closure():
        oracle.zero_grad()
        loss = ((weight - torch.tensor([0.25, 2.0])) ** 4).sum()
        loss.backward()
        return loss

    for _ in range(2):
        oracle.step(closure)
    assert snapshot(oracle) == snapshot(optimizer)


def test_a_closure_may_be_the_first_to_scale():
    """As every loop with LBFGS is written: nothing calls `scale` before the step."""
    found, _ = closed("LBFGS", ls.GradScaler("cpu", init_scale=2.0**10))
    expected, _ = closed("LBFGS")
    assert snapshot(expected) == snapshot(found)


def test_a_closure_that_unscales_itself_is_not_unscaled_twice():
    """To clip, say; the second call could also be refused, but not be wrong."""
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))

    def closure():
        scaler.scale((weight * 0.5).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 100.0)

    try:
        scaler.step(optimizer, closure=closure)
    except RuntimeError:
        assert weight.item() == 1.0
    else:
        assert weight.item() == 0.5


def test_a_first_gradient_that_was_unscaled_and_is_bad_ends_the_step():
    weight = parameter([1.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    weight.grad = torch.tensor([math.nan])
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: pytest.fail("asked")) is None
    scaler.update()
    assert (1.0, 4.0) == (weight.item(), scaler.get_scale())


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_may_clip_at_every_call(fused):
    weight = parameter([3.0, 4.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)

    class Twice(torch.optim.SGD):
        """Asks twice and steps by what the second call left."""

        _step_supports_amp_scaling = fused

        def step(self, closure):
            closure()
            return super().step(closure)

    optimizer = Twice([weight], lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum() / 2
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        return loss

    scaler.step(optimizer, closure=closure)
    scaler.update()
    torch.testing.assert_close(weight.detach(), torch.tensor([2.4, 3.2]))
    assert scaler.last_step.clip == pytest.approx(0.2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_may_clip_in_one_call_and_unscale_in_the_next(fused):
    weight = parameter([1.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    calls = []

    class Twice(torch.optim.SGD):
        _step_supports_amp_scaling = fused

        def step(self, closure):
            closure()
            return super().step(closure)

    optimizer = Twice([weight], lr=1.0)

    def closure():
        optimizer.zero_grad()
        scaler.scale((weight * 4.0).sum()).backward()
        calls.append(None)
        if len(calls) == 1:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)

    scaler.step(optimizer, closure=closure)
    assert weight.item() == -3.0


def test_a_closure_runs_with_gradients_whatever_the_optimizer_does():
    class Bare(torch.optim.Optimizer):
        """Calls its closure without enabling gradients first."""

        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure):
            loss = closure()
            for weight in self.param_groups[0]["params"]:
                weight.sub_(weight.grad)
            return loss

    weight = parameter([1.0])
    optimizer = Bare([weight])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    scaler.step(optimizer, closure=lambda: scaler.scale((weight * 2).sum()).backward())
    assert weight.item() == -1.0


def test_other_arguments_go_with_the_closure():
    class Asking(torch.optim.SGD):
        def step(self, closure, number, *, word):
            closure()
            return number, word

    weight = parameter([1.0])
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    closure = lambda: scaler.scale(weight.sum()).backward()  # noqa: E731
    found = scaler.step(Asking([weight], lr=1.0), closure, 3, word="x")
    assert (3, "x") == found


def test_state_that_the_optimizer_changes_in_place_is_put_back():
    class Moving(torch.optim.SGD):
        """Writes into its state before it asks a second time."""

        def step(self, closure):
            closure()
            for weight in self.param_groups[0]["params"]:
                self.state[weight].setdefault("sum", torch.zeros(1)).add_(1.0)
            closure()

    weight = parameter([1.0])
    optimizer = Moving([weight], lr=1.0)
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    factors = iter([1.0, 1.0, 1.0, math.inf])

    def closure():
        optimizer.zero_grad()
        scaler.scale((weight * next(factors)).sum()).backward()

    for _ in range(2):
        scaler.step(optimizer, closure=closure)
        scaler.update()
    assert (1.0, 1) == (optimizer.state[weight]["sum"].item(), scaler.skipped_steps)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_known_where_a_scheduler_has_wrapped_the_step(by_name):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    scaler = ls.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    weight.grad = torch.zeros(1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        scaler.scale(loss).backward()
        return loss

    if by_name:
        scaler.step(optimizer, closure=closure)
    else:
        scaler.step(optimizer, closure)
    scaler.update()
    assert 0.8 == pytest.approx(weight.item())
