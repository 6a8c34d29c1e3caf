"""Our optimizers' kernels next to torch's functions: the same checks on every device.

Each step of the kernels is compared with the same step by torch's own functions, from
the same weights and state. The tests run the checks in Triton's interpreter, with small
chunks; on a machine with a GPU they run as they are:

    PYTHONPATH=src:tests python tests/kernels/optim_cases.py [cuda] [--large]
"""

import gc
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from helpers import updates
from helpers.optimizers import (
    ONE_OF_EACH,
    SETTINGS,
    Setting,
    check_equal,
    copy_tensors,
    make_params,
    set_grads,
    tensors_of,
)
from helpers.rounding import round_stochastically

import lossscale.torch as ls
from lossscale.errors import StateError
from lossscale.torch import optim

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
EPSILON = 2.0**-23
KINDS = {
    "float32": (FLOAT32, False),
    "float16 with masters": (FLOAT16, True),
    "bfloat16 with masters": (BFLOAT16, True),
    "float16": (FLOAT16, False),
    "bfloat16": (BFLOAT16, False),
}


# -- comparing -------------------------------------------------------------------------


def ulp(*tensors):
    """Return the distance of float32 numbers at the largest of some magnitudes."""
    largest = torch.stack([tensor.abs().float() for tensor in tensors]).amax(0)
    return torch.nextafter(largest, torch.full_like(largest, math.inf)) - largest


def unit_of(dtype, *tensors):
    """Return the distance of the numbers of a dtype at the largest of magnitudes."""
    unit = ulp(*tensors)
    if dtype == FLOAT16:
        return (unit * 2.0**13).clamp(min=2.0**-24)
    return unit * 2.0**16 if dtype == BFLOAT16 else unit


def largest_update(group, state, terms):
    """Return the update that the largest term of the first moment would make alone.

    Where terms of the moment cancel, the update is small and its rounding is not: it
    is that of the terms.

    Args:
        group: The settings.
        state: The state of the parameter after the step.
        terms: What is added up to the first moment.
    """
    largest = torch.stack([term.abs().double() for term in terms]).amax(0)
    rate = float(group["lr"])
    if "betas" not in group:
        return rate * (1 + group["momentum"]) * largest
    (beta1, beta2), count = group["betas"], state["step"].item()
    square = state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
    root = (square / (1 - beta2**count)).sqrt() + group["eps"]
    return rate / (1 - beta1**count) * largest / root


TOLERANCE = 4.0
"""How many units: torch's functions fuse products and sums on some devices."""


class Twins:
    """One optimizer stepped by the kernels, and one by torch's functions."""

    def __init__(self, make, params):
        """Make both.

        Args:
            make: Makes an optimizer of parameters and keyword arguments.
            params: Makes the parameters, or groups of them.
        """
        self.fast, self.slow = make(params()), make(params(), fused=False)

    @staticmethod
    def params(optimizer):
        return [param for group in optimizer.param_groups for param in group["params"]]

    def step(self, give_grads, scale=None, *, skip=False):
        """Step both from the state of the fast one, and compare."""
        self._copy_state()
        before = copy_tensors(self.fast)
        for optimizer in (self.slow, self.fast):
            params = self.params(optimizer)
            give_grads(params)
            device = params[0].device
            optimizer.grad_scale = (
                None if scale is None else torch.tensor(scale, device=device)
            )
            optimizer.found_inf = torch.tensor(float(skip), device=device)
            optimizer.step()
        if skip:
            for name, tensor in before.items():
                assert torch.equal(tensor, tensors_of(self.fast)[name]), name
            return
        self._compare(before, scale)

    def _copy_state(self):
        pairs = zip(self.params(self.fast), self.params(self.slow), strict=True)
        for fast, slow in pairs:
            slow.data.copy_(fast.data)
            state = self.fast.state.get(fast, {})
            if state:
                self.slow.state[slow] = {
                    key: value.clone() for key, value in state.items()
                }
                if "step" in state:
                    self.slow.state[slow]["step"] = state["step"].clone().cpu()

    def _compare(self, before, scale):
        expected, actual = tensors_of(self.slow), tensors_of(self.fast)
        assert expected.keys() == actual.keys()
        groups = [group for group in self.fast.param_groups for _ in group["params"]]
        params = self.params(self.fast)
        for index, (group, param) in enumerate(zip(groups, params, strict=True)):
            names = [name for name in expected if name.split(".")[0] == f"{index}"]
            if param.grad is None:
                for name in names:
                    # Steps are counted on the host by one of them.
                    assert torch.equal(expected[name].cpu(), actual[name].cpu()), name
                continue
            grad = param.grad.float() / (scale or 1.0)
            if not group.get("decoupled_weight_decay", False):
                grad = grad.abs() + group["weight_decay"] * before[f"{index}"].abs()
            state = self.fast.state.get(param, {})
            for name in names:
                self._compare_one(name, before, expected, actual, group, state, grad)

    @staticmethod
    def _compare_one(name, before, expected, actual, group, state, grad):
        """Raise if a tensor differs by more than a few units.

        The unit is the distance of neighbouring numbers, in the dtype of the tensor, at
        the largest of what is added up.
        """
        number, _, key = name.partition(".")
        if key == "step":
            assert expected[name].item() == actual[name].item(), name
            return
        old = before.get(name)
        if old is None:  # the first step: a master starts at the weight
            old = before[number] if key == "master_param" else torch.zeros_like(grad)
        magnitudes = [expected[name], old]
        if key in ("exp_avg", "momentum_buffer"):
            magnitudes.append(grad)
        elif key.endswith("exp_avg_sq"):
            magnitudes.append(grad.double().square().float())
        else:
            moments = [
                tensors[f"{number}.{moment}"]
                for tensors in (before, actual)
                for moment in ("exp_avg", "momentum_buffer")
                if f"{number}.{moment}" in tensors
            ]
            magnitudes.append(largest_update(group, state, [grad, *moments]))
        unit = unit_of(expected[name].dtype, *magnitudes)
        distance = (expected[name].double() - actual[name].double()).abs() / unit
        if distance.numel() and distance.max().item() > TOLERANCE:
            message = f"{name} is {distance.max().item():.2f} units away"
            raise AssertionError(message)


