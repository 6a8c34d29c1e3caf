"""`GradScaler.attempts`: the first batch again, and no other."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale import AutoStart, Dynamic, Headroom, presets  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402


class Loop:
    """One float16 weight whose gradient is what a batch says."""

    def __init__(self, policy, **options):
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=2.0**-10)
        self.scaler = ls.GradScaler("cpu", policy=policy, **options)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = (self.weight.half() * batch).float().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, batches):
        """Return how many attempts each batch took."""
        return [
            sum(self.step(batch) is None for _ in self.scaler.attempts())
            for batch in batches
        ]


def test_the_first_batch_is_tried_until_it_is_finite_and_none_is_lost():
    loop = Loop(AutoStart())
    assert [4, 1, 1] == loop.train([256.0] * 3)
    assert 1.0 - 3 * 0.25 == loop.weight.item()
    assert 16.0 == loop.scaler.get_scale()


@pytest.mark.parametrize("exponent", [24, 32, 48])
def test_from_a_start_that_is_far_too_high_no_batch_is_lost_either(exponent):
    loop = Loop(AutoStart(Dynamic(init_scale=2.0**exponent)))
    first, *others = loop.train([256.0] * 3)
    assert first <= 5
    assert [1, 1] == others
    assert 1.0 - 3 * 0.25 == loop.weight.item()
    assert 16.0 == loop.scaler.get_scale()


def test_after_the_start_an_overflow_costs_its_batch_and_nothing_waits(monkeypatch):
    loop = Loop(AutoStart())
    loop.train([256.0])

    def refuse(*_):
        message = "the host asked for the state"
        raise AssertionError(message)

    monkeypatch.setattr(ls.GradScaler, "state", property(refuse))
    assert [1, 1] == loop.train([65504.0, 256.0])
    monkeypatch.undo()
    assert 0.5 == loop.weight.item()


def test_a_batch_without_gradients_is_not_repeated():
    loop = Loop(AutoStart(Dynamic(init_scale=2.0**12)))
    assert [1, 3] == loop.train([0.0, 256.0])


def test_a_batch_that_no_scale_helps_is_given_up_after_the_tries():
    loop = Loop(AutoStart())
    assert [5, 1] == loop.train([float("inf"), 2.0**-4])
    assert 2.0**16 == loop.scaler.get_scale()
    assert 1.0 > loop.weight.item() > 0.9


def test_an_attempt_that_ends_without_update_is_the_last():
    loop = Loop(AutoStart())
    assert [1] == list(loop.scaler.attempts())


def test_a_closure_is_called_again():
    loop = Loop(AutoStart())

    def closure():
        loop.optimizer.zero_grad()
        loss = (loop.weight.half() * 256.0).float().sum()
        loop.scaler.scale(loss).backward()
        return loss

    attempts = 0
    for attempts in loop.scaler.attempts():  # noqa: B007  # read below
        loop.scaler.step(loop.optimizer, closure)
        loop.scaler.update()
    assert (4, 0.75) == (attempts, loop.weight.item())


def test_a_loaded_search_goes_on():
    first = Loop(AutoStart())
    first.step(256.0)
    second = Loop(AutoStart())
    second.train([256.0])
    second.scaler.load_state_dict(first.scaler.state_dict())
    assert [3] == second.train([256.0])
    assert [1] == copy.deepcopy(second).train([256.0])


def test_auto_is_short_for_the_policy_with_torchs_other_numbers():
    scaler = ls.GradScaler("cpu", init_scale="auto", growth_interval=7)
    loop = Loop(None, init_scale="auto", growth_interval=7)
    assert [4, 1] == loop.train([256.0] * 2)
    assert AutoStart(presets.get("torch", growth_interval=7)) == scaler.policy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"init_scale": "autos"},
            "init_scale must be a number or \"auto\", got 'autos'",
        ),
        ({"init_scale": "auto", "policy": AutoStart()}, "together with init_scale"),
        ({"init_scale": "auto", "growth_factor": 0.5}, "growth_factor must be"),
    ],
)
def test_auto_comes_without_a_policy_and_with_valid_numbers(options, expected):
    with pytest.raises(SettingError, match=expected):
        ls.GradScaler("cpu", **options)


def test_a_disabled_scaler_makes_one_attempt():
    scaler = ls.GradScaler("cpu", enabled=False)
    assert [1] == list(scaler.attempts())


@pytest.mark.parametrize("policy", [Dynamic(), Headroom(), None])
def test_a_policy_without_a_search_is_an_error_that_says_what_to_type(policy):
    loop = Loop(policy)
    with pytest.raises(SettingError, match=r"policy=lossscale.AutoStart\(...\)"):
        next(loop.scaler.attempts())
