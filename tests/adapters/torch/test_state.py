"""State dicts and pickles, compared with torch's."""

import copy
import math
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.torch_steps import (  # noqa: E402
    CLASSES,
    both,
    init_scale_tensor,
    one_weight,
    result_or_error,
    step,
)

import lossscale.torch as ls  # noqa: E402
from lossscale import (  # noqa: E402
    AutoStart,
    Dynamic,
    Fixed,
    Headroom,
    from_portable,
    to_portable,
)
from lossscale.errors import StateError  # noqa: E402

TORCHS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)
OURS = ("bad_steps", "total_steps", "skipped_steps", "consecutive_skips")


def moved(cls, **settings):
    """Return a scaler that has taken four steps, two of them bad."""
    scaler = cls("cpu", 64.0, 4.0, 0.25, 3, **settings)
    weight, optimizer = one_weight()
    for gradient in (1.0, math.inf, math.nan, 1.0):
        step(scaler, optimizer, gradient, [weight])
    return scaler


def goes_on(scaler):
    """Return scale and tracker over the next steps."""
    weight, optimizer = one_weight()
    found = []
    for gradient in (1.0, 1.0, 1.0, math.inf, 1.0):
        step(scaler, optimizer, gradient, [weight])
        found.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return found


# State dicts


def test_a_state_has_torchs_five_entries_and_four_of_ours():
    state = moved(ls.GradScaler).state_dict()
    assert [*TORCHS, *OURS] == list(state)
    torchs = moved(torch.amp.GradScaler).state_dict()
    assert torchs == {name: state[name] for name in TORCHS}
    assert [type(torchs[name]) for name in TORCHS] == [type(state[n]) for n in TORCHS]
    assert (0, 4, 2, 0) == tuple(state[name] for name in OURS)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("source", CLASSES)
@pytest.mark.parametrize("target", CLASSES)
def test_each_class_goes_on_from_the_others_state(source, target, lazy):
    state = moved(CLASSES[source]).state_dict()
    scaler = CLASSES[target]("cpu", init_scale=3.0)
    if not lazy:
        init_scale_tensor(scaler)
    scaler.load_state_dict(copy.deepcopy(state))
    assert {name: state[name] for name in TORCHS} == {
        name: value for name, value in scaler.state_dict().items() if name in TORCHS
    }
    assert goes_on(moved(torch.amp.GradScaler)) == goes_on(scaler)


def test_counters_survive_and_torchs_state_starts_them_at_0():
    scaler = ls.GradScaler("cpu")
    scaler.load_state_dict(moved(ls.GradScaler).state_dict())
    assert (4, 2, 0) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.consecutive_skips,
    )
    scaler.load_state_dict(moved(torch.amp.GradScaler).state_dict())
    assert (0, 0, 0) == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.consecutive_skips,
    )


def test_hysteresis_survives():
    policy = Dynamic(init_scale=8.0, hysteresis=3)
    weight, optimizer = one_weight()
    scaler = ls.GradScaler("cpu", policy=policy)
    for _ in range(2):
        step(scaler, optimizer, math.inf, [weight])
    again = ls.GradScaler("cpu", policy=policy)
    again.load_state_dict(scaler.state_dict())
    for one in (scaler, again):
        step(one, optimizer, math.inf, [weight])
        assert (4.0, 0) == (one.get_scale(), int(one.state.bad_steps))


@both
def test_an_empty_state_is_refused_in_torchs_words(cls):
    text = (
        "The source state dict is empty, possibly because it was saved "
        "from a disabled instance of GradScaler."
    )
    found = result_or_error(lambda: cls("cpu").load_state_dict({}))
    assert (RuntimeError, text) == found


@both
@pytest.mark.parametrize("name", TORCHS)
def test_a_missing_entry_is_a_key_error(cls, name):
    state = moved(cls).state_dict()
    del state[name]
    with pytest.raises(KeyError, match=name):
        init_scale_tensor(cls("cpu")).load_state_dict(state)


@pytest.mark.parametrize(
    "entries",
    [{"scale": 0.0}, {"scale": math.nan}, {"scale": -1.0}, {"_growth_tracker": -1}],
)
def test_an_invalid_state_is_refused_and_nothing_changes(entries):
    scaler = init_scale_tensor(moved(ls.GradScaler))
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict({**before, **entries})
    assert before == scaler.state_dict()


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(init_scale=24.0),
        Fixed(24.0),
    ],
)
def test_the_state_of_a_policy_is_loaded_by_torch_and_by_ours(policy):
    state = ls.GradScaler("cpu", policy=policy).state_dict()
    for cls in CLASSES.values():
        scaler = cls("cpu")
        scaler.load_state_dict(state)
        assert scaler.get_scale() == 24.0


def test_a_state_of_torch_whose_scale_was_frozen_is_loaded():
    """torch's setters take factors of 1, with which the scale stays where it is."""
    torchs = torch.amp.GradScaler("cpu", init_scale=24.0)
    torchs.set_growth_factor(1.0)
    scaler = ls.GradScaler("cpu")
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.get_scale() == 24.0