def random_grads(number, scale=1.0):
    return lambda params: set_grads(params, number, scale)


# -- the checks ------------------------------------------------------------------------


def checks(
    device: str, *, block: int, many: int, steps: int, large: bool = False
) -> Iterable[tuple[str, Callable[[], object]]]:
    """Return all checks by name.

    Args:
        device: Where the parameters are.
        block: How many elements a program takes.
        many: How many tensors there are in the check of many.
        steps: How many steps are compared with torch's fused optimizer.
        large: Whether to add a tensor of more than 2**31 elements.
    """
    for setting in SETTINGS:
        for kind in KINDS:
            yield (
                f"{setting} {kind}",
                lambda setting=setting, kind=kind: check_setting(device, setting, kind),
            )
            yield (
                f"measured {setting} {kind}",
                lambda s=setting, kind=kind: updates.check_setting(device, s, kind),
            )
    for setting in ONE_OF_EACH:
        yield from measured(device, setting, block)
        yield from of_each(device, setting, block)
        yield from replaced(device, setting)
    yield "removed group", lambda: check_removed_group(device)
    yield "after an exception", lambda: check_after_exception(device)
    yield "negated", lambda: check_negated(device)
    yield "fewer parameters", lambda: check_fewer_params(device)
    yield "other entries", lambda: check_other_entries(device)
    yield "changed dtype", lambda: check_changed_dtype(device)
    yield "foreign state", lambda: check_foreign_state(device)
    yield "other memory", lambda: check_other_memory(device)
    yield "state that is gone", lambda: check_missing_state(device)
    yield "listed twice", lambda: check_listed_twice(device)
    yield "strides", lambda: check_strides(device)
    yield "groups", lambda: check_groups(device)
    yield "bfloat16 moments", lambda: check_moments(device)
    yield "noise of bfloat16 moments", lambda: check_noise(device)
    yield "rates", lambda: check_rates(device)
    for masters in (False, True):
        yield (
            f"whole step masters={masters}",
            lambda m=masters: check_whole_step(device, m),
        )
    yield "many", lambda: check_many(device, many)
    yield "long", lambda: check_fused(device, "AdamW", "float32", 200)
    for name in FUSED:
        for kind in KINDS:
            yield (
                f"fused {name} {kind}",
                lambda name=name, kind=kind: check_fused(device, name, kind, steps),
            )
    yield "fused with the same scalars", lambda: check_same_scalars(device)
    if device == "cuda":
        yield "captured twice", check_captured_twice
        for masters in (False, True):
            yield f"graph masters={masters}", lambda m=masters: check_graph(m)
    if large:
        yield "large", lambda: check_large(device)


def of_each(device, setting, block):
    """Yield the checks that are made of one setting of each class."""
    yield f"sizes {setting}", lambda: check_sizes(device, setting, block)
    yield f"unaligned {setting}", lambda: check_unaligned(device, setting)
    yield f"missing {setting}", lambda: check_missing(device, setting)
    yield f"resting {setting}", lambda: check_resting(device, setting)
    yield f"resume {setting}", lambda: check_resume(device, setting)
    yield f"reference {setting}", lambda: check_reference(device, setting)
    yield f"write back {setting}", lambda: check_write_back(device, setting)
    yield f"scaler {setting}", lambda: check_scaler(device, setting)
    for kind in list(KINDS)[1:]:
        yield (
            f"accumulated {setting} {kind}",
            lambda kind=kind: check_accumulated(device, setting, kind),
        )
        yield (
            f"finite {setting} {kind}",
            lambda kind=kind: check_finite(device, setting, kind),
        )


def replaced(device, setting):
    """Yield the checks of state that other code replaces between two steps."""
    for way in WAYS_TO_REPLACE:
        yield (
            f"replaced by {way} {setting}",
            lambda way=way: check_replaced(device, setting, way),
        )
    yield f"reset {setting}", lambda: check_reset(device, setting)
    yield f"freed {setting}", lambda: check_freed(device, setting)
    yield f"freed at once {setting}", lambda: check_freed_at_once(device, setting)
    yield f"held {setting}", lambda: check_held(device, setting)
    yield f"noted {setting}", lambda: check_noted(device, setting)
    yield (
        f"found by the collector {setting}",
        lambda: check_found_by_the_collector(device, setting),
    )
    yield f"resting {setting}", lambda: check_replaced_at_rest(device, setting)


def measured(device, setting, block):
    """Yield the checks of what a step adds to the weights."""
    for name, check in (
        ("groups", lambda: updates.check_groups(device, setting)),
        ("sizes", lambda: updates.check_sizes(device, setting, block)),
        ("tiny", lambda: updates.check_tiny(device, setting)),
        ("scaler", lambda: updates.check_with_scaler(device, setting)),
    ):
        yield f"measured {name} {setting}", check
    for kind in KINDS:
        yield (
            f"measured bits {setting} {kind}",
            lambda kind=kind: updates.check_same_bits(device, setting, kind),
        )


def check_setting(device, setting, kind):
    dtype, masters = KINDS[kind]
    twins = Twins(
        lambda params, **more: setting.ours(params, master_weights=masters, **more),
        lambda: make_params(dtype, device=device),
    )
    for number, scale in enumerate((None, 8.0, 8.0, 3.0, 2.0**-3)):
        gives = random_grads(number, scale or 1.0)
        twins.step(gives, scale, skip=number == 2)


