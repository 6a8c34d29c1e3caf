"""What torch's own optimizer tests ask, for all settings of torch's own table.

`optim_db` of torch.testing._internal lists, for each class, settings, arguments that
must be refused with their messages, and schedulers. Each check runs our class and
torch's on the same numbers.
"""

import copy
import io
import pickle
import warnings
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("expecttest", reason="expecttest, which torch needs, is missing")

from helpers.optimizers import (  # noqa: E402
    check_equal,
    copy_tensors,
    make_params,
    set_grads,
    tensors_of,
)
from torch.testing._internal.common_optimizers import (  # noqa: E402
    OptimizerErrorEnum,
    optim_db,
)

from lossscale.torch import optim  # noqa: E402

INFOS = {info.name: info for info in optim_db if info.name in {"AdamW", "Adam", "SGD"}}
IMPLEMENTATIONS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
NEWER = ("foreach", "differentiable", "fused", "maximize", "capturable")


class Entry(NamedTuple):
    """A class and settings of the table."""

    name: str
    described: str
    arguments: dict

    def __str__(self):
        return f"{self.name} {self.described}"

    def make(self, kind, params, **more):
        arguments = copy.deepcopy(self.arguments) | more
        return getattr(kind, self.name)(params, **arguments)

    def pair(self, make=make_params, **more):
        return [self.make(kind, make(), **more) for kind in (optim, torch.optim)]


ENTRIES = [
    Entry(name, given.desc, given.kwargs)
    for name, info in INFOS.items()
    for given in info.optim_inputs_func(device="cpu")
]
ERRORS = [
    (name, error)
    for name, info in INFOS.items()
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)
every_class = pytest.mark.parametrize(
    "entry", [Entry(name, "default", {}) for name in INFOS], ids=str
)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer, number):
    set_grads(params_of(optimizer), number)
    optimizer.step()


def step_both(ours, theirs, numbers):
    for number in numbers:
        step(ours, number)
        step(theirs, number)
    check_equal(tensors_of(theirs), tensors_of(ours))


def test_the_table_has_our_three_classes():
    assert {"AdamW", "Adam", "SGD"} == INFOS.keys()
    assert len(ENTRIES) >= 19


@pytest.mark.parametrize("choice", IMPLEMENTATIONS, ids=str)
@every_entry
def test_steps_equal_torchs(entry, choice):
    if choice.get("foreach") and torch.is_tensor(entry.arguments.get("lr")):
        pytest.skip("torch refuses a tensor learning rate with foreach=True")
    step_both(*entry.pair(**choice), range(4))


@every_entry
def test_steps_of_parameters_with_gaps_equal_torchs(entry):
    def make():
        wide = make_params(shapes=[(10, 5, 2), (10, 2)])
        return [torch.nn.Parameter(param.detach()[..., 0]) for param in wide]

    step_both(*entry.pair(make), range(3))


@every_entry
def test_steps_of_complex_parameters_equal_torchs(entry):
    step_both(*entry.pair(lambda: make_params(torch.complex64)), range(3))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@every_class
