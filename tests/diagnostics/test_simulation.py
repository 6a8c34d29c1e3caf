"""The simulation: the same as stepping, whatever the policy."""

import random
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.limits import HANG_SECONDS
from helpers.recordings import tensorflow_contrib
from helpers.sequences import overflow_pattern
from helpers.traces import read, replay

import lossscale.numpy as ls
from lossscale import Dynamic, Fixed, Headroom, Saturation, ScaleState, Signal, presets
from lossscale.diagnostics import simulate
from lossscale.diagnostics import simulation as module
from lossscale.errors import SettingError, SettingTypeError


def small(name):
    preset = presets.PRESETS[name].policy
    return presets.get(name, growth_interval=3, init_scale=max(8.0, preset.min_scale))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_goes_as_it_does_step_by_step(name):
    rng = random.Random(name)
    policy = small(name)
    for _ in range(10):
        flags = overflow_pattern(rng, 400)
        (result,) = simulate([policy], np.array(flags))
        expected = replay(policy, flags)
        steps = np.arange(1, 401)
        assert [s.scale for s in expected] == result.scale_after(steps).tolist()
        assert expected[-1] == ScaleState(*(value.item() for value in result.final))
        assert flags.count(False) == result.skipped


def test_the_recorded_manager_is_simulated_bit_for_bit():
    for row in read("tensorflow/unit_exponential.tf1.15.5.eager"):
        policy = tensorflow_contrib(row["config"])
        (result,) = simulate([policy], np.array(row["finite"]))
        steps = np.arange(1, len(row["scale"]) + 1)
        assert row["scale"] == result.scale_after(steps).tolist()


def test_growths_and_back_offs_are_counted():
    flags = np.array([True, True, False, True, True, True, True])
    (result,) = simulate([Dynamic(growth_interval=2)], flags)
    assert (3, 1) == (result.growths, result.backoffs)
    assert [0, 2, 3, 5, 7] == result.steps.tolist()


@dataclass(frozen=True)
class AlwaysDown:
    def init(self):
        return ScaleState(1024.0, 0, 0)

    def step(self, state, signal, *, where):
        return state._replace(scale=where(signal.finite, state.scale, state.scale / 2))


def test_policies_of_any_kind_run_side_by_side():
    flags = np.array([True, False, True])
    results = simulate([Fixed(8.0), AlwaysDown(), Dynamic()], flags)
    assert [8.0, 512.0, 32768.0] == [r.final.scale.item() for r in results]


@pytest.mark.parametrize("policy", [Headroom(window=9), Saturation(doubling=3)])
def test_policies_that_read_magnitudes_are_given_them(policy):
    """By hand: a signal of every step, with the largest gradient still scaled."""
    magnitudes = 1.3 * 2.0 ** np.random.default_rng(0).integers(-6, 4, 60)
    state, scales = ls.init(policy), []
    for magnitude in magnitudes:
        amax = np.float32(magnitude * state.scale)
        state = ls.update(policy, state, Signal(amax <= 65504.0, amax=amax))
        scales.append(state.scale)
    flags = np.ones(60, bool)
    (result,) = simulate([policy], flags, magnitudes=magnitudes)
    assert scales == result.scale_after(np.arange(1, 61)).tolist()
    traced = module.trace(policy, flags, magnitudes=magnitudes)
    assert scales == [state.scale for _, state in traced]


def test_progress_is_reported_once_for_each_policy():
    calls = []
    simulate([Dynamic(), Fixed()], np.ones(3, bool), on_policy=lambda: calls.append(1))
    assert 2 == len(calls)


@pytest.mark.parametrize("wrong", [[[True]], [1, 0], ["yes"], 3])
def test_a_sequence_of_anything_but_booleans_is_refused(wrong):
    with pytest.raises(SettingError, match="one row of booleans"):
        simulate([Dynamic()], wrong)


LONG = module.WORTH_COMPILING + 1


def test_compiled_and_plain_steps_give_the_same():
    pytest.importorskip("numba", reason="numba is not installed")
    flags = np.random.default_rng(0).random(3000) > 0.1
    policies = [small(name) for name in presets.PRESETS]
    plain = simulate(policies, flags)
    compiled = simulate(policies, np.concatenate([flags, np.ones(LONG, bool)]))
    for short, long in zip(plain, compiled, strict=True):
        steps = np.arange(3001)
        assert np.array_equal(short.scale_after(steps), long.scale_after(steps))
        assert short.skipped == long.skipped


@pytest.mark.parametrize("worth", [0, 10**9], ids=["compiled", "plain"])
@pytest.mark.parametrize("name", ["deepspeed", "tensorflow_contrib"])
def test_a_run_across_chunks_is_the_run_step_by_step(name, worth, monkeypatch):
    if not worth:
        pytest.importorskip("numba", reason="numba is not installed")
    flags = overflow_pattern(random.Random(0), 400)
    expected = [state.scale for state in replay(small(name), flags)]
    monkeypatch.setattr(module, "_CHUNK", 7)
    monkeypatch.setattr(module, "WORTH_COMPILING", worth)
    (result,) = simulate([small(name)], np.array(flags))
    assert expected == result.scale_after(np.arange(1, 401)).tolist()


