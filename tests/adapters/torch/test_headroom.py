"""A finite gradient that the optimizer cannot hold is skipped, and moves no scale."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import init_scale_tensor, parameter, snapshot  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic, Fixed, ScaleState, Signal  # noqa: E402

SQUARING = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
}
HUGE = 3e38
"""Finite at a scale of 65,536, also once it is unscaled; its square is not."""


def problem(cls=torch.optim.AdamW, values=(1.0, 1.0), **settings):
    weight = parameter(list(values))
    optimizer = cls([weight], lr=0.1, **settings)
    return weight, optimizer


def give_huge(weight, value=HUGE):
    weight.grad = torch.ones_like(weight)
    weight.grad.view(-1)[-1] = value


def warm(optimizer, weight, scale=65536.0):
    """Return a scaler that has taken one step, so that the optimizer has a state."""
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=scale))
    weight.grad = torch.ones_like(weight)
    scaler.step(optimizer)
    scaler.update()
    return scaler


def check_skipped(scaler, optimizer, before, scale=65536.0):
    """Raise unless the second step has changed nothing and says why."""
    scaler.update()
    assert before == snapshot(optimizer)
    report = scaler.last_step
    assert (False, "headroom") == (report.applied, report.reason)
    assert (scale, 1) == (scaler.get_scale(), scaler._get_growth_tracker())
    assert 1 == scaler.skipped_steps


PATHS = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: (
        scaler.unscale_(optimizer),
        scaler.step(optimizer),
    ),
    "step_all": lambda scaler, optimizer: scaler.step_all(optimizer),
    "accumulate": lambda scaler, optimizer: (
        scaler.accumulate(optimizer),
        scaler.step(optimizer),
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_cannot_be_squared_is_skipped_on_every_path(path, fused):
    weight, optimizer = problem(fused=fused)
    scaler = warm(optimizer, weight)
    give_huge(weight)
    before = snapshot(optimizer)
    PATHS[path](scaler, optimizer)
    check_skipped(scaler, optimizer, before)


@pytest.mark.parametrize("name", SQUARING)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_optimizer_that_squares_keeps_a_finite_state(name, sign):
    weight, optimizer = problem(SQUARING[name])
    scaler = warm(optimizer, weight)
    give_huge(weight, sign * HUGE)
    before = snapshot(optimizer)
    scaler.step(optimizer)
    check_skipped(scaler, optimizer, before)


def test_torch_itself_applies_it_and_the_moment_is_infinite():
    weight, optimizer = problem()
    scaler = torch.amp.GradScaler("cpu")
    init_scale_tensor(scaler)
    give_huge(weight)
    scaler.step(optimizer)
    assert math.inf == optimizer.state[weight]["exp_avg_sq"].max()


def test_the_tensors_that_were_too_large_are_named():
    weight, other = parameter([1.0, 1.0]), parameter([1.0])
    optimizer = torch.optim.Adam([other, weight])
    names = [("head", weight), ("body", other)]
    scaler = init_scale_tensor(ls.GradScaler("cpu", names=names))
    give_huge(weight)
    other.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    assert {"head": "headroom"} == scaler.last_step.nonfinite


def test_an_infinity_next_to_it_is_an_overflow_and_lowers_the_scale():
    weight, optimizer = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    give_huge(weight)
    weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert ("inf", 32768.0) == (scaler.last_step.reason, scaler.get_scale())


def test_what_is_clipped_to_less_is_applied():
    weight, optimizer = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    give_huge(weight)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    assert norm.item() == pytest.approx(HUGE / 65536.0)
    assert torch.isfinite(optimizer.state[weight]["exp_avg_sq"]).all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_beyond_float32_is_no_overflow_of_the_scale(fused):
    weight, optimizer = problem(values=[1.0] * 4, fused=fused)
    scaler = warm(optimizer, weight, scale=1.0)
    weight.grad = torch.full((4,), HUGE)
    before = snapshot(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    check_skipped(scaler, optimizer, before, scale=1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_only_adds_takes_larger_ones(fused):
    weight, optimizer = problem(torch.optim.SGD, momentum=0.9, fused=fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    give_huge(weight, 1e30 * 65536)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.applied
    give_huge(weight, 1e33 * 65536)
    before = snapshot(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert ("headroom", before) == (scaler.last_step.reason, snapshot(optimizer))


def test_below_1e18_torch_and_ours_take_the_same_step():
    for name, cls in SQUARING.items():
        if name in ("Adagrad", "Adafactor"):
            continue  # they add squares up
        states = []
        for scaler_class in (torch.amp.GradScaler, ls.GradScaler):
            weight, optimizer = problem(cls)
            scaler = init_scale_tensor(scaler_class("cpu"))
            for value in (1.0, 9.9e17, -9.9e17):
                give_huge(weight, value * 65536)
                scaler.step(optimizer)
                scaler.update()
            states.append(snapshot(optimizer))
        assert states[0] == states[1], name


def test_adagrad_never_adds_squares_up_to_infinity():
    weight, optimizer = problem(torch.optim.Adagrad)
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", init_scale=128.0, max_consecutive_skips=None)
    )
    for _ in range(600):
        give_huge(weight, 1e20)
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(optimizer.state[weight]["sum"]).all()
    assert 128.0 == scaler.get_scale()


def test_the_bound_is_that_of_the_state_of_the_optimizer():
    weight = parameter([1.0, 1.0], torch.float16)
    optimizer = torch.optim.Adam([weight], lr=0.1, eps=1e-4)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0, allow_fp16=True))
    for value, applied in ((250.0, True), (300.0, False)):
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        assert applied == scaler.last_step.applied


class NarrowState(torch.optim.SGD):
    """Keeps a float16 square of a float32 gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["square"] = (one.grad**2).half()


