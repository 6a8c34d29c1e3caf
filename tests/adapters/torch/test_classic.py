"""The classic classes on torch: traces, states, and the wrapper on real optimizers."""

import copy
import math
import pickle
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.traces import read  # noqa: E402

import lossscale.torch.classic as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
    StructureError,
)

BAD = (math.inf, -math.inf, math.nan)


# Traces


def usable(row):
    """Whether ours takes the settings of a recording."""
    config = row["config"]
    first = float(config.get("init_loss_scale", config.get("initial_loss_scale")))
    return (
        0 < first <= FLOAT32_MAX
        and config.get("incr_ratio", 2) > 1
        and config.get("decr_ratio", 0.5) < 1
        and config.get("multiplier", 2) > 1
    )


def rows(file, every):
    return [row for row in read(f"tensorflow/{file}") if usable(row)][::every]


def test_the_manager_replays_the_original():
    for row in rows("contrib_exponential.tf1.15.5.eager", 4):
        manager = ls.ExponentialUpdateLossScaleManager(
            **row["config"], at_floor="clamp"
        )
        found = []
        for finite in row["finite"]:
            manager.update_loss_scale(torch.tensor(finite))
            found.append(tuple(manager.state_dict().values()))
        assert list(zip(row["scale"], row["good"], row["bad"], strict=True)) == found


def test_the_loss_scale_replays_the_original():
    for row in rows("dynamic.tf2.3.4.eager", 4):
        loss_scale = ls.DynamicLossScale(**row["config"])
        found = []
        for finite in row["finite"]:
            gradient = torch.tensor(1.0 if finite else math.nan)
            _, should_apply = loss_scale.update({"w": gradient, "b": None})
            found.append((*loss_scale.state_dict().values(), bool(should_apply)))
        recorded = row["scale"], row["good"], row["should_apply"]
        assert list(zip(*recorded, strict=True)) == found


@pytest.mark.parametrize("style", ["apply_gradients", "step"])
def test_the_optimizer_replays_the_original(style):
    """One weight from 0 at rate 1, and gradients of 1, or what was recorded as bad."""
    for row in rows("opt_contrib.tf1.15.5.eager", 4):
        config = dict(row["config"])
        rate = config.pop("learning_rate")
        weight = torch.nn.Parameter(torch.tensor(config.pop("var_init")))
        manager = ls.ExponentialUpdateLossScaleManager(**config, at_floor="clamp")
        optimizer = ls.LossScaleOptimizer(torch.optim.SGD([weight], rate), manager)
        found = []
        for finite in row["finite"]:
            gradient = torch.tensor(1.0 if finite else float(row["bad_value"]))
            if style == "step":
                weight.grad = gradient * manager.get_loss_scale()
                optimizer.step()
            else:
                optimizer.apply_gradients([(gradient, weight)])
            found.append((*manager.state_dict().values(), weight.item()))
        recorded = row["scale"], row["good"], row["bad"], row["var"]
        expected = list(zip(*recorded, strict=True))
        # Beyond 2**126 the reciprocal of a scale is subnormal, and inexact.
        if style == "apply_gradients" or max(row["scale"]) <= 2.0**126:
            assert expected == found


# States


def moving():
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2, 3)
    loss_scale = ls.DynamicLossScale(8.0, 2)
    manager.update_loss_scale(True)
    loss_scale.update_from_finite(True)
    return manager, loss_scale


@pytest.mark.parametrize(
    "through",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],  # noqa: S301
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_by_itself(through):
    for original in moving():
        before = original.state_dict()
        other = through(original)
        assert before == other.state_dict()
        update = getattr(other, "update_loss_scale", None) or other.update_from_finite
        update(True)
        assert 16.0 == next(iter(other.state_dict().values()))
        assert before == original.state_dict()
    for fixed in (ls.FixedLossScale(8), ls.FixedLossScaleManager(8)):
        assert {} == through(fixed).state_dict()


