"""The classic wrapper around optimizers of torch."""

import copy
import math
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from helpers.torch_classic import (  # noqa: E402
    BAD,
    DENSE,
    OPTIMIZERS,
    VANISHING,
    fingerprint,
    make_optimizer,
    numbers,
    parameter,
    wrapped,
)

import lossscale.torch.classic as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
    StructureError,
)


@pytest.mark.parametrize("as_callable", [False, True])
def test_gradients_come_unscaled_with_their_parameters(as_callable):
    optimizer, weights = wrapped(scale=1024)

    def loss():
        return (weights[0] ** 2).sum()

    pairs = optimizer.compute_gradients(loss if as_callable else loss())
    assert [[2.0, 4.0], None] == numbers(pairs)
    assert all(mine is given for (_, mine), given in zip(pairs, weights, strict=True))
    assert weights[0].grad is None


def test_frozen_parameters_have_no_gradients_and_var_list_names_others():
    optimizer, weights = wrapped()
    weights[1].requires_grad_(False)
    loss = (weights[0] * weights[1]).sum()
    assert [[3.0, 3.0]] == numbers(optimizer.compute_gradients(loss, retain_graph=True))
    assert [[3.0, 3.0]] == numbers(optimizer.compute_gradients(loss, [weights[0]]))


def test_float16_gradients_that_would_vanish_come_in_float32():
    optimizer, weights = wrapped(scale=2.0**15, dtype=torch.float16)
    loss = (weights[0].float() * 2.0**-30).sum()
    pairs = optimizer.compute_gradients(loss, [weights[0]])
    assert torch.float32 == pairs[0][0].dtype
    assert [[2.0**-30] * 2] == numbers(pairs)


def test_minimize_takes_the_step_of_the_optimizer_alone():
    optimizer, weights = wrapped("adam", "dynamic")
    _, others = wrapped("adam")
    alone = make_optimizer("adam", others)
    for _ in range(5):
        optimizer.minimize(lambda: (weights[0] * weights[1]).square().sum())
        alone.zero_grad()
        (others[0] * others[1]).square().sum().backward()
        alone.step()
    for mine, other in zip(weights, others, strict=True):
        assert other.tolist() == mine.tolist()


def test_backward_and_step_take_the_step_of_the_optimizer_alone():
    optimizer, weights = wrapped("adamw", 2.0**10)
    _, others = wrapped("adamw")
    alone = make_optimizer("adamw", others)
    for _ in range(5):
        optimizer.zero_grad()
        alone.zero_grad()
        for part in (0.25, 0.75):  # micro-batches add up
            optimizer.backward(part * (weights[0] * weights[1]).square().sum())
            (part * (others[0] * others[1]).square().sum()).backward()
        assert optimizer.step() is None
        alone.step()
    for mine, other in zip(weights, others, strict=True):
        assert other.tolist() == mine.tolist()
        assert other.grad.tolist() == mine.grad.tolist()


def test_backward_hands_its_keywords_on():
    optimizer, weights = wrapped(scale=4)
    loss = weights[0].sum()
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    assert [8.0, 8.0] == weights[0].grad.tolist()


def test_a_closure_is_called_once_and_its_loss_returned():
    optimizer, weights = wrapped(scale=8)
    calls = []

    def closure(factor=1.0):
        optimizer.zero_grad()
        loss = factor * weights[1].sum()
        optimizer.backward(loss)
        calls.append(loss.item())
        return loss

    with torch.no_grad():
        assert 3.0 == optimizer.step(closure).item()
    assert [3.0] == calls
    assert optimizer.step(lambda: closure(math.inf)) is None
    assert torch.tensor(2.9).item() == weights[1].item()


