"""What a scaler says about its steps, and what is done with it."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import BAD, init_scale_tensor, parameter, step  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    SettingError,
)


def problem(fused=False, lr=1.0):
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=lr, fused=fused)


# Reports


@pytest.mark.parametrize("fused", [False, True])
def test_a_report_says_what_became_of_the_step(fused):
    weight, optimizer = problem(fused)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    assert scaler.last_step is None
    said = []
    for gradient in (1.0, *BAD):
        step(scaler, optimizer, gradient, [weight])
        last = scaler.last_step
        said.append((last.applied, last.skipped, last.reason, last.scale, last.index))
    assert [
        (True, False, None, 8.0, 1),
        (False, True, "inf", 8.0, 2),
        (False, True, "inf", 4.0, 3),
        (False, True, "nan", 2.0, 4),
    ] == said
    assert (4, 3, 3) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.consecutive_skips,
    )
    step(scaler, optimizer, 1.0, [weight])
    assert (5, 3, 0) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.consecutive_skips,
    )


def test_a_report_can_be_read_later():
    weight, optimizer = problem()
    reports = []
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", init_scale=8.0, on_step=reports.append)
    )
    for gradient in (math.inf, 1.0, math.nan):
        step(scaler, optimizer, gradient, [weight])
    assert [(1, "inf", 8.0), (2, None, 4.0), (3, "nan", 4.0)] == [
        (report.index, report.reason, report.scale) for report in reports
    ]
    assert scaler.last_step is reports[-1]
    assert all(report.is_ready() for report in reports)
    assert "applied" in repr(reports[1])
    assert "nan" in repr(reports[2])


def nonfinite_names(scaler, optimizer, parameters, bad):
    """Return the nonfinite_names of a step in which these parameters are bad."""
    init_scale_tensor(scaler)
    for at, one in enumerate(parameters):
        one.grad = torch.full_like(one, bad.get(at, 1.0))
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.nonfinite


def test_tensors_that_overflowed_have_the_names_that_were_given():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    ours = [one for _, one in module.named_parameters()]
    bad = {1: math.inf, 2: math.nan}
    plain = torch.optim.SGD(module.parameters(), lr=1.0)
    named = torch.optim.SGD(module.named_parameters(), lr=1.0)
    pairs = list(module.named_parameters())
    for scaler, optimizer in (
        (ls.GradScaler("cpu", module=module), plain),
        (ls.GradScaler("cpu", names=module.named_parameters()), plain),
        (ls.GradScaler("cpu", names=dict(pairs)), plain),
        (ls.GradScaler("cpu"), named),
    ):
        found = nonfinite_names(scaler, optimizer, ours, bad)
        assert {"0.bias": "inf", "1.weight": "nan"} == found
        assert ("0.bias", "1.weight") == scaler.last_step.nonfinite_names


def test_tensors_that_overflowed_without_a_name_are_named_by_their_place():
    weights = [parameter([1.0]), parameter([1.0, 2.0]), parameter([[3.0]])]
    optimizer = torch.optim.SGD(
        [{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0
    )
    found = nonfinite_names(
        ls.GradScaler("cpu"), optimizer, weights, {1: math.inf, 2: math.inf}
    )
    assert {
        "param_groups[1]['params'][0] of shape (2,)": "inf",
        "param_groups[1]['params'][1] of shape (1, 1)": "inf",
    } == found


def test_tensors_that_overflowed_are_right_where_some_parameters_have_no_gradient():
    weights = [parameter([1.0]) for _ in range(4)]
    names = [(f"w{at}", weight) for at, weight in enumerate(weights)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", names=names))
    for fused in (False, True):
        optimizer = torch.optim.SGD(weights, lr=1.0, fused=fused)
        weights[1].grad, weights[3].grad = torch.ones(1), torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update()
        assert ("w3",) == scaler.last_step.nonfinite_names


def test_names_and_a_module_exclude_each_other():
    module = torch.nn.Linear(1, 1)
    with pytest.raises(SettingError, match="Pass either names= or module="):
        ls.GradScaler("cpu", names=module.named_parameters(), module=module)


def test_norm_and_amax_are_numbers_where_they_were_measured():
    weight, other = parameter([1.0]), parameter([1.0])
    optimizer = torch.optim.SGD([weight, other], lr=1.0)
    scaler = init_scale_tensor(
        ls.GradScaler("cpu", init_scale=8.0, measure_norm=True, measure_amax=True)
    )
    weight.grad, other.grad = torch.tensor([24.0]), torch.tensor([-32.0])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.norm == 5.0
    weight.grad, other.grad = torch.tensor([-16.0]), torch.tensor([math.inf])
    scaler.step(optimizer)
    scaler.update()
    assert (16.0 / 8.0, math.inf) == (scaler.last_step.amax, scaler.last_step.norm)


def test_the_reports_of_several_optimizers_are_one():
    good, first = problem()
    bad, second = problem(fused=True)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0, measure_norm=True))
    good.grad, bad.grad = torch.tensor([3.0 * 8]), torch.tensor([4.0 * 8])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (True, 5.0) == (scaler.last_step.applied, scaler.last_step.norm)
    good.grad, bad.grad = torch.tensor([8.0]), torch.tensor([math.inf])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    last = scaler.last_step
    assert (False, True, False) == (
        last.applied,
        last.applied_by(first),
        last.applied_by(second),
    )
    assert last.applied_by(problem()[1]) is None
    assert (2, 1) == (scaler.total_steps, scaler.skipped_steps)


# Gates and schedulers


@pytest.mark.parametrize("fused", [False, True])
def test_the_gate_holds_an_average_still_while_steps_are_skipped(fused):
    weight, optimizer = problem(fused)
    average = weight.detach().clone()
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    assert scaler.step_applied().item() is True
    held = []
    for gradient in (8.0, math.inf, 8.0):
        step(scaler, optimizer, gradient, [weight])
        before = average.clone()
        gate = scaler.step_applied()
        assert (torch.bool, ()) == (gate.dtype, gate.shape)
        average.lerp_(weight.detach(), 0.5 * gate)
        held.append(bool(average == before))
    assert [False, True, False] == held


def rates(scaler, optimizer, weight, gradients, **settings):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found = []
    for gradient in gradients:
        step(scaler, optimizer, gradient, [weight])
        scaler.step_scheduler(scheduler, **settings)
        found.append(scheduler.get_last_lr()[0])
    return found


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_moves_for_applied_steps_only_without_a_warning(fused, wait):
    weight, optimizer = problem(fused)
    found = rates(
        ls.GradScaler("cpu"), optimizer, weight, [*BAD, 1.0, math.inf, 1.0], wait=wait
    )
    assert [1.0, 1.0, 1.0, 0.5, 0.5, 0.25] == found


def test_torchs_own_way_warns_and_moves_on():
    weight, optimizer = problem()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(ls.GradScaler("cpu"), optimizer, math.inf, [weight])
    with pytest.warns(UserWarning, match="Detected call of `lr_scheduler.step"):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_schedulers_of_several_optimizers_move_apart():
    scaler = init_scale_tensor(ls.GradScaler("cpu"))
    good, first = problem()
    bad, second = problem()
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (first, second)
    ]
    for gradient in (1.0, math.inf):
        good.grad, bad.grad = torch.ones(1), torch.tensor([gradient])
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        for scheduler in schedulers:
            scaler.step_scheduler(scheduler)
            scaler.step_scheduler(scheduler)  # once more is once too often
    assert [[0.25], [0.5]] == [scheduler.get_last_lr() for scheduler in schedulers]


def test_a_scheduler_with_a_metric_is_given_it():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for gradient, metric in ((1.0, 1.0), (math.inf, 2.0), (1.0, 2.0)):
        step(scaler, optimizer, gradient, [weight])
        scaler.step_scheduler(plateau, metric)
    assert (2, 0.1) == (plateau.last_epoch, optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"on_step": 3}, "on_step must be a function"),
        ({"module": 3}, "module must be a torch.nn.Module"),
        ({"names": 3}, "names must be pairs"),
        ({"names": ["a"]}, "names must be pairs"),
        ({"names": [("a", 3)]}, "names must be pairs"),
        ({"names": torch.nn.Linear(2, 2).parameters()}, "names must be pairs"),
    ],
)
def test_a_callback_or_name_that_is_invalid_is_refused_at_once(settings, text):
    with pytest.raises(TypeError, match=text):
        ls.GradScaler("cpu", **settings)


def test_a_parameter_that_the_optimizer_no_longer_has_is_still_reported():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = ls.GradScaler("cpu")
    scaler.scale((weights[0] + weights[1] * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    del optimizer.param_groups[0]["params"][1]
    (name,) = scaler.last_step.nonfinite_names
    assert "parameter 1, which the optimizer no longer has" == name


def test_a_scheduler_that_was_not_asked_for_long_loses_no_step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scaler = ls.GradScaler("cpu")
    for number in range(300):
        weight.grad = torch.full_like(weight, math.inf if number % 3 == 1 else 1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        if number == 0:
            scaler.step_scheduler(scheduler)
    scaler.step_scheduler(scheduler)
    assert 200 == scheduler.last_epoch


def test_the_gate_is_shut_if_any_optimizer_skipped():
    good, first = problem()
    bad, second = problem()
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    good.grad, bad.grad = torch.tensor([8.0]), torch.tensor([math.inf])
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.step_applied().item() is False


def test_several_optimizers_report_the_largest_number_and_the_hardest_clip():
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0))
    first, second = problem(), problem()
    for (weight, optimizer), gradient in ((first, 8.0), (second, 80.0)):
        weight.grad = torch.tensor([gradient])
        scaler.clip_grad_norm_(optimizer, 5.0)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.clip == pytest.approx(0.5)
    for (weight, optimizer), gradient in ((first, 8.0), (second, 80.0)):
        weight.grad = torch.tensor([gradient])
        scaler.clip_grad_norm_(optimizer, math.inf)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.norm == pytest.approx(math.hypot(1.0, 10.0))


def test_a_norm_that_only_one_optimizer_measured_is_none():
    class Own(ls.GradScaler):
        """Checks the gradients of one optimizer by itself, and measures nothing."""

        def _unscale_grads_(self, optimizer, *arguments):
            if optimizer is first[1]:
                return super()._unscale_grads_(optimizer, *arguments)
            return {torch.device("cpu"): torch.zeros(())}

    scaler = init_scale_tensor(Own("cpu", init_scale=8.0))
    first, second = problem(), problem()
    for weight, optimizer in (first, second):
        weight.grad = torch.tensor([8.0])
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.norm is None


def test_the_largest_magnitude_is_that_of_all_optimizers():
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0, measure_amax=True))
    for gradient in (8.0, 80.0):
        weight, other = parameter([1.0]), parameter([1.0])
        optimizer = torch.optim.SGD([weight, other], lr=1.0)
        weight.grad, other.grad = torch.tensor([gradient]), torch.tensor([math.inf])
        scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.amax == 80.0 / 8.0


def test_a_scheduler_of_a_wrapped_optimizer_follows_the_wrapper():
    """As in Accelerate: the wrapper is stepped, the scheduler has what is inside."""
    weight, inner = problem()

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def step(self):
            return self.optimizer.step()

    outer, scaler = Wrapper(inner), ls.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    for gradient in (math.inf, 1.0):
        step(scaler, outer, gradient, [weight])
        scaler.step_scheduler(scheduler)
    assert [0.5] == scheduler.get_last_lr()


def test_a_report_outlives_its_optimizer():
    import gc

    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    step(scaler, optimizer, math.inf, [weight])
    del optimizer
    gc.collect()
    assert (
        "parameter 0 of an optimizer that is gone",
    ) == scaler.last_step.nonfinite_names


def test_a_scheduler_that_comes_late_does_not_catch_up():
    weight, optimizer = problem()
    scaler = ls.GradScaler("cpu")
    for _ in range(3):
        step(scaler, optimizer, 1.0, [weight])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(scaler, optimizer, 1.0, [weight])
    scaler.step_scheduler(scheduler)
    assert [0.5] == scheduler.get_last_lr()


@pytest.mark.parametrize("scalars", [False, True], ids=["matrices", "scalars"])
def test_names_are_those_of_their_step_however_late_they_are_read(scalars):
    shapes = [(), ()] if scalars else [(3, 4), (4,), (2, 4), (2, 2, 2)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    names = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0, names=names))
    reports = []
    for bad, value in ((1, math.nan), (0, -math.inf), (len(params) - 1, math.inf)):
        for param in params:
            param.grad = torch.ones_like(param)
        params[bad].grad.view(-1)[-1] = value
        scaler.step(optimizer)
        scaler.update()
        reports.append(scaler.last_step)
        for param in params:  # as zero_grad(set_to_none=False) and a backward pass do
            param.grad.fill_(5.0)
    found = [(report.reason, report.nonfinite) for report in reports]
    last = f"p{len(params) - 1}"
    expected = [
        ("nan", {"p1": "nan"}),
        ("inf", {"p0": "inf"}),
        ("inf", {last: "inf"}),
    ]
    assert expected == found


def test_many_small_gradients_of_several_shapes_are_told_apart():
    shapes = [(3, 4), (4,), (2, 2, 4)] * 20
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    names = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = init_scale_tensor(ls.GradScaler("cpu", init_scale=8.0, names=names))
    for param in params:
        param.grad = torch.ones_like(param)
    for index, value in ((7, math.inf), (32, math.nan), (59, -math.inf)):
        params[index].grad.view(-1)[0] = value
    scaler.step(optimizer)
    scaler.update()
    expected = {"p7": "inf", "p32": "nan", "p59": "inf"}
    assert expected == scaler.last_step.nonfinite