def check_finite(device, setting, kind):
    """A weight beyond the range of its dtype becomes the largest number of it."""
    dtype, masters = KINDS[kind]
    largest = torch.finfo(dtype).max
    start = torch.tensor([largest, -largest, 1.0, torch.nan], device=device).to(dtype)
    param = torch.nn.Parameter(start)
    optimizer = setting.ours([param], master_weights=masters)
    (group,) = optimizer.param_groups
    group["weight_decay"] = 0.0
    sign = -1.0 if group["maximize"] else 1.0
    group["lr"] = largest / 300.0
    param.grad = sign * torch.tensor([-1.0, 1.0, 0.0, 0.0], device=device).to(dtype)
    optimizer.grad_scale = torch.ones((), device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    assert [largest, -largest, 1.0] == param[:3].tolist()
    assert param[3].isnan()
    if masters:
        (master,) = optimizer.master_parameters()
        assert master[0] > largest
        assert master[1] < -largest


def check_sizes(device, setting, block):
    shapes = [(size,) for size in (0, 1, block - 1, block, block + 1, 3 * block + 5)]
    for dtype, masters in ((FLOAT32, False), (FLOAT16, True)):
        twins = Twins(
            lambda params, m=masters, **more: setting.ours(
                params, master_weights=m, **more
            ),
            lambda d=dtype: make_params(d, shapes, device),
        )
        for number in range(2):
            twins.step(random_grads(number, 4.0), 4.0)


def check_unaligned(device, setting):
    def params():
        made = []
        for param in make_params(FLOAT32, [(37,), (5,)], device):
            buffer = torch.zeros(param.numel() + 1, device=device)
            buffer[1:].copy_(param.detach())
            made.append(torch.nn.Parameter(buffer[1:]))
        return made

    twins = Twins(setting.ours, params)
    for number in range(2):
        twins.step(random_grads(number))


def check_strides(device):
    """Transposed and channels-last weights; a gradient with other strides."""

    def params():
        (square, image) = make_params(FLOAT32, [(6, 4), (2, 3, 4, 4)], device)
        image = image.detach().to(memory_format=torch.channels_last)
        return [torch.nn.Parameter(square.detach().t()), torch.nn.Parameter(image)]

    def give_grads(params, *, same):
        set_grads(params, 3)
        for param in params:
            if same:
                param.grad = torch.empty_like(param).copy_(param.grad)

    twins = Twins(optim.AdamW, params)
    for same in (True, False, True):
        twins.step(lambda params, same=same: give_grads(params, same=same))


def check_missing(device, setting):
    """Gradients that come and go, a frozen parameter, a group that is added."""
    twins = Twins(setting.ours, lambda: make_params(device=device))

    def give_grads(number):
        def give(params):
            set_grads(params, number)
            for at, param in enumerate(params):
                if (at + number) % 3 == 0 and number:
                    param.grad = None

        return give

    for number in range(6):
        if number == 4:
            for optimizer in (twins.fast, twins.slow):
                added = make_params(device=device, seed=5)
                optimizer.add_param_group({"params": added, "lr": 0.2})
        twins.step(give_grads(number))


def check_resting(device, setting):
    """A gradient is missing for a step; the others stay at their addresses."""
    twins = Twins(setting.ours, lambda: make_params(device=device))
    kept = {}

    def give_grads(number):
        def give(params):
            if id(params[0]) not in kept:
                set_grads(params, 0)
                kept[id(params[0])] = [param.grad for param in params]
            for at, param in enumerate(params):
                param.grad = kept[id(params[0])][at]
            if number == 1:
                params[-1].grad = None

        return give

    for number in range(4):
        twins.step(give_grads(number))


def _swap_memory(value):
    value.data = value.data.clone()
    return value


WAYS_TO_REPLACE = {
    "a copy on the host and back": lambda value: value.cpu().clone().to(value.device),
    "a copy on the host": lambda value: value.cpu().clone(),
    "other memory": _swap_memory,
}


def replace_state(optimizer, params, way):
    for param in params:
        state = optimizer.state[param]
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor):
                state[name] = WAYS_TO_REPLACE[way](value)


def check_replaced(device, setting, way):
    """A training whose state is moved away equals the undisturbed one, as saved."""

    def train(*, moves):
        params = make_params(FLOAT16, device=device)
        params += make_params(FLOAT32, device=device, seed=3)
        optimizer = setting.ours(params, master_weights=True)
        for number in range(5):
            set_grads(params, number)
            optimizer.step()
            if moves and number in (1, 3):
                replace_state(optimizer, params, way)
        return optimizer

    check_equal(
        {name: x.to(device) for name, x in copy_tensors(train(moves=False)).items()},
        {name: x.to(device) for name, x in copy_tensors(train(moves=True)).items()},
    )


def check_replaced_at_rest(device, setting):
    """The same for a parameter that has no gradient at the step after."""

    def train(*, moves):
        params = make_params(FLOAT16, [(70,), (5,)], device)
        optimizer = setting.ours(params, master_weights=True)
        for number in range(5):
            set_grads(params, number)
            if number == 2:
                params[1].grad = None
            optimizer.step()
            if moves and number == 1:
                replace_state(optimizer, params[1:], "a copy on the host and back")
        return optimizer

    check_equal(tensors_of(train(moves=False)), tensors_of(train(moves=True)))


def check_reset(device, setting):
    """A state that is emptied begins again."""
    params = make_params(FLOAT16, [(70,), (5,)], device)
    optimizer = setting.ours(params, master_weights=True)
    for number in range(2):
        set_grads(params, number)
        optimizer.step()
    fresh = setting.ours(copy_params(params, FLOAT16), master_weights=True)
    optimizer.state[params[0]] = {}
    optimizer.state[params[1]].clear()
    for one in (optimizer, fresh):
        set_grads(Twins.params(one), 2)
        one.step()
    check_equal(tensors_of(fresh), tensors_of(optimizer))


def check_held(device, setting):
    """What was read of the state may be moved at any time, as long as it is held."""

    def train(*, moves):
        params = make_params(FLOAT16, [(70,), (5,)], device)
        optimizer = setting.ours(params, master_weights=True)
        for number in range(2):
            set_grads(params, number)
            optimizer.step()
        entry = optimizer.state[params[0]]
        name = next(reversed(entry))
        held = entry[name] if moves else None
        del entry
        for number in range(2, 6):
            if moves and number == 4:  # two steps after it was read
                held.data = held.data.clone()
            set_grads(params, number)
            optimizer.step()
        return optimizer

    check_equal(tensors_of(train(moves=False)), tensors_of(train(moves=True)))