@pytest.mark.parametrize("style", ["apply_gradients", "step"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("make", DENSE)
def test_an_overflow_calls_nothing_and_changes_only_the_scale(make, bad, style):
    optimizer, weights = wrapped(make, ls.DynamicLossScale(8.0))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = fingerprint(optimizer, weights)
    grads = [torch.tensor([1.0, bad]), torch.ones(1)]
    if style == "step":
        for weight, gradient in zip(weights, grads, strict=True):
            weight.grad = gradient
        assert optimizer.step() is None
        assert weights[0].grad is grads[0]
    else:
        held = [weight.grad for weight in weights]
        optimizer.apply_gradients(zip(grads, weights, strict=True))
        assert all(x.grad is y for x, y in zip(weights, held, strict=True))
    assert before == fingerprint(optimizer, weights)
    assert 4.0 == optimizer.loss_scale().item()


def test_parameters_without_a_gradient_are_left_alone():
    optimizer, weights = wrapped("momentum")
    weights[1].grad = torch.ones(1)
    optimizer.apply_gradients([(torch.ones(2), weights[0]), (None, weights[1])])
    assert [3.0] == weights[1].tolist()
    assert weights[1].grad is None
    assert [1.0, 1.0] == weights[0].grad.tolist()


@pytest.mark.parametrize("style", ["apply_gradients", "step"])
def test_an_optimizer_that_raises_leaves_the_scale_and_the_gradients(style):
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            message = "no device"
            raise OSError(message)

    weight = parameter(1.0)
    optimizer = ls.LossScaleOptimizer(
        Broken([weight], 0.1), ls.DynamicLossScale(8.0, 1)
    )
    weight.grad = held = torch.tensor([16.0])
    arguments = [] if style == "step" else [[(torch.ones(1), weight)]]
    with pytest.raises(OSError, match="no device"):
        getattr(optimizer, style)(*arguments)
    assert weight.grad is held
    assert [16.0] == held.tolist()
    assert 8.0 == optimizer.loss_scale().item()


def test_a_gradient_that_overflows_in_the_dtype_of_its_parameter_is_bad():
    for dtype, value in ((torch.float16, 1e5), (torch.float32, 1e39)):
        optimizer, weights = wrapped("sgd", ls.DynamicLossScale(8.0), dtype=dtype)
        gradient = torch.tensor([value, 0.0], dtype=torch.float64)
        before = weights[0].tolist()
        optimizer.apply_gradients([(gradient, weights[0])])
        assert before == weights[0].tolist()
        assert 4.0 == optimizer.loss_scale().item()


def test_a_float16_step_sees_large_gradients_that_sgd_can_bear():
    optimizer, weights = wrapped("sgd", 8, dtype=torch.float16)
    optimizer.apply_gradients([(torch.tensor([1000.0, 0.0]), weights[0])])
    assert -99.0 == weights[0][0].item()


def test_a_second_moment_that_would_overflow_is_an_overflow():
    optimizer, weights = wrapped("adam", 8)
    optimizer.apply_gradients([(torch.tensor([1e30, 0.0]), weights[0])])
    assert [1.0, 2.0] == weights[0].tolist()
    assert {} == optimizer.state


def test_gradients_without_a_parameter_are_refused():
    optimizer, weights = wrapped()
    one = torch.ones(2)
    foreign = torch.nn.Parameter(torch.ones(2))
    for pairs, words in (
        ([(one, foreign)], "not a parameter"),
        ([(one, "w")], "not a parameter"),
        ([(one, weights[0]), (one, weights[0])], "twice"),
        ([(torch.ones(3), weights[0])], "shape"),
        ([(one + 1j, weights[0])], "complex"),
        ([], "no gradient"),
        ([(None, weights[0])], "no gradient"),
    ):
        with pytest.raises(StructureError, match=words):
            optimizer.apply_gradients(pairs)
    with pytest.raises(StructureError, match="no gradient"):
        optimizer.step()
    with pytest.raises(GradientError, match=r"parameter 0 is torch\.int64"):
        optimizer.apply_gradients([(torch.tensor([1, 2]), weights[0])])
    with pytest.raises(SettingTypeError, match="global_step"):
        optimizer.minimize(weights[0].sum, global_step=3)


def test_what_cannot_be_wrapped_is_refused():
    weight = parameter(1.0)
    inner, _ = wrapped()
    for wrong, words in (
        (torch.optim.LBFGS([weight]), "inside its step"),
        (inner, "already"),
        (None, "compute_gradients"),
        (torch.optim.SGD, "compute_gradients"),
    ):
        with pytest.raises(SettingError, match=words):
            ls.LossScaleOptimizer(wrong, 8)


@pytest.mark.parametrize("make", VANISHING)
def test_an_epsilon_that_vanishes_in_float16_is_refused(make):
    """Alone, such an optimizer makes NaN of a gradient of 0."""
    kind, options = OPTIMIZERS[make]
    weight = parameter(1.0, dtype=torch.float16)
    with pytest.raises(SettingError, match="eps=1e-"):
        ls.LossScaleOptimizer(kind([weight], **options), 8)
    optimizer = ls.LossScaleOptimizer(kind([weight], **options, eps=1e-4), 8)
    if make != "sparse adam":
        optimizer.apply_gradients([(torch.zeros(1), weight)])
    assert [1.0] == weight.tolist()


def test_the_torch_style_is_for_torch_optimizers():
    class Other:
        def compute_gradients(self, loss, var_list=None):
            return []

        def apply_gradients(self, grads_and_vars):
            return "applied"

    optimizer = ls.LossScaleOptimizer(Other(), 8)
    assert "applied" == optimizer.apply_gradients([(torch.ones(1), "w")])
    with pytest.raises(SettingError, match="step is for optimizers"):
        optimizer.step()
    with pytest.raises(StateError, match="Other has no state_dict"):
        optimizer.state_dict()


def test_groups_state_and_zero_grad_are_those_of_the_optimizer():
    optimizer, weights = wrapped("adam")
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    optimizer.backward(weights[0].sum())
    optimizer.zero_grad(set_to_none=False)
    assert [0.0, 0.0] == weights[0].grad.tolist()
    optimizer.zero_grad()
    assert weights[0].grad is None


def test_a_scheduler_takes_the_optimizer_inside():
    optimizer, weights = wrapped("sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    for _ in range(2):
        optimizer.minimize(weights[1].sum)
        scheduler.step()
    assert 0.025 == optimizer.param_groups[0]["lr"]
    assert 3.0 - 0.1 - 0.05 == pytest.approx(weights[1].item())


def trained(**options):
    optimizer, weights = wrapped("adam", ls.DynamicLossScale(8.0, 2), **options)
    for factor in (1.0, math.nan, 1.0):
        optimizer.minimize(factor * (weights[0] * weights[1]).sum())
    return optimizer, weights


def test_one_state_holds_both_and_training_goes_on_from_it(tmp_path):
    optimizer, weights = trained()
    torch.save(optimizer.state_dict(), tmp_path / "state")
    again, others = wrapped("adam", ls.DynamicLossScale(1024.0, 2))
    for weight, other in zip(weights, others, strict=True):
        other.data.copy_(weight.data)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for one, params in ((optimizer, weights), (again, others)):
        one.minimize(lambda params=params: (params[0] * params[1]).sum())
    assert fingerprint(optimizer, weights) == fingerprint(again, others)
    assert 8.0 == optimizer.loss_scale().item() == again.loss_scale().item()


def broken_states():
    good = trained()[0].state_dict()
    bare = good["optimizer"]
    fewer = {"state": {}, "param_groups": [{**bare["param_groups"][0], "params": [0]}]}
    return [
        None,
        {},
        bare,
        {**good, "more": 1},
        {**good, "loss_scale": {}},
        {**good, "loss_scale": {"current_loss_scale": math.inf, "good_steps": 0}},
        {**good, "optimizer": {}},
        {**good, "optimizer": None},
        {**good, "optimizer": fewer},
        {**good, "optimizer": {**bare, "state": 5}},
    ]


@pytest.mark.parametrize("index", range(10))
def test_a_broken_state_is_one_error_and_changes_nothing(index):
    optimizer, weights = trained()
    before, scale = fingerprint(optimizer, weights), optimizer.loss_scale.state_dict()
    with pytest.raises(StateError):
        optimizer.load_state_dict(broken_states()[index])
    assert before == fingerprint(optimizer, weights)
    assert scale == optimizer.loss_scale.state_dict()


def test_a_loss_scale_of_ones_own_is_asked_for_its_state():
    class Halving(ls.LossScaleManager):
        value = 8.0

        def get_loss_scale(self):
            return self.value

        def update_loss_scale(self, finite_grads):
            self.value = self.value if bool(finite_grads) else self.value / 2

    optimizer, weights = wrapped("sgd", Halving())
    optimizer.backward(weights[1].sum() * math.nan)
    optimizer.step()
    assert 4.0 == optimizer.loss_scale.value
    with pytest.raises(StateError, match="Halving has no state_dict"):
        optimizer.state_dict()


def test_a_fixed_scale_may_let_bad_gradients_pass_if_asked_to():
    optimizer, weights = wrapped("sgd", 8, skip_nonfinite=False)
    optimizer.apply_gradients([(torch.tensor([math.nan, 1.0]), weights[0])])
    assert weights[0][0].isnan()


def test_the_wrapper_can_be_copied_and_pickled():
    optimizer, _ = trained()
    for other in (
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),  # noqa: S301
    ):
        params = other.param_groups[0]["params"]
        other.minimize(lambda params=params: (params[0] * params[1]).sum())
        assert 8.0 == other.loss_scale().item()
    assert 4.0 == optimizer.loss_scale().item()