def test_a_state_is_plain_numbers_and_comes_back_through_a_file(tmp_path):
    manager, loss_scale = moving()
    assert {"loss_scale": 8.0, "good_steps": 1, "bad_steps": 0} == manager.state_dict()
    assert {"current_loss_scale": 8.0, "good_steps": 1} == loss_scale.state_dict()
    for one, fresh in (
        (manager, ls.ExponentialUpdateLossScaleManager(4.0, 2, 3)),
        (loss_scale, ls.DynamicLossScale(4.0, 2)),
    ):
        torch.save(one.state_dict(), tmp_path / "state")
        fresh.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert one.state_dict() == fresh.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"current_loss_scale": 8.0},
        {"current_loss_scale": 8.0, "good_steps": 0, "bad_steps": 0},
        {"current_loss_scale": math.nan, "good_steps": 0},
        {"current_loss_scale": 0.0, "good_steps": 0},
        {"current_loss_scale": 8.0, "good_steps": -1},
        {"current_loss_scale": "8", "good_steps": 0},
        {"current_loss_scale": torch.ones(2), "good_steps": 0},
    ],
    ids=str,
)
def test_a_foreign_state_is_refused_and_changes_nothing(wrong):
    _, loss_scale = moving()
    before = loss_scale.state_dict()
    with pytest.raises(StateError):
        loss_scale.load_state_dict(wrong)
    assert before == loss_scale.state_dict()
    if wrong:
        with pytest.raises(StateError):
            ls.FixedLossScale(8).load_state_dict(wrong)


def test_an_update_leaves_alone_what_was_read_before():
    weight = torch.ones((), requires_grad=True)
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 1)
    scaled = weight * manager.get_loss_scale()
    manager.update_loss_scale(True)
    scaled.backward()
    assert 8.0 == weight.grad.item()


def test_the_state_moves_to_the_device_of_the_flag():
    loss_scale = ls.DynamicLossScale()
    assert "cpu" == loss_scale().device.type
    loss_scale.update([torch.ones(2, device="meta")])
    assert "meta" == loss_scale().device.type


def test_classes_take_sparse_and_complex_gradients_and_name_others():
    loss_scale = ls.DynamicLossScale(8, 1)
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([3e38, 3e38]), (3,), check_invariants=True
    )
    _, should_apply = loss_scale.update([twice])
    assert not should_apply
    _, should_apply = loss_scale.update([torch.tensor([1 + 2j])])
    assert should_apply
    with pytest.raises(GradientError, match=r"\[0\] is torch.int64"):
        loss_scale.update([torch.tensor([1])])


def test_repr_shows_the_current_state():
    assert repr(ls.DynamicLossScale(8)).startswith(
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=0, "
    )


# The wrapper


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused adam": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "sparse adam": (torch.optim.SparseAdam, {"lr": 0.01}),
}
DENSE = [name for name in OPTIMIZERS if name != "sparse adam"]
VANISHING = ("adam", "amsgrad", "adamw", "adagrad", "rmsprop", "adamax", "nadam")
VANISHING += ("radam", "sparse adam")
"""Those whose usual epsilon is 0 in float16."""


def make_optimizer(name, params, *, dtype=torch.float32):
    kind, options = OPTIMIZERS[name]
    if dtype is torch.float16 and name in VANISHING:
        options = {**options, "eps": 1e-4}
    return kind(params, **options)


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def wrapped(make="sgd", scale=8, dtype=torch.float32, **options):
    weights = [parameter(1.0, 2.0, dtype=dtype), parameter(3.0, dtype=dtype)]
    optimizer = make_optimizer(make, weights, dtype=dtype)
    return ls.LossScaleOptimizer(optimizer, scale, **options), weights


def fingerprint(optimizer, weights):
    """Return everything that a skipped step must leave alone."""
    saved = optimizer.optimizer.state_dict()
    return str((saved, [weight.tolist() for weight in weights]))


def numbers(pairs):
    return [None if gradient is None else gradient.tolist() for gradient, _ in pairs]


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