def test_a_state_that_turns_out_to_be_narrower_is_checked_from_then_on():
    weight = parameter([1.0, 1.0])
    optimizer = NarrowState([weight], lr=0.1)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=1.0))
    reasons = []
    for value in (100.0, 1000.0):
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step.reason)
    assert [None, "headroom"] == reasons
    assert torch.isfinite(optimizer.state[weight]["square"]).all()


def test_a_closure_with_such_gradients_is_undone():
    weight, optimizer = problem(torch.optim.LBFGS)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    before = snapshot(optimizer)

    def closure():
        give_huge(weight)
        return weight.sum()

    scaler.step(optimizer, closure=closure)
    scaler.update()
    assert before == snapshot(optimizer)
    assert ("headroom", 65536.0) == (scaler.last_step.reason, scaler.get_scale())


def test_of_several_optimizers_the_one_that_can_take_it_steps():
    weight, adam = problem()
    other, sgd = problem(torch.optim.SGD)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    give_huge(weight)
    other.grad = torch.ones_like(other)
    scaler.step(adam)
    scaler.step(sgd)
    scaler.update()
    report = scaler.last_step
    assert (False, True) == (report.applied_by(adam), report.applied_by(sgd))
    assert ("headroom", 65536.0) == (report.reason, scaler.get_scale())


def test_step_all_holds_all_back_and_leaves_the_scale():
    weight, adam = problem()
    other, sgd = problem(torch.optim.SGD)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    give_huge(weight)
    other.grad = torch.ones_like(other)
    scaler.step_all(adam, sgd)
    scaler.update()
    assert [1.0, 1.0] == other.tolist()
    assert ("headroom", 65536.0) == (scaler.last_step.reason, scaler.get_scale())


def test_a_micro_batch_that_is_too_large_is_dropped_and_leaves_the_scale():
    weight, optimizer = problem(torch.optim.Adam)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    for value in (1.0, HUGE):
        give_huge(weight, value)
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (True, 65536.0) == (scaler.last_step.applied, scaler.get_scale())
    assert torch.isfinite(optimizer.state[weight]["exp_avg_sq"]).all()


@pytest.mark.parametrize(
    "policy", [Dynamic(hysteresis=2), Dynamic(growth_factor=1.7), Fixed(65536.0)]
)
def test_no_policy_is_moved_by_it(policy):
    weight, optimizer = problem()
    first = ScaleState(65536.0, 7, 0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", policy=policy, state=first))
    before = [value.item() for value in scaler.state]
    give_huge(weight)
    scaler.step(optimizer)
    scaler.update()
    assert before == [value.item() for value in scaler.state]


def test_a_policy_of_ones_own_is_not_moved_and_is_informed():
    class Telling:
        received: list[Signal] = []  # noqa: RUF012

        def init(self):
            return ScaleState(65536.0, 0, 0)

        def step(self, state, signal, *, where):
            self.received.append(signal)
            return state._replace(scale=state.scale / 2)

    weight, optimizer = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu", policy=Telling()))
    give_huge(weight)
    scaler.step(optimizer)
    scaler.update()
    (signal,) = Telling.received
    assert (False, True) == (bool(signal.finite), bool(signal.too_large))
    assert 65536.0 == scaler.get_scale()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_other_dtypes_have_their_own_bounds(dtype):
    weight = parameter([1.0, 1.0], dtype)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    real = weight.dtype.to_real() if weight.is_complex() else dtype
    huge = math.sqrt(torch.finfo(real).max) * 65536.0
    for value, applied in ((huge / 8.0, True), (huge, False)):
        weight.grad = torch.full_like(weight, value)
        scaler.step(optimizer)
        scaler.update()
        assert applied == scaler.last_step.applied
    state = torch.view_as_real(weight) if weight.is_complex() else weight
    assert torch.isfinite(state).all()


def test_a_sparse_gradient_is_checked_as_well():
    weight = parameter([[1.0], [1.0]])
    optimizer = torch.optim.SparseAdam([weight])
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([[HUGE]]), (2, 1), check_invariants=True
    )
    scaler.step(optimizer)
    scaler.update()
    assert ("headroom", 65536.0) == (scaler.last_step.reason, scaler.get_scale())