def check_noted(device, setting):
    """Reading the state is noted, until no other code has anything of it."""
    params = make_params(FLOAT16, [(70,), (5,)], device)
    optimizer = setting.ours(params, master_weights=True)

    def step():
        set_grads(params, 1)
        optimizer.step()
        return optimizer._state_was_read

    for _ in range(3):  # torch takes a first step that is dampened
        step()
    assert [False, False] == [step(), step()]
    readers = {
        "state": lambda: optimizer.state,
        "an entry": lambda: optimizer.state[params[1]],
        "a tensor": lambda: next(iter(optimizer.state[params[0]].values())),
        "an iterator": lambda: iter(optimizer.state.items()),
        "a state dict": optimizer.state_dict,
        "masters": lambda: list(optimizer.master_parameters()),
    }
    for name, read in readers.items():
        held = read()
        assert [True, True] == [step(), step()], name
        del held
        gc.collect()
        assert [False, False] == [step(), step()], name
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    assert [False, False] == [(step(), step())[1], step()]


def make_sgd(sizes, device):
    """Return SGD at a rate of 1 on weights of zeros, with gradients of ones."""
    params = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    return optim.SGD(params, lr=1.0), params


def check_after_exception(device):
    """A step that raised leaves no addresses behind that are not those of the next."""
    optimizer, (param,) = make_sgd([8], device)
    first, other = param.grad, torch.full_like(param.grad, 100.0)
    for _ in range(4):
        optimizer.step()
    param.grad, optimizer.grad_scale = other, 2.0  # no tensor
    try:
        optimizer.step()
    except AttributeError:
        optimizer.grad_scale = None
    else:
        message = "a scale that is no tensor was accepted"
        raise AssertionError(message)
    before = param.detach().clone()
    param.grad = first
    optimizer.step()
    check_equal({"weight": before - 1.0}, {"weight": param.detach()})


def check_negated(device):
    """A gradient that autograd has left negated, in the memory of one that is not."""
    optimizer, (param,) = make_sgd([()], device)
    number = torch.tensor(1 + 3j, device=device)
    for conjugates in (False, False, False, True, True, False, True):
        optimizer.zero_grad()
        value = torch.complex(torch.zeros_like(param), param)
        value = value.conj() if conjugates else value
        ((value * number).imag + 0).backward()
        before, slope = param.item(), param.grad.resolve_neg().item()
        optimizer.step()
        assert before - slope == param.item()


def check_fewer_params(device):
    """Parameters are removed from a group, of which some had no gradient."""
    for kept in (slice(2, None), slice(4, None), slice(0, 1)):
        optimizer, params = make_sgd([8] * 5, device)
        for param in params[1:4]:
            param.grad = None
        for _ in range(3):
            optimizer.step()
        optimizer.param_groups[0]["params"] = params[kept]
        optimizer.step()
        expected = [0.0 if i in (1, 2, 3) else -3.0 for i in range(5)]
        for index in range(5)[kept]:
            expected[index] -= params[index].grad is not None
        assert expected == [param[0].item() for param in params]


def check_other_entries(device):
    """Other code keeps entries of its own in the state."""
    params = make_params(FLOAT32, [(70,), (5,)], device)
    optimizer = optim.AdamW(params)
    optimizer.state["epoch"] = 3
    for number in range(3):
        set_grads(params, number)
        optimizer.step()
        assert 3 == optimizer.state["epoch"]
    optimizer.state[params[0]]["note"] = "mine"
    optimizer.step()
    assert [3.0, 4.0] == [3.0, optimizer.state[params[0]]["step"].item()]


def check_found_by_the_collector(device, setting):
    """Tools that find tensors without `optimizer.state` move all of them."""

    def train(*, moves):
        params = make_params(FLOAT16, [(70,), (5,)] * 10, device)
        optimizer = setting.ours(params, master_weights=True)
        for number in range(4):
            set_grads(params, number)
            optimizer.step()
        assert not optimizer._state_was_read
        if moves:
            known = {id(x) for x in vars(optimizer)["state"][params[0]].values()}
            sizes = {x.numel() for x in params}
            for found in gc.get_objects():
                if type(found) is torch.Tensor and found.numel() in sizes:
                    known.discard(id(found))
                    found.data = found.data.clone()
            assert len(known) <= 1  # but for the step count
        for number in range(4, 6):
            set_grads(params, number)
            optimizer.step()
        return optimizer

    check_equal(tensors_of(train(moves=False)), tensors_of(train(moves=True)))