@pytest.mark.parametrize("growth_interval", [0, -3, 2**31, 2**40])
def test_an_interval_that_never_comes_round_is_loaded_and_saved_as_it_is(
    growth_interval,
):
    state = torch.amp.GradScaler("cpu", growth_interval=growth_interval).state_dict()
    scaler = ls.GradScaler("cpu")
    scaler.load_state_dict(state)
    assert growth_interval == scaler.state_dict()["growth_interval"]
    assert growth_interval == scaler.get_growth_interval()


def test_policy_and_state_travel_to_other_libraries():
    scaler = moved(ls.GradScaler)
    policy, state = from_portable(to_portable(scaler.policy, scaler.state))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (
        float(state.scale),
        int(state.good_steps),
    )
    assert (4.0, 0.25, 3) == (
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval,
    )


# Pickles


def pickled(scaler):
    return pickle.loads(pickle.dumps(scaler))  # noqa: S301


@both
@pytest.mark.parametrize("through", [pickled, copy.deepcopy])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_pickle_goes_on_where_the_original_was(cls, through, lazy):
    scaler = cls("cpu", 3.0, 4.0, 0.5, 2) if lazy else moved(cls)
    again = through(scaler)
    assert type(again) is cls
    assert scaler.state_dict() == again.state_dict()
    assert (None, None) == (again._scale, again._growth_tracker)
    assert again.scale(torch.tensor([2.0])).item() == 2.0 * scaler.get_scale()
    assert goes_on(scaler) == goes_on(again)


@both
def test_a_disabled_one_is_pickled(cls):
    assert pickled(cls("cpu", enabled=False)).is_enabled() is False


@both
@pytest.mark.parametrize("call", ["unscale_", "step", "_found_inf_per_device"])
def test_within_an_iteration_pickling_is_refused_in_torchs_words(cls, call):
    weight, optimizer = one_weight()
    weight.grad = torch.ones(1)
    scaler = init_scale_tensor(cls("cpu"))
    getattr(scaler, call)(optimizer)
    text = (
        "A GradScaler instance may only be pickled at the beginning "
        "of an iteration, or at the end after scaler.update()."
    )
    assert (AssertionError, text) == result_or_error(lambda: pickle.dumps(scaler))


def test_a_pickle_keeps_policy_settings_and_counters():
    policy = Dynamic(init_scale=8.0, hysteresis=2)
    weight, optimizer = one_weight()
    scaler = ls.GradScaler(
        "cpu",
        policy=policy,
        module=torch.nn.Linear(1, 1),
        max_consecutive_skips=3,
        on_collapse="raise",
    )
    for gradient in (1.0, math.inf):
        step(scaler, optimizer, gradient, [weight])
    again = pickled(scaler)
    assert (policy, 2, 1, 1) == (
        again.policy,
        again.total_steps,
        again.skipped_steps,
        again.consecutive_skips,
    )
    assert again.last_step is None
    assert int(again.state.bad_steps) == 1
    step(again, optimizer, math.inf, [weight])
    assert again.get_scale() == 4.0


def test_a_pickle_leaves_out_an_observer_that_cannot_be_pickled():
    """Neither names nor reports are kept; an observer is no state either."""
    scaler = ls.GradScaler("cpu", on_step=lambda _: None)
    assert scaler.state_dict() == pickled(scaler).state_dict()


@pytest.mark.parametrize("name", OURS[1:])
@pytest.mark.parametrize("wrong", [2**40, -5, 1.5, None, "x", True])
def test_an_invalid_counter_is_refused_and_nothing_is_taken(name, wrong):
    for scaler in (ls.GradScaler("cpu"), init_scale_tensor(ls.GradScaler("cpu"))):
        before = scaler.state_dict()
        with pytest.raises(StateError, match=name):
            scaler.load_state_dict(before | {"scale": 4.0, name: wrong})
        assert before == scaler.state_dict()


def test_a_policy_keeps_its_numbers_when_a_state_of_others_is_loaded():
    policy = Dynamic(growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    scaler = ls.GradScaler("cpu", policy=policy)
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert (4.0, 0.25, 7) == (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


def test_a_divisor_is_shown_as_the_factor_that_it_is():
    scaler = ls.GradScaler(
        "cpu", policy=Dynamic(growth_factor=3.0, backoff_divisor=3.0)
    )
    assert scaler.get_backoff_factor() == 1.0 / 3.0
    assert scaler.state_dict()["backoff_factor"] == 1.0 / 3.0


@pytest.mark.parametrize("make", [ls.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("policy", [Headroom(), AutoStart()])
def test_a_scaler_without_the_policy_goes_on_by_its_rule(make, policy):
    saved = ls.GradScaler("cpu", policy=policy).state_dict()
    scaler = make("cpu")
    scaler.load_state_dict(saved)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = scaler.get_scale()
    scaler.scale(weight.sum()).backward()
    weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert before / 2 == scaler.get_scale()


def test_a_shallow_copy_counts_by_itself():
    scaler = ls.GradScaler("cpu", on_no_gradients="ignore")
    scaler.scale(torch.ones(()))
    scaler.update()
    other = copy.copy(scaler)
    other.scale(torch.ones(()))
    other.update()
    assert (1, 2) == (scaler.total_steps, other.total_steps)