def test_learning_rates_that_are_tensors_of_any_shape_equal_torchs(entry, shape):
    ours, theirs = entry.pair(lr=torch.full(shape, 0.1))
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (ours, theirs)
    ]
    for number in range(3):
        step_both(ours, theirs, [number])
        for schedule in schedules:
            schedule.step()
    assert torch.is_tensor(ours.param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_betas_that_are_tensors_equal_torchs(name):
    entry = Entry(name, "", {"betas": (torch.tensor(0.5), torch.tensor(0.75))})
    step_both(*entry.pair(), range(3))


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_what_torch_refuses_is_refused_with_its_message(name, error):
    given = error.optimizer_error_input

    def provoke(kind):
        params = copy.deepcopy(given.params)
        optimizer = getattr(kind, name)(params, **copy.deepcopy(given.kwargs))
        if error.error_on == OptimizerErrorEnum.STEP_ERROR:
            optimizer.step()

    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            provoke(optim)
        return
    with pytest.raises(error.error_type, match=error.error_regex):
        provoke(optim)
    with pytest.raises(error.error_type) as theirs:
        provoke(torch.optim)
    with pytest.raises(type(theirs.value)) as ours:
        provoke(optim)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("name", INFOS)
def test_schedulers_of_the_table_give_torchs_steps(name):
    entry = Entry(name, "", {"lr": 0.1})
    for makers in INFOS[name].scheduler_inputs:
        ours, theirs = entry.pair()
        schedules = [
            [make(optimizer) for make in makers] for optimizer in (ours, theirs)
        ]
        for number in range(4):
            for own, optimizer in zip(schedules, (ours, theirs), strict=True):
                step(optimizer, number)
                for schedule in own:
                    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
                    given = (1.0,) if isinstance(schedule, plateau) else ()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # how schedulers are chained
                        schedule.step(*given)
        assert theirs.param_groups[0]["lr"] == ours.param_groups[0]["lr"]
        check_equal(tensors_of(theirs), tensors_of(ours))


@every_entry
def test_groups_with_other_rates_and_decays_equal_torchs(entry):
    def make():
        first, second = make_params(seed=1), make_params(seed=2)
        return [
            {"params": first, "weight_decay": 0.5},
            {"params": second, "lr": 0.3},
        ]

    step_both(*entry.pair(make), range(3))


@every_entry
def test_without_gradients_nothing_changes(entry):
    optimizer = entry.make(optim, make_params())
    step(optimizer, 0)
    before = copy_tensors(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    check_equal(before, tensors_of(optimizer))


@every_entry
def test_gradients_of_zero_do_what_they_do_in_torch(entry):
    ours, theirs = entry.pair()
    for optimizer in (ours, theirs):
        for param in params_of(optimizer):
            param.grad = torch.zeros_like(param)
        optimizer.step()
    check_equal(tensors_of(theirs), tensors_of(ours))


# -- saving ----------------------------------------------------------------------------


def save_and_load(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def cast_steps(state_dict):
    """Have the step counts as numbers, as old versions of torch saved them."""
    for state in state_dict["state"].values():
        if "step" in state:
            state["step"] = state["step"].item()
    return state_dict


def drop_newer(state_dict):
    """Leave out the settings that old versions of torch did not have."""
    for group in state_dict["param_groups"]:
        for name in NEWER:
            group.pop(name, None)
    return state_dict


@pytest.mark.parametrize("change", [save_and_load, cast_steps, drop_newer])
@pytest.mark.parametrize("source", [0, 1], ids=["ours to torch", "torch to ours"])
@every_entry
def test_state_dicts_load_both_ways(entry, source, change):
    pair = entry.pair()
    first, second = pair[source], pair[1 - source]
    if change is drop_newer and entry.arguments.get("maximize"):
        pytest.skip("old versions of torch had no maximize")
    for number in range(3):
        step(first, number)
    for param, loaded in zip(params_of(first), params_of(second), strict=True):
        loaded.data.copy_(param)
    second.load_state_dict(change(copy.deepcopy(first.state_dict())))
    step_both(first, second, [3, 4])


@every_class
def test_state_dicts_with_and_without_names_load_into_each_other(entry):
    def named():
        return [(f"layer.{i}", param) for i, param in enumerate(make_params())]

    for source, target in ((named, make_params), (make_params, named)):
        first, _ = entry.pair(source)
        second, theirs = entry.pair(target)
        step(first, 0)
        for optimizer in (second, theirs):
            optimizer.load_state_dict(first.state_dict())
        assert (
            theirs.state_dict()["param_groups"] == second.state_dict()["param_groups"]
        )
        check_equal(tensors_of(theirs), tensors_of(second))


@every_entry
def test_a_state_dict_is_the_same_for_equal_optimizers_and_has_torchs_text(entry):
    (ours, theirs), (other, _) = entry.pair(), entry.pair()
    for optimizer in (ours, theirs, other):
        step(optimizer, 0)
    first, second, torchs = (x.state_dict() for x in (ours, other, theirs))
    assert repr(first) == repr(second) == repr(torchs)
    assert repr(theirs) == repr(ours)
    assert theirs.defaults.keys() == ours.defaults.keys()


@every_class
def test_hooks_of_state_dicts_are_called_in_torchs_order(entry):
    def run(kind):
        optimizer, calls = entry.make(kind, make_params()), []

        def replace(_, state_dict):
            calls.append("replace")
            groups = [{**group, "lr": 7.0} for group in state_dict["param_groups"]]
            return {**state_dict, "param_groups": groups}

        def note(name):
            return lambda *_: calls.append(name)

        optimizer.register_state_dict_pre_hook(note("before saving"))
        optimizer.register_state_dict_post_hook(replace)
        optimizer.register_load_state_dict_pre_hook(note("before loading"))
        optimizer.register_load_state_dict_pre_hook(note("first"), prepend=True)
        optimizer.register_load_state_dict_post_hook(note("after loading"))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return calls, optimizer.param_groups[0]["lr"]

    assert run(torch.optim) == run(optim)


@every_class
def test_hooks_of_all_optimizers_are_called_around_ours(entry):
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def run(kind):
        calls = []
        optimizer = entry.make(kind, make_params())
        handles = [
            register_optimizer_step_pre_hook(lambda *_: calls.append("all, before")),
            register_optimizer_step_post_hook(lambda *_: calls.append("all, after")),
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        step(optimizer, 0)
        for handle in handles:
            handle.remove()
        step(optimizer, 1)
        return calls

    assert run(torch.optim) == run(optim)


def pickle_and_load(optimizer):
    return pickle.loads(pickle.dumps(optimizer))  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle_and_load])
@every_entry
def test_copies_have_all_public_attributes_and_go_on(entry, copied):
    ours = entry.make(optim, make_params())
    step(ours, 0)
    other = copied(ours)
    public = {name for name in vars(ours) if not name.startswith("_")}
    assert public == {name for name in vars(other) if not name.startswith("_")}
    step_both(ours, other, [1])


def test_differentiable_is_refused_with_torchs_words():
    for name in INFOS:
        with pytest.raises(RuntimeError, match="does not support `differentiable`"):
            getattr(optim, name)(make_params(), differentiable=True)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_capturable_on_a_cpu_is_refused_as_in_torch(name):
    for kind in (torch.optim, optim):
        optimizer = getattr(kind, name)(make_params(), capturable=True, foreach=False)
        set_grads(params_of(optimizer), 0)
        with pytest.raises(AssertionError, match="capturable=True"):
            optimizer.step()