def test_a_short_run_does_not_load_numba():
    program = (
        "import sys, numpy as np; from lossscale import Dynamic;"
        "from lossscale.diagnostics import simulate;"
        "simulate([Dynamic()] * 10, np.ones(10_000, bool));"
        "sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_SECONDS)


def test_a_short_run_without_numba_does_not_warn(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    module._compile_loop.cache_clear()
    simulate([Dynamic()], np.ones(100, bool))
    module._compile_loop.cache_clear()


def test_a_long_run_without_numba_warns_and_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(module, "WORTH_COMPILING", 100)
    module._compile_loop.cache_clear()
    flags = np.random.default_rng(0).random(200) > 0.1
    with pytest.warns(RuntimeWarning, match=r"pip install 'lossscale\[simulate\]'"):
        (slow,) = simulate([small("torch")], flags)
    module._compile_loop.cache_clear()
    expected = [state.scale for state in replay(small("torch"), flags.tolist())]
    assert expected == slow.scale_after(np.arange(1, 201)).tolist()


def test_an_interrupt_inside_numba_is_an_interrupt():
    inner = SystemError()
    inner.__cause__ = KeyboardInterrupt()

    def interrupted():
        raise SystemError from inner

    with pytest.raises(KeyboardInterrupt):
        module._make_interruptible(interrupted)()


def test_another_error_of_the_interpreter_is_not_taken_for_an_interrupt():
    def broken():
        raise SystemError

    with pytest.raises(SystemError):
        module._make_interruptible(broken)()


def trained(policy, gradients):
    """Return the flags and scales of a closed loop: float16 gradients, NumPy's rule.

    The gradients do not depend on the scale, and whether they overflow does.
    """
    state = ls.init(policy)
    finite, scales = [], []
    for gradient in gradients:
        with np.errstate(over="ignore"):
            scaled = np.float16(gradient * float(state.scale))
        _, signal = ls.unscale(scaled, state)
        state = ls.update(policy, state, signal)
        finite.append(bool(signal.finite))
        scales.append(state.scale.item())
    return finite, scales


def gradients_of_a_run(count, seed=0):
    """Return magnitudes that drift over the steps, with large ones now and then."""
    rng = np.random.default_rng(seed)
    drift = 2.0 ** (-10 + 6 * np.sin(np.arange(count) / 300))
    return np.float32(drift * rng.lognormal(0, 0.7, count))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_with_magnitudes_every_policy_goes_as_in_training(name):
    policy = presets.get(name, growth_interval=20)
    gradients = gradients_of_a_run(1500)
    finite, scales = trained(policy, gradients)
    # Recorded by a training with no scale at all.
    recorded = np.ones(1500, bool)
    (result,) = simulate([policy], recorded, magnitudes=gradients)
    assert scales == result.scale_after(np.arange(1, 1501)).tolist()
    assert finite.count(False) == result.skipped


def test_without_magnitudes_it_does_not():
    """Why they are asked for: the overflows of one policy are not those of another."""
    gradients = gradients_of_a_run(1500)
    recorded, _ = trained(Dynamic(growth_interval=20), gradients)
    policy = presets.get("megatron", growth_interval=20)
    _, scales = trained(policy, gradients)
    (replayed,) = simulate([policy], np.array(recorded))
    assert scales[-1] != replayed.final.scale


def test_a_magnitude_that_is_not_known_leaves_the_flag():
    flags = np.array([True, False, True])
    unknown = [np.nan, np.nan, 1.0]
    (result,) = simulate([Dynamic(init_scale=2.0**16)], flags, magnitudes=unknown)
    assert [65536.0, 32768.0, 32768.0] == result.scale_after([1, 2, 3]).tolist()


def test_a_magnitude_that_is_infinite_overflows_at_every_scale():
    flags = np.ones(200, bool)
    (result,) = simulate([Dynamic()], flags, magnitudes=np.full(200, np.inf))
    assert (200, 2.0**-126) == (result.skipped, result.final.scale)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 65504.0), ("bfloat16", 2.0**127 * (2 - 2**-7)), ("float32", None)],
)
def test_the_largest_number_of_the_dtype_does_not_overflow(dtype, largest):
    largest = largest or float(np.finfo(np.float32).max)
    policy = Dynamic(init_scale=1.0)
    above = float(np.nextafter(largest, np.inf))
    for magnitude, skipped in ((largest, 0), (above, 1)):
        (result,) = simulate([policy], [True], magnitudes=[magnitude], dtype=dtype)
        assert skipped == result.skipped


def test_a_fixed_scale_and_a_policy_of_your_own_see_the_magnitudes():
    flags, magnitudes = np.ones(3, bool), [1.0, 100.0, 1.0]
    fixed, own = simulate([Fixed(1024.0), AlwaysDown()], flags, magnitudes=magnitudes)
    assert (1, 1) == (fixed.skipped, own.skipped)
    assert 512.0 == own.final.scale


@pytest.mark.parametrize(
    ("magnitudes", "dtype", "message"),
    [
        ([1.0], "float16", "as many magnitudes as steps"),
        ([1.0, -1.0], "float16", "0 or more"),
        (["a", "b"], "float16", "row of numbers"),
        ([1.0, 1.0], "float15", "dtype must be"),
    ],
)
def test_magnitudes_that_cannot_be_used_are_refused(magnitudes, dtype, message):
    with pytest.raises(SettingError, match=message):
        simulate([Dynamic()], [True, True], magnitudes=magnitudes, dtype=dtype)


def test_what_is_no_list_of_policies_is_refused():
    for wrong, words in (
        (Dynamic(), r"in a list; got Dynamic\(.*\. Write \[Dynamic\(\.\.\.\)\]"),
        ("torch", r"got 'torch'\. .*presets\.get\('torch'\)"),
        ([Dynamic(), 8.0], r"got 8\.0\."),
        ([Dynamic], "got <class"),
        (None, r"got None\."),
    ):
        with pytest.raises(SettingTypeError, match=words):
            simulate(wrong, [True])
    assert 2 == len(simulate((Fixed(scale) for scale in (2.0, 4.0)), [True]))