def check_captured_twice():
    """Several steps in one graph, and a step without it on the same gradients."""
    optimizer, (param,) = make_sgd([8], "cuda")
    warm_up = param.grad
    for _ in range(3):
        optimizer.step()
    param.grad = torch.full_like(param, 100.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
        optimizer.step()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        optimizer.step()
    warm_up.fill_(math.nan)
    for count, take in enumerate((graph.replay, again.replay, optimizer.step)):
        take()
        expected = torch.full_like(param, -3.0 - 100.0 * (2, 3, 4)[count])
        check_equal({"weight": expected}, {"weight": param.detach()})


def check_freed_at_once(device, setting):
    """State that other code has replaced is freed before the next step."""
    params = make_params(FLOAT16, [(70,), (5,)], device)
    optimizer = setting.ours(params, master_weights=True)
    for number in range(3):
        set_grads(params, number)
        optimizer.step()
    names = [name for name in optimizer.state[params[0]] if name != "step"]
    replaced = [
        weakref.ref(optimizer.state[param][name]) for param in params for name in names
    ]
    replace_state(optimizer, params, "a copy on the host")
    gc.collect()
    assert names
    assert not any(known() is not None for known in replaced)


def check_freed(device, setting):
    """Nothing keeps state alive that was replaced, of a parameter without gradient."""
    params = make_params(FLOAT16, [(70,), (5,)], device)
    optimizer = setting.ours(params, master_weights=True)
    for number in range(2):
        set_grads(params, number)
        optimizer.step()
    names = [name for name in optimizer.state[params[0]] if name != "step"]
    replaced = [weakref.ref(optimizer.state[params[1]][name]) for name in names]
    replace_state(optimizer, params[1:], "a copy on the host and back")
    params[1].grad = None
    optimizer.step()
    gc.collect()
    assert not any(known() is not None for known in replaced)


def check_removed_group(device):
    """A group goes while a parameter of a later one has no gradient."""

    def groups():
        return [
            {"params": make_params(FLOAT32, [(9,)], device, seed), "lr": 0.1 * seed}
            for seed in (1, 2, 3)
        ]

    twins = Twins(optim.AdamW, groups)
    twins.step(random_grads(0))
    for optimizer in (twins.fast, twins.slow):
        del optimizer.param_groups[0]

    def give_one(params):
        set_grads(params, 1)
        params[1].grad = None

    twins.step(give_one)
    twins.step(random_grads(2))


def check_changed_dtype(device):
    """A model is converted in mid-training: what is kept stays as it was."""
    for before, after in ((FLOAT32, FLOAT16), (FLOAT16, FLOAT32)):
        for make in (
            lambda params, **more: optim.SGD(params, 0.5, momentum=0.9, **more),
            optim.AdamW,
        ):
            twins = Twins(make, lambda: make_params(before, device=device))  # noqa: B023
            twins.step(random_grads(0))
            for optimizer in (twins.fast, twins.slow):
                for param in twins.params(optimizer):
                    param.grad = None
                    param.data = param.data.to(after)
            twins.step(random_grads(1))
            twins.step(random_grads(2))


def check_foreign_state(device):
    """State that the kernels cannot update is one error, and nothing is changed."""
    for name, spoil in (
        ("shape", lambda value: value.reshape(-1)[:-1].clone()),
        ("shape", lambda value: value.new_ones(())),
        ("float64", torch.Tensor.double),
    ):
        for make, kept in (
            (lambda params: optim.SGD(params, 0.1, momentum=0.9), "momentum_buffer"),
            (optim.AdamW, "exp_avg_sq"),
        ):
            optimizer = make(make_params(device=device))
            params = Twins.params(optimizer)
            set_grads(params, 0)
            optimizer.step()
            state = optimizer.state[params[0]]
            state[kept] = spoil(state[kept])
            before = copy_tensors(optimizer)
            set_grads(params, 1)
            message = ""
            try:
                optimizer.step()
            except StateError as error:
                message = str(error)
            assert f"{kept} of a parameter" in message, message
            assert name in message, message
            check_equal(before, tensors_of(optimizer))
    twins = Twins(optim.AdamW, lambda: make_params(device=device))
    twins.step(random_grads(0))
    for param in twins.params(twins.fast):
        state = twins.fast.state[param]
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    twins.step(random_grads(1))


def check_other_memory(device):
    """`.data` of a parameter is a part of the same memory, or laid out otherwise."""
    for change in (lambda data: data.t(), lambda data: data[:2]):
        pair = []
        for fused in (None, False):
            param = torch.nn.Parameter(torch.arange(9.0, device=device).reshape(3, 3))
            optimizer = optim.SGD([param], lr=0.5, fused=fused)
            param.grad = torch.ones_like(param)
            optimizer.step()
            memory = param.data
            param.grad = None
            param.data = change(param.data)
            slopes = torch.arange(1.0, 1.0 + param.numel(), device=device)
            param.grad = slopes.reshape(param.shape)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            pair.append(memory)
        check_equal({"memory": pair[1]}, {"memory": pair[0]})


def check_missing_state(device):
    """What was deleted from the state of a parameter is made with its next gradient."""
    twins = Twins(
        lambda params, **more: optim.SGD(
            params, 0.5, momentum=0.9, dampening=0.5, **more
        ),
        lambda: make_params(device=device),
    )
    twins.step(random_grads(0))
    for optimizer in (twins.fast, twins.slow):
        del optimizer.state[twins.params(optimizer)[0]]

    def all_but_one(params):
        set_grads(params, 1)
        params[0].grad = None

    twins.step(all_but_one)
    first = twins.params(twins.fast)[0]
    assert not twins.fast.state.get(first)
    twins.step(random_grads(2))


def check_listed_twice(device):
    """A parameter that is listed twice is updated twice, one after the other."""

    def make(params, **more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optim.AdamW([*params, params[0]], **more)

    twins = Twins(make, lambda: make_params(device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(2):
            twins.step(random_grads(number))
    (plan,) = twins.fast._plan.devices
    assert len(plan.members) == len(twins.params(twins.fast)) - 2


def check_groups(device):
    """Four kinds of parameters and three groups, with settings of their own."""

    def groups():
        return [
            {"params": make_params(FLOAT16, device=device, seed=1), "lr": 0.1},
            {"params": make_params(FLOAT32, device=device, seed=2), "maximize": True},
            {
                "params": make_params(BFLOAT16, device=device, seed=3),
                "amsgrad": True,
                "betas": (0.0, 0.5),
                "weight_decay": 0.3,
            },
            {"params": make_params(FLOAT16, device=device, seed=4), "amsgrad": True},
        ]

    twins = Twins(
        lambda params, **more: optim.AdamW(params, master_weights=True, **more), groups
    )
    for number in range(3):
        twins.step(random_grads(number, 16.0), 16.0)
    (plan,) = twins.fast._plan.devices
    assert 2 == len(plan.tables.units)


def check_moments(device):
    for dtype in (FLOAT32, FLOAT16):
        twins = Twins(
            lambda params, **more: optim.AdamW(
                params, master_weights=True, moments_dtype=BFLOAT16, **more
            ),
            lambda d=dtype: make_params(d, device=device),
        )
        for number in range(3):
            twins.step(random_grads(number, 16.0), 16.0)


def check_noise(device):
    """Second moments get the same bits from the kernels as by NumPy.

    All numbers of the update are sums of few powers of two: nothing but the moments is
    rounded.
    """
    shapes = [(70, 9), (333,), (3,)]
    for dtype, masters in ((FLOAT32, False), (FLOAT16, True), (BFLOAT16, False)):
        params = make_params(dtype, shapes, device)
        params[0] = torch.nn.Parameter(params[0].detach().t())
        optimizer = optim.AdamW(
            params, betas=(0.5, 0.5), master_weights=masters, moments_dtype=BFLOAT16
        )
        expected = [np.zeros(param.numel(), np.float32) for param in params]
        for step in range(1, 6):
            for number, param in enumerate(params):
                # Seven bits, and fourteen of the square.
                generator = torch.Generator().manual_seed(10 * step + number)
                sizes = torch.randint(64, 128, param.shape, generator=generator)
                grad = torch.empty_like(param).copy_(sizes / 64)
                param.grad = grad
                flat = grad.as_strided((grad.numel(),), (1,)).float().cpu().numpy()
                square = (expected[number] + flat * flat) / 2
                expected[number] = round_stochastically(square, step)
            optimizer.step()
        assert not optimizer._plan.eager
        for param, square in zip(params, expected, strict=True):
            found = optimizer.state[param]["exp_avg_sq"]
            assert found.dtype == BFLOAT16
            found = found.as_strided((found.numel(),), (1,)).float().cpu().numpy()
            np.testing.assert_array_equal(square, found)


def check_rates(device):
    """A schedule, and a learning rate that is a tensor."""
    twins = Twins(optim.AdamW, lambda: make_params(device=device))
    for number in range(3):
        for optimizer in (twins.fast, twins.slow):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        twins.step(random_grads(number))
    rates = []

    def make(params, **more):
        place = "cpu" if "fused" in more else device
        rates.append(torch.tensor(0.5, device=place))
        return optim.SGD(params, lr=rates[-1], momentum=0.5, **more)

    twins = Twins(make, lambda: make_params(device=device))
    for number in range(3):
        for rate in rates:
            rate.fill_(0.5 / (number + 1))
        twins.step(random_grads(number))
    for optimizer in (twins.fast, twins.slow):
        optimizer.param_groups[0]["lr"] = 0.0
    before = copy_tensors(twins.fast)
    twins.step(random_grads(3))
    assert torch.equal(before["0"], tensors_of(twins.fast)["0"])


def check_many(device, count):
    shapes = [(7 + number % 5,) for number in range(count)]
    twins = Twins(optim.AdamW, lambda: make_params(FLOAT32, shapes, device))
    for number in range(2):
        twins.step(random_grads(number))


def check_write_back(device, setting):
    params = make_params(device=device)
    optimizer = setting.ours(params, write_back=True)
    plain = setting.ours(make_params(device=device))
    for number in range(2):
        set_grads(params, number, 8.0)
        before = [param.grad.clone() for param in params]
        set_grads(plain.param_groups[0]["params"], number, 8.0)
        for one in (optimizer, plain):
            one.grad_scale = torch.tensor(8.0, device=device)
            one.found_inf = torch.zeros((), device=device)
            one.step()
        for grad, param in zip(before, params, strict=True):
            assert torch.equal(grad / 8.0, param.grad)
    check_equal(tensors_of(plain), tensors_of(optimizer))


def check_resume(device, setting):
    def make():
        params = make_params(FLOAT16, device=device)
        return setting.ours(params, master_weights=True)

    def train(optimizer, numbers):
        for number in numbers:
            set_grads(optimizer.param_groups[0]["params"], number)
            optimizer.step()

    whole, first, second = make(), make(), make()
    train(whole, range(4))
    train(first, range(2))
    for to, source in zip(
        *(x.param_groups[0]["params"] for x in (second, first)), strict=True
    ):
        to.data.copy_(source)
    second.load_state_dict(first.state_dict())
    train(second, range(2, 4))
    check_equal(tensors_of(whole), tensors_of(second))


def check_scaler(device, setting):
    """A clipped training by the kernels equals the one by torch's functions."""

    def train(**more):
        params = make_params(FLOAT16, shapes=((7, 9), (9,)), device=device)
        params += make_params(FLOAT32, shapes=((3,),), device=device, seed=8)
        optimizer = setting.ours(params, master_weights=True, **more)
        scaler = ls.GradScaler(device, init_scale=2.0**17, growth_interval=3)
        for _ in range(6):
            optimizer.zero_grad()
            loss = sum((param.float() ** 2).sum() for param in params)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert 0 < scaler.skipped_steps < 6
        return optimizer, scaler.get_scale()

    (fast, scale), (slow, other) = train(), train(fused=False)
    assert scale == other
    expected = tensors_of(slow)
    for name, tensor in tensors_of(fast).items():
        if name.endswith("master_param"):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)
        if name.endswith("step"):
            assert expected[name].item() == tensor.item()


def check_accumulated(device, setting, kind):
    """Sums of micro-batches reach the kernels in float32, and nothing is lost."""
    dtype, masters = KINDS[kind]

    def train(**more):
        params = make_params(dtype, [(70,), (5,)], device)
        params += make_params(FLOAT32, [(3,)], device, seed=8)
        optimizer = setting.ours(params, master_weights=masters, **more)
        scaler = ls.GradScaler(device, init_scale=2.0**16)
        for number in range(6):
            scaler.scale(torch.zeros((), device=device))
            for batch in range(1 if number == 3 else 2):
                set_grads(params, 10 * number + batch, 2.0**-10)
                if number != 3:
                    scaler.accumulate(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step.applied
            optimizer.zero_grad()
        return optimizer

    fast, slow = train(), train(fused=False)
    assert not fast._plan.eager
    expected = tensors_of(slow)
    for name, tensor in tensors_of(fast).items():
        unit = 2.0**-18 if tensor.dtype == FLOAT32 else torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(
            tensor.cpu(), expected[name].cpu(), rtol=2 * unit, atol=1e-5
        )


# -- a reference in float64 ------------------------------------------------------------

REFERENCE_BOUND = 8
"""How many units of rounding of the update an update may differ from float64's, besides
one unit of the weight: it is a product of a quotient and a root, of rounded moments."""


def check_reference(device, setting):
    """One step from random weights and moments, next to the same step in float64."""
    rng = np.random.default_rng(0)
    weight, grad = rng.standard_normal((2, 500)).astype(np.float32)
    param = torch.nn.Parameter(torch.tensor(weight, device=device))
    optimizer = setting.ours([param])
    for _ in range(2):
        param.grad = torch.tensor(grad, device=device)
        optimizer.step()
    state = {
        key: value.double().cpu().numpy()
        for key, value in tensors_of(optimizer).items()
    }
    optimizer.step()
    expected = reference_step(setting, state, grad.astype(np.float64))
    actual = param.detach().double().cpu().numpy()
    update = np.abs(expected - state["0"])
    size = np.maximum(np.abs(expected), np.abs(state["0"])).astype(np.float32)
    bound = np.spacing(size) + REFERENCE_BOUND * np.spacing(update.astype(np.float32))
    assert (np.abs(expected - actual) <= bound).all()


def reference_step(setting, state, grad):
    """Return the weights after a step, in float64."""
    group = setting.ours([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    weight = state["0"]
    if group["maximize"]:
        grad = -grad
    rate, decay = group["lr"], group["weight_decay"]
    if setting.name == "SGD":
        grad = grad + decay * weight
        buffer = group["momentum"] * state["0.momentum_buffer"]
        buffer = buffer + (1 - group["dampening"]) * grad
        used = grad + group["momentum"] * buffer if group["nesterov"] else buffer
        return weight - rate * used
    if setting.name == "AdamW":
        weight = weight * (1 - rate * decay)
    else:
        grad = grad + decay * weight
    (beta1, beta2), count = group["betas"], state["0.step"] + 1
    mean = beta1 * state["0.exp_avg"] + (1 - beta1) * grad
    square = beta2 * state["0.exp_avg_sq"] + (1 - beta2) * grad**2
    root = np.sqrt(square / (1 - beta2**count)) + group["eps"]
    return weight - rate / (1 - beta1**count) * mean / root


# -- torch's fused optimizers ----------------------------------------------------------

FUSED = {
    "AdamW": Setting("AdamW", {"lr": 0.01}),
    "AdamW weight_decay=0.1 amsgrad": Setting(
        "AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}
    ),
    "Adam": Setting("Adam", {"lr": 0.01}),
    "Adam weight_decay=0.1": Setting("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD momentum=0.9": Setting("SGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov weight_decay=0.1": Setting(
        "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    ),
}
EXACT = Setting(
    "AdamW", {"lr": 2.0**-7, "betas": (0.5, 0.75), "eps": 2.0**-20, "weight_decay": 0.5}
)
"""All powers of these betas are float32 numbers in the first twelve steps, so torch's
kernel for CUDA has the same scalars as ours."""

FLOAT64_BOUND = 4.0
"""How many units a weight may be away from the float64 step: it is a sum of rounded
terms, divided by a rounded root."""


class Distances(NamedTuple):
    """The largest distances of weights in a training, in units of their dtype."""

    to_fused: float
    """Of ours to torch's fused optimizer."""
    to_float64: float
    """Of ours to the same step in float64."""
    of_fused: float
    """Of torch's fused optimizer to the same step in float64."""
    equal: int
    """How many weights of ours are torch's fused ones bit for bit."""
    count: int
    """Of so many."""

    def merge(self, other):
        """Return the larger distances, and the sums of the counts."""
        distances = map(max, self[:3], other[:3])
        return Distances(*distances, self.equal + other.equal, self.count + other.count)

    def format_share(self):
        return f"{self.equal / self.count:.2%}"


NONE = Distances(0.0, 0.0, 0.0, 0, 0)


class Rivals:
    """Ours, torch's fused optimizer and torch's in float64: each step from one state.

    With masters torch's has float32 weights and the cast gradients.
    """

    def __init__(self, device, setting, kind):
        dtype, self._masters = KINDS[kind]
        shapes = [(60,), (3,)] if device == "cpu" else [(70_000,), (333,), (64, 1024)]
        self._dtype = FLOAT32 if self._masters else dtype
        start = make_params(dtype, shapes, device)
        self._params = {
            "ours": start,
            "fused": copy_params(start, self._dtype),
            "float64": copy_params(start, torch.float64),
        }
        self._optimizers = {
            "ours": setting.ours(start, master_weights=self._masters),
            "fused": setting.torchs(self._params["fused"], fused=True),
            "float64": setting.torchs(self._params["float64"], foreach=False),
        }

    def step(self, number):
        """Take a step; return the distances."""
        self._copy_state()
        before = [weight.clone() for weight in self._weights("fused")]
        means = self._moments("fused")
        set_grads(self._params["ours"], number)
        for name, optimizer in self._optimizers.items():
            pairs = zip(self._params[name], self._params["ours"], strict=True)
            for param, own in pairs:
                param.grad = own.grad.to(param.dtype)
            optimizer.step()
        found = NONE
        for index, (old, mean) in enumerate(zip(before, means, strict=True)):
            found = found.merge(self._measure(index, old, mean))
        return found

    def _measure(self, index, old, mean):
        """Return the distances of one weight."""
        ours, fused, exact = (
            self._weights(name)[index].double() for name in self._params
        )
        optimizer = self._optimizers["float64"]
        group, param = optimizer.param_groups[0], self._params["float64"][index]
        grad = param.grad.abs() + group["weight_decay"] * old.double().abs()
        terms = [grad, mean, self._moments("float64")[index]]
        update = largest_update(group, optimizer.state[param], terms)
        unit = unit_of(self._dtype, old, exact, update).double()

        def distance(a, b):
            return ((a - b).abs() / unit).max().item()

        return Distances(
            distance(ours, fused),
            distance(ours, exact),
            distance(fused, exact),
            int((ours == fused).sum()),
            ours.numel(),
        )

    def _weights(self, name):
        """Return what is updated: masters or parameters."""
        params = self._params[name]
        if name != "ours" or not self._masters:
            return [param.detach() for param in params]
        state = self._optimizers[name].state
        return [state[param]["master_param"] for param in params]

    def _moments(self, name):
        """Return copies of the first moments; zeros before the first step."""
        state = self._optimizers[name].state
        found = []
        for param in self._params[name]:
            kept = state.get(param, {})
            mean = kept.get("exp_avg", kept.get("momentum_buffer"))
            mean = torch.zeros_like(param) if mean is None else mean.clone()
            found.append(mean.detach())
        return found

    def _copy_state(self):
        """Continue from the weights and the state of torch's fused optimizer."""
        kept = self._optimizers["fused"].state
        if not kept:
            return
        for name in ("ours", "float64"):
            optimizer = self._optimizers[name]
            weights = self._weights(name)
            for weight, param, other in zip(
                weights, self._params[name], self._params["fused"], strict=True
            ):
                weight.copy_(other)
                for key, value in kept[other].items():
                    if isinstance(value, torch.Tensor):
                        optimizer.state[param][key].copy_(value)


def copy_params(params, dtype):
    return [torch.nn.Parameter(param.detach().clone().to(dtype)) for param in params]


def measure_fused(device, setting, kind, steps):
    """Return the largest distances in a training."""
    rivals = Rivals(device, setting, kind)
    found = NONE
    for number in range(steps):
        found = found.merge(rivals.step(number))
    return found


def check_fused(device, name, kind, steps):
    """Every step near the float64 one, whatever torch's fused one does.

    torch's kernel for CUDA computes the bias corrections in float32, which leaves them
    few digits in the first steps; on a CPU it computes them in float64.

    Returns:
        A row of the table of distances.
    """
    found = measure_fused(device, FUSED[name], kind, steps)
    row = (
        f"| {name} | {kind} | {found.to_fused:.2f} | {found.to_float64:.2f} "
        f"| {found.of_fused:.2f} | {found.format_share()} |"
    )
    assert found.to_float64 <= FLOAT64_BOUND, row
    return row


def check_same_scalars(device):
    """Equal to torch's fused AdamW to one unit where both have the same scalars."""
    found = measure_fused(device, EXACT, "float32", 12)
    assert found.to_fused <= 1.0, str(found)
    return f"{found.to_fused:.2f} units, {found.format_share()} of the weights equal"


# -- in a CUDA graph, on a GPU ---------------------------------------------------------


def capture(step):
    """Return the replay of a step, after a few that are taken as they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def take_first(step):
    """Return a step after as many as `capture` takes."""
    for _ in range(3):
        step()
    return step


def check_whole_step(device, masters):
    """Forward to update, captured on a GPU: other rates, and a step that is skipped."""
    found = {}
    for prepare in (take_first, capture if device == "cuda" else take_first):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 40), torch.nn.GELU(), torch.nn.Linear(40, 3))
        model = torch.nn.Sequential(*layers).to(device)
        if masters:
            ls.to_float16(model)
        optimizer = optim.AdamW(model.parameters(), lr=0.1, master_weights=masters)
        scaler = ls.GradScaler(device, init_scale=2.0**10, growth_interval=4)
        rows, factor = torch.ones(8, 16, device=device), torch.ones((), device=device)

        def step(model=model, optimizer=optimizer, scaler=scaler, own=(rows, factor)):
            optimizer.zero_grad()
            loss = model(own[0]).float().square().mean()
            scaler.scale(loss * own[1]).backward()
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()

        take_step = prepare(step)
        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            rows.copy_(torch.randn(8, 16, generator=generator))
            factor.fill_(math.inf if number == 3 else 1.0)
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            before = copy_tensors(optimizer)
            optimizer.copy_settings()
            take_step()
            after = tensors_of(optimizer)
            if number == 3:
                check_equal(before, after)
            else:
                names = [name for name in after if name.isdigit()]
                assert not any(torch.equal(before[x], after[x]) for x in names)
        counts = scaler.total_steps, scaler.skipped_steps, scaler.get_scale()
        found.setdefault("counts", []).append(counts)
        found.setdefault("weights", []).append(copy_tensors(optimizer))
    assert [(11, 1, 2.0**11)] * 2 == found["counts"]
    plain, other = found["weights"]
    for name, expected in plain.items():
        torch.testing.assert_close(other[name], expected, rtol=1e-3, atol=1e-3)


# -- the update alone in a CUDA graph, on a GPU ----------------------------------------


def check_graph(masters):
    """A captured step, replayed with other learning rates and a skipped step."""
    dtype = FLOAT16 if masters else FLOAT32

    def make():
        params = make_params(dtype, [(4097,), (3, 5)], "cuda")
        return optim.AdamW(params, lr=0.1, master_weights=masters)

    captured, plain = make(), make()
    flag, scale = torch.zeros((), device="cuda"), torch.full((), 4.0, device="cuda")
    for optimizer in (captured, plain):
        set_grads(Twins.params(optimizer), 0, 4.0)
        optimizer.grad_scale, optimizer.found_inf = scale, flag
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    fixed = [param.grad for param in Twins.params(captured)]
    for number in range(1, 6):
        for optimizer in (captured, plain):
            optimizer.param_groups[0]["lr"] = 0.1 / number
        flag.fill_(float(number == 3))
        set_grads(Twins.params(plain), number, 4.0)
        for grad, param in zip(fixed, Twins.params(plain), strict=True):
            grad.copy_(param.grad)
        captured.copy_settings()
        graph.replay()
        plain.step()
        check_equal(tensors_of(plain), tensors_of(captured))
    assert 5.0 == captured.state[Twins.params(captured)[0]]["step"].item()


def check_large(device):
    size = 2**31 + 5
    param = torch.nn.Parameter(torch.ones(size, dtype=FLOAT16, device=device))
    optimizer = optim.AdamW(
        [param], lr=0.5, weight_decay=0.0, master_weights=True, moments_dtype=BFLOAT16
    )
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert bool((param[-7:] == 0.5).all())
    assert bool((param[:7] == 0.5).all())


def main(arguments: list[str]) -> None:
    """Run all checks on a GPU, print what failed."""
    device = "cuda"
    failed, begin, count = [], time.perf_counter(), 0
    for name, check in checks(
        device, block=2048, many=2000, steps=200, large="--large" in arguments
    ):
        count += 1
        try:
            found = check()
            if found:
                is_row = str(found).startswith("|")
                print(found if is_row else f"{name}: {found}")  # noqa: T201
        except Exception as error:  # noqa: BLE001  # all of them are reported
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}")  # noqa: T201
    seconds = time.perf_counter() - begin
    passed = count - len(failed)
    print(f"{passed} of {count} checks passed in {seconds:.0f} s")  # noqa: T201
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