# Fault injection


def faulty(rng, weight, kind):
    """Return a gradient with one bad number somewhere, or with none."""
    gradient = torch.randn(weight.shape, dtype=torch.float32).to(weight.dtype)
    largest = torch.finfo(weight.dtype).max
    if kind != "clean":
        fault = rng.choice([*BAD, largest, -largest, largest / 3])
        parts = torch.view_as_real(gradient) if weight.is_complex() else gradient
        parts.view(-1)[rng.randrange(parts.numel())] = fault
    return gradient


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16,),
        (torch.complex64, torch.float32),
    ],
    ids=["float", "bfloat16", "float16", "complex"],
)
@pytest.mark.parametrize("make", DENSE)
@pytest.mark.parametrize("style", ["apply_gradients", "step"])
def test_no_weight_ever_becomes_infinite_or_nan(make, dtypes, style):
    is_complex = any(dtype.is_complex for dtype in dtypes)
    if is_complex and make in ("fused adam", "adafactor"):
        pytest.skip(f"{make} has no complex parameters")
    rng = random.Random(f"{make} {dtypes}")
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(5, 3, dtype=dtype)) for dtype in dtypes]
    optimizer = ls.LossScaleOptimizer(
        make_optimizer(make, weights, dtype=dtypes[0]),
        ls.DynamicLossScale(2.0**10, 3, floor=2.0**-100),
    )
    moved = 0
    for _ in range(40):
        kind = rng.choice(["clean", "clean", "faulty"])
        before = [weight.detach().clone() for weight in weights]
        pairs = [(faulty(rng, weight, kind), weight) for weight in weights]
        if style == "step":
            for gradient, weight in pairs:
                weight.grad = gradient
            optimizer.step()
        else:
            optimizer.apply_gradients(pairs)
        assert all(weight.isfinite().all() for weight in weights)
        for state in optimizer.state.values():
            for slot in state.values():
                assert not torch.is_tensor(slot) or slot.isfinite().all()
        moved += not all(map(torch.equal, before, weights))
    assert moved > 5


# torch's own Adagrad makes sparse tensors in a way that torch warns about.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", ["sgd", "sparse adam", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_row_of_an_embedding_ever_becomes_infinite_or_nan(make, dtype):
    table = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype)
    torch.nn.init.ones_(table.weight)
    optimizer = ls.LossScaleOptimizer(
        make_optimizer(make, list(table.parameters()), dtype=dtype),
        ls.DynamicLossScale(2.0**10, 3),
    )
    rng = random.Random(0)
    for _ in range(40):
        rows = torch.tensor(rng.choices(range(6), k=4))
        factor = rng.choice([0.01, 0.01, 0.1, *BAD, torch.finfo(dtype).max])
        optimizer.zero_grad()
        optimizer.backward((table(rows) * factor).sum())
        optimizer.step()
        assert table.weight.isfinite().all()
    assert not torch.equal(torch.ones(6, 3, dtype=dtype), table.weight)


# Finite gradients that the optimizer cannot square


@pytest.mark.parametrize("value", [1e20, -3e38])
@pytest.mark.parametrize(
    "loss_scale",
    [
        lambda: ls.DynamicLossScale(8.0),
        lambda: ls.ExponentialUpdateLossScaleManager(8.0, 2, 1),
    ],
    ids=["loss scale", "manager"],
)
def test_a_gradient_that_cannot_be_squared_is_skipped_and_leaves_the_scale(
    loss_scale, value
):
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([weight])
    scale = loss_scale()
    wrapper = ls.LossScaleOptimizer(inner, scale)
    wrapper.apply_gradients([(torch.tensor([value, 1.0]), weight)])
    is_manager = isinstance(scale, ls.LossScaleManager)
    after = scale.get_loss_scale() if is_manager else scale()
    assert ([1.0, 1.0], 8.0, 0) == (weight.tolist(), after.item(), len(inner.state))
