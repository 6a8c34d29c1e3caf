"""With torch's arguments our optimizers are torch's, bit for bit, on a CPU."""

import copy
import inspect
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.optimizers import (  # noqa: E402
    ONE_OF_EACH,
    SETTINGS,
    check_equal,
    make_params,
    set_grads,
    tensors_of,
)

from lossscale.torch import optim  # noqa: E402

CLASSES = ("AdamW", "Adam", "SGD")


def step_together(ours, theirs, steps, start=0):
    for step in range(start, start + steps):
        for optimizer in (ours, theirs):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            set_grads(params, step)
            optimizer.step()
    check_equal(tensors_of(theirs), tensors_of(ours))


@pytest.mark.parametrize("choice", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_equal_torchs(setting, choice):
    ours = setting.ours(make_params(), **choice)
    theirs = setting.torchs(make_params(), **choice)
    step_together(ours, theirs, 5)


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_steps_of_other_dtypes_equal_torchs(setting, dtype):
    step_together(
        setting.ours(make_params(dtype)), setting.torchs(make_params(dtype)), 5
    )


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_steps_of_complex_parameters_equal_torchs(setting):
    dtype = torch.complex64
    step_together(
        setting.ours(make_params(dtype)), setting.torchs(make_params(dtype)), 3
    )


@pytest.mark.parametrize("name", CLASSES)
def test_the_constructor_takes_torchs_arguments_with_torchs_defaults(name):
    ours = inspect.signature(getattr(optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    for argument, parameter in theirs.items():
        assert parameter.default == ours[argument].default
        assert parameter.kind == ours[argument].kind
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [key for key, value in theirs.items() if value.kind == positional] == [
        key for key, value in ours.items() if value.kind == positional
    ]
    assert issubclass(getattr(optim, name), getattr(torch.optim, name))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdamW", {"lr": -1.0}),
        ("AdamW", {"betas": (1.0, 0.9)}),
        ("Adam", {"eps": -1.0}),
        ("Adam", {"weight_decay": -1.0}),
        ("AdamW", {"lr": torch.tensor(0.1), "foreach": True}),
        ("SGD", {"lr": -1.0}),
        ("SGD", {"momentum": -1.0}),
        ("SGD", {"nesterov": True}),
        ("AdamW", {"fused": True, "foreach": True}),
        ("SGD", {"fused": True, "differentiable": True}),
    ],
    ids=str,
)
def test_bad_arguments_raise_what_torch_raises(name, arguments):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        getattr(torch.optim, name)(make_params(), **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        getattr(optim, name)(make_params(), **arguments)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_sparse_gradient_of_adam_is_refused_as_torch_refuses_it(name):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        getattr(optim, name)([weight]).step()
    assert [1.0, 1.0, 1.0] == weight.tolist()


def test_sparse_gradients_of_sgd_equal_torchs():
    def run(kind, **attributes):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind.SGD([weight], lr=0.1)
        grad = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
        weight.grad = grad
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        optimizer.step()
        return weight

    assert torch.equal(run(torch.optim), run(optim))
    scaled = run(optim, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(0.0))
    torch.testing.assert_close(scaled.detach(), torch.tensor([1.0, 0.975, 1.0]))


def test_groups_with_their_own_settings_equal_torchs():
    def groups():
        first, second = make_params(seed=1), make_params(seed=2)
        return [
            {"params": first, "lr": 0.1, "weight_decay": 0.0},
            {"params": second, "betas": (0.5, 0.9), "maximize": True, "amsgrad": True},
        ]

    step_together(optim.AdamW(groups()), torch.optim.AdamW(groups()), 4)


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_a_tensor_learning_rate_equals_torchs(setting):
    def make(kind):
        arguments = setting.arguments | {"lr": torch.tensor(0.05)}
        return getattr(kind, setting.name)(make_params(), **arguments)

    ours, theirs = make(optim), make(torch.optim)
    step_together(ours, theirs, 2)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"].fill_(0.01)
    step_together(ours, theirs, 2, start=2)


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_frozen_parameters_and_added_groups_equal_torchs(setting):
    ours, theirs = setting.ours(make_params()), setting.torchs(make_params())
    for step in range(6):
        for optimizer in (ours, theirs):
            if step == 4:
                optimizer.add_param_group({"params": make_params(seed=9), "lr": 0.5})
            params = [p for group in optimizer.param_groups for p in group["params"]]
            set_grads(params, step)
            params[0].requires_grad_(step != 1)
            if step in (1, 2):
                params[0].grad = None
            if step == 3:
                optimizer.zero_grad()
            optimizer.step()
    check_equal(tensors_of(theirs), tensors_of(ours))


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_schedulers_and_hooks_work_as_with_torchs(setting):
    def run(make):
        optimizer = make(make_params())
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, cycle_momentum=setting.name != "SGD"
        )
        for step in range(8):
            set_grads(optimizer.param_groups[0]["params"], step)
            optimizer.step()
            schedule.step()
        assert ["before", "after"] * 8 == called
        return tensors_of(optimizer)

    check_equal(run(setting.torchs), run(setting.ours))


@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_a_closure_computes_the_loss(setting):
    def run(make):
        params = make_params()
        optimizer = make(params)

        def closure():
            optimizer.zero_grad()
            loss = sum((param**2).sum() for param in params)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    assert run(setting.torchs) == run(setting.ours)


def pickle_and_load(optimizer):
    return pickle.loads(pickle.dumps(optimizer))  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle_and_load])
@pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
def test_a_copy_goes_on_as_the_original_does(setting, copied):
    original = setting.ours(make_params(torch.float16), master_weights=True)
    params = original.param_groups[0]["params"]
    set_grads(params, 0)
    original.step()
    other = copied(original)
    for optimizer in (original, other):
        set_grads(optimizer.param_groups[0]["params"], 1)
        optimizer.step()
    check_equal(tensors_of(original), tensors_of(other))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("choice", [{}, {"foreach": True}], ids=str)
def test_gradients_are_never_written_to(setting, choice):
    params = make_params()
    optimizer = setting.ours(params, **choice)
    for step in range(2):
        set_grads(params, step)
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert all(map(torch.equal, before, [param.grad for param in params]))
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        assert all(map(torch.equal, before, [param.grad for param in params]))
        del optimizer.grad_scale, optimizer.found_inf


def test_named_parameters_are_taken():
    module = torch.nn.Linear(2, 2)
    optimizer = optim.AdamW(module.named_parameters())
    assert ["weight", "bias"] == optimizer.state_dict()["param_groups"][0][
        "param_names"
    ]


def test_no_gradient_at_all_changes_nothing():
    params = make_params()
    before = [param.detach().clone() for param in params]
    optimizer = optim.AdamW(params)
    optimizer.step()
    assert all(map(torch.equal, before, params))
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dupl")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_parameter_that_is_listed_twice_is_updated_as_in_torch(setting):
    found = []
    for make in (setting.ours, setting.torchs):
        params = make_params()
        optimizer = make([*params, params[0]])
        for number in range(3):
            set_grads(params, number)
            optimizer.step()
        found.append(tensors_of(optimizer))
    check_equal(found[1], found[0])
