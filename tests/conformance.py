"""What every framework's adapter must do. Subclass, describe the framework, done:

    class TestNumpy(FunctionalConformance, ClassicConformance):
        framework = Framework(lossscale.numpy, array=np.asarray, numpy=np.asarray)

The oracles are NumPy's own arithmetic, the recorded originals in tests/data and values
written down here; the adapter under test is never its own witness. A framework that
compiles gives `compile`: scaling, unscaling, updates, `select` and the training loop
then run through it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import recordings
from helpers.sequences import overflow_pattern
from helpers.traces import read

from lossscale import (
    AboveEdge,
    AutoStart,
    Dynamic,
    Fixed,
    Headroom,
    Histogram,
    LogMax,
    OverflowRate,
    RisingFloor,
    Saturation,
    ScaleState,
    Signal,
    WindowFollowsScale,
    from_portable,
    presets,
    to_portable,
)
from lossscale.errors import GradientError, LossScaleError, StructureError

FLOAT32_MAX = float(np.finfo(np.float32).max)
TOGETHER = 9
"""How many rows one compiled function updates; a compiler takes longer for more."""


@dataclass(frozen=True)
class Framework:
    """How the suite speaks to a framework."""

    module: Any
    """The adapter under test."""
    array: Callable[[np.ndarray], Any]
    """Makes the framework's array of a NumPy one, of the same dtype."""
    numpy: Callable[[Any], np.ndarray]
    """Makes a NumPy array of the framework's."""
    dtypes: tuple[str, ...] = ("float16", "float32", "float64")
    """The gradient dtypes that the framework has here."""
    complex: bool = False
    """Whether complex gradients are taken; refused otherwise."""
    compile: Callable[[Callable], Callable] = lambda function: function
    """Compiles a function of arrays, where the framework does that."""
    shares_compiled: bool = True
    """Whether one compiled function serves all tests; torch.compile has a limit of
    shapes for one."""


@cache
def compile_unscale(framework, measure):
    """Return the compiled function; compiled once for each shape, for all tests."""
    return framework.compile(
        lambda tree, state: framework.module.unscale(tree, state, measure=measure)
    )


class Layer(NamedTuple):
    """A NamedTuple among the gradients."""

    kernel: Any
    bias: Any


class Notes:
    """An optimizer that writes down what it is asked to apply."""

    fails = False

    def __init__(self):
        self.applied = []

    def compute_gradients(self, loss, var_list=None):
        return [(loss, variable) for variable in var_list]

    def apply_gradients(self, grads_and_vars):
        if self.fails:
            message = "no device"
            raise OSError(message)
        self.applied.append([variable for _, variable in grads_and_vars])


def sampled(file, first):
    """Return some random traces whose first scale a policy of ours can start with."""
    rows = [
        row
        for row in read(file)
        if row["name"].startswith("random")
        and 1 <= float(row["config"][first]) <= FLOAT32_MAX
    ]
    return random.Random(3).sample(rows, 25)


class FunctionalConformance:
    """The functional API."""

    framework: Framework

    def arrays(self, tree):
        """Make the framework's arrays of the NumPy arrays in a nested structure."""
        if tree is None:
            return None
        if isinstance(tree, dict):
            return {key: self.arrays(value) for key, value in tree.items()}
        if isinstance(tree, Layer):
            return Layer(*map(self.arrays, tree))
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self.arrays, tree))
        return self.framework.array(np.asarray(tree))

    def state(self, scale, good=0, bad=0):
        return self.framework.module.init(Dynamic(), ScaleState(scale, good, bad))

    def unscale(self, grads, scale, measure=()):
        """Run the function on NumPy gradients, compiled where that is possible."""
        shared = self.framework.shares_compiled
        make = compile_unscale if shared else compile_unscale.__wrapped__
        run = make(self.framework, measure)
        return run(self.arrays(grads), self.state(scale))

    def finite(self, grads, scale=1.0):
        return bool(self.framework.numpy(self.unscale(grads, scale)[1].finite))

    def plain(self, state):
        return tuple(self.framework.numpy(value).item() for value in state)

    def test_the_first_state_is_float32_int32_int32(self):
        state = self.framework.module.init(Dynamic(init_scale=1024.0))
        values = [self.framework.numpy(value) for value in state]
        assert ["float32", "int32", "int32"] == [str(v.dtype) for v in values]
        assert (1024.0, 0, 0) == self.plain(state)

    def test_a_state_to_go_on_from_is_taken(self):
        assert (8.0, 3, 1) == self.plain(self.state(8.0, 3, 1))

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e39])
    def test_a_broken_state_to_go_on_from_is_refused(self, scale):
        with pytest.raises(LossScaleError):
            self.framework.module.init(Dynamic(), ScaleState(scale, 0, 0))

    def test_a_float16_loss_is_scaled_in_float32(self):
        loss = self.framework.array(np.asarray(2.0, np.float16))
        run = self.framework.compile(self.framework.module.scale)
        scaled = self.framework.numpy(run(loss, self.state(2.0**20)))
        assert "float32" == str(scaled.dtype)
        assert 2.0**21 == scaled

    def test_losses_are_scaled_in_any_nest(self):
        losses = self.arrays({"a": [np.float32(1.0), None], "b": (np.float32(2.0),)})
        scaled = self.framework.module.scale(losses, self.state(4.0))
        assert scaled["a"][1] is None
        assert 4.0 == self.framework.numpy(scaled["a"][0])
        assert 8.0 == self.framework.numpy(scaled["b"][0])

    @pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-20, 3.0, 7.3])
    def test_gradients_are_multiplied_by_the_float32_reciprocal(self, scale):
        values = np.random.default_rng(0).standard_normal(64)
        for dtype in self.framework.dtypes:
            gradient = values.astype(dtype)
            wide = "float32" if dtype == "float16" else dtype
            inverse = np.float32(1) / np.float32(scale)
            expected = gradient.astype(wide) * inverse.astype(wide)
            unscaled, signal = self.unscale([gradient], scale)
            actual = self.framework.numpy(unscaled[0])
            assert wide == str(actual.dtype)
            assert expected.tolist() == actual.tolist()
            assert bool(self.framework.numpy(signal.finite))

    def test_small_float16_gradients_do_not_vanish_again(self):
        gradient = np.array([2.0**-10], np.float16)
        unscaled, _ = self.unscale([gradient], 2.0**20)
        assert [2.0**-30] == self.framework.numpy(unscaled[0]).tolist()

    def test_the_nest_keeps_its_shape_and_none_passes_through(self):
        one = np.ones(2, np.float32)
        grads = {"a": [one, None, (one,)], "b": Layer(one, None), "c": {}}
        unscaled, signal = self.framework.module.unscale(
            self.arrays(grads), self.state(2.0)
        )
        assert list(unscaled) == ["a", "b", "c"]
        assert unscaled["a"][1] is None
        assert isinstance(unscaled["a"][2], tuple)
        assert isinstance(unscaled["b"], Layer)
        assert unscaled["b"].bias is None
        assert {} == unscaled["c"]
        assert [0.5, 0.5] == self.framework.numpy(unscaled["b"].kernel).tolist()
        assert bool(self.framework.numpy(signal.finite))

    def test_what_was_given_is_not_changed(self):
        gradient = np.array([1.0, 2.0], np.float32)
        grads = {"w": self.framework.array(gradient.copy())}
        self.framework.module.unscale(grads, self.state(2.0))
        assert ["w"] == list(grads)
        assert [1.0, 2.0] == self.framework.numpy(grads["w"]).tolist()

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("place", [0, 5, 12])
    def test_one_bad_value_anywhere_makes_the_step_bad(self, bad, place):
        for dtype in self.framework.dtypes:
            values = np.ones(13, dtype)
            values[place] = bad
            assert not self.finite([np.ones(3, np.float32), {"x": values}])

    def test_the_largest_float16_numbers_are_finite(self):
        largest = np.array([np.finfo(np.float16).max, 0], np.float16)
        assert self.finite([largest])

    def test_no_gradient_at_all_is_a_finite_step(self):
        for nothing in ([], None, {}, [None], (None, [None])):
            module = self.framework.module
            _, signal = module.unscale(nothing, self.state(8.0))
            assert bool(self.framework.numpy(signal.finite))
        assert self.finite([np.zeros(0, np.float32)])

    def test_a_gradient_that_overflows_by_unscaling_makes_the_step_bad(self):
        # torch and Keras check before they divide, and apply this one.
        assert not self.finite([np.array([1e30], np.float32)], scale=2.0**-100)

    @pytest.mark.parametrize("dtype", ["int32", "bool"])
    def test_a_gradient_that_is_no_float_is_named(self, dtype):
        grads = {"table": [self.framework.array(np.ones(2, dtype))]}
        with pytest.raises(GradientError, match="table"):
            self.framework.module.unscale(grads, self.state(8.0))

    @pytest.mark.parametrize("dtype", ["complex64", "complex128"])
    def test_complex_gradients_are_unscaled_or_named(self, dtype):
        grads = {"table": [self.framework.array(np.array([8 - 4j, 2j], dtype))]}
        if not self.framework.complex:
            with pytest.raises(GradientError, match="table"):
                self.framework.module.unscale(grads, self.state(8.0))
            return
        unscaled, signal = self.framework.module.unscale(grads, self.state(8.0))
        actual = self.framework.numpy(unscaled["table"][0])
        assert dtype == str(actual.dtype)
        assert [1 - 0.5j, 0.25j] == actual.tolist()
        assert bool(self.framework.numpy(signal.finite))

    @pytest.mark.parametrize(
        "bad", [complex(1, math.nan), complex(math.inf, 1), complex(0, -math.inf)]
    )
    def test_a_complex_gradient_is_finite_if_both_parts_are(self, bad):
        if not self.framework.complex:
            pytest.skip("complex gradients are refused here")
        assert not self.finite([np.array([1 + 1j, bad], np.complex64)])

    def test_nothing_is_measured_unless_asked_for(self):
        _, signal = self.unscale([np.ones(3, np.float32)], 8.0)
        assert {"finite", "too_large"} >= {
            name for name, value in signal._asdict().items() if value is not None
        }

    def test_the_measurements_are_those_of_numpy(self):
        half = np.array([1e-6, 0.0, 100.0, -200.0], np.float16)
        single = np.array([[0.0, 3.0], [4.0, 1e-42]], np.float32)
        names = ("nan", "amax", "norm", "zero_fraction", "subnormal_fraction")
        _, signal = self.unscale([half, single], 8.0, measure=names)
        wide = np.concatenate(
            [half.astype(np.float64), single.ravel().astype(np.float64)]
        )
        assert not bool(self.framework.numpy(signal.nan))
        assert 200.0 == self.framework.numpy(signal.amax)
        expected = np.sqrt(np.sum((wide / 8.0) ** 2))
        assert expected == pytest.approx(
            self.framework.numpy(signal.norm).item(), rel=1e-6
        )
        assert 0.25 == self.framework.numpy(signal.zero_fraction)
        assert 0.25 == self.framework.numpy(signal.subnormal_fraction)

    def test_nan_differs_from_infinity_and_amax_is_of_finite_values(self):
        for values, nan in (([np.inf, 3.0], False), ([np.nan, 3.0], True)):
            grads = [np.array(values, np.float32)]
            _, signal = self.unscale(grads, 1.0, measure=("nan", "amax"))
            assert nan == bool(self.framework.numpy(signal.nan))
            assert 3.0 == self.framework.numpy(signal.amax)

    @pytest.mark.parametrize("inclusive", [False, True])
    @pytest.mark.parametrize("edge", [0.1, 8188.0, 32752.0, 65504.0, 1e6])
    def test_the_fraction_above_an_edge_is_counted(self, edge, inclusive):
        """Beyond float16, too, and where an edge rounds to a value."""
        rounded = np.float32(edge)
        below, above = (np.nextafter(rounded, np.float32(x)) for x in (0, np.inf))
        half = np.array(
            [0.1, -8188, 8192, -32752, 65504, np.inf, -np.inf, np.nan, 0], np.float16
        )
        single = np.array([[below, -rounded], [above, np.nan]], np.float32)
        grads = [half, single, np.zeros(0, np.float32)]
        compare = np.greater_equal if inclusive else np.greater
        values = np.abs(np.concatenate([half.astype(np.float32), single.ravel()]))
        with np.errstate(invalid="ignore"):
            count = np.count_nonzero(compare(values, rounded))
        assert 0 < count < values.size
        asked = ("amax", AboveEdge(edge, inclusive=inclusive))
        _, signal = self.unscale(grads, 2.0, measure=asked)
        fraction = self.framework.numpy(signal.above_edge)
        assert (np.float32(count / values.size), "float32") == (
            fraction,
            fraction.dtype,
        )

    def test_no_gradient_is_above_an_edge(self):
        _, signal = self.unscale([], 1.0, measure=AboveEdge(1.0))
        assert 0.0 == self.framework.numpy(signal.above_edge)

    def test_an_unknown_measurement_is_named_with_those_there_are(self):
        with pytest.raises(LossScaleError, match=r"median.*amax"):
            self.framework.module.unscale([], self.state(1.0), measure=("median",))

    def trajectories(self, rows):
        """Return the plain states after each step, for pairs of a policy and its flags.

        To compile costs more than to run, so some rows of similar length are updated
        by one compiled function.
        """
        order = sorted(range(len(rows)), key=lambda row: len(rows[row][1]))
        found = {}
        for start in range(0, len(rows), TOGETHER):
            group = order[start : start + TOGETHER]
            states = self.update_together([rows[row] for row in group])
            found |= dict(zip(group, states, strict=True))
        return [found[row] for row in range(len(rows))]

    def update_together(self, rows):
        """Return the plain states after each step of rows, from one function."""
        module = self.framework.module
        policies = [policy for policy, _ in rows]

        @self.framework.compile
        def step(states, flags):
            lanes = zip(policies, states, flags, strict=True)
            return [
                module.update(policy, state, Signal(finite))
                for policy, state, finite in lanes
            ]

        states = [module.init(policy) for policy in policies]
        found = [[] for _ in rows]
        for number in range(max(len(flags) for _, flags in rows)):
            # A row that has ended goes on; what it becomes is not compared.
            given = [
                flags[number] if number < len(flags) else True for _, flags in rows
            ]
            states = step(states, [self.flag(flag) for flag in given])
            for (_, flags), state, seen in zip(rows, states, found, strict=True):
                if number < len(flags):
                    seen.append(self.plain(state))
        for state in states:
            values = [self.framework.numpy(value) for value in state]
            assert ["float32", "int32", "int32"] == [str(v.dtype) for v in values]
        return found

    def test_trajectories_are_those_of_the_recorded_manager(self):
        rows = sampled(
            "tensorflow/contrib_exponential.tf1.15.5.eager", "init_loss_scale"
        )
        found = self.trajectories(
            [
                (recordings.tensorflow_contrib(row["config"]), row["finite"])
                for row in rows
            ]
        )
        for row, states in zip(rows, found, strict=True):
            expected = list(zip(row["scale"], row["good"], row["bad"], strict=True))
            assert expected == states, row["config"]

    def test_division_is_that_of_the_recorded_loss_scale(self):
        rows = sampled("tensorflow/dynamic.tf2.3.4.eager", "initial_loss_scale")
        found = self.trajectories(
            [(recordings.tensorflow(row["config"]), row["finite"]) for row in rows]
        )
        for row, states in zip(rows, found, strict=True):
            assert row["scale"] == [scale for scale, _, _ in states], row["config"]

    def test_trajectories_of_other_switches_are_those_of_the_recordings(self):
        rows = random.Random(5).sample(read("recorded/megatron"), 10)
        found = self.trajectories(
            [
                (recordings.megatron(row["config"]), [f == "1" for f in row["finite"]])
                for row in rows
            ]
        )
        for row, states in zip(rows, found, strict=True):
            assert row["scale"] == [scale for scale, _, _ in states], row["config"]

    def test_select_takes_the_new_values_on_a_finite_step_only(self):
        new = self.arrays({"w": np.float32([1.0]), "slots": [np.float32(2.0), None]})
        old = self.arrays({"w": np.float32([5.0]), "slots": [np.float32(6.0), None]})
        select = self.framework.compile(self.framework.module.select)
        for flag, expected in ((True, (1.0, 2.0)), (False, (5.0, 6.0))):
            chosen = select(self.flag(flag), new, old)
            assert chosen["slots"][1] is None
            values = (chosen["w"], chosen["slots"][0])
            assert expected == tuple(self.framework.numpy(v).item() for v in values)

    @pytest.mark.parametrize("wrong", [Signal(finite=True), np.nan, None, "False"])
    def test_a_flag_that_is_no_boolean_never_counts_as_finite(self, wrong):
        """A whole signal is truthy: taken for a flag, it would apply an overflow."""
        module = self.framework.module
        new, old = self.arrays([np.float32(1)]), self.arrays([np.float32(5)])
        with pytest.raises((LossScaleError, TypeError, ValueError)):
            module.select(wrong, new, old)
        if not isinstance(wrong, Signal):
            with pytest.raises((LossScaleError, TypeError, ValueError)):
                module.update(Dynamic(), self.state(8.0), Signal(wrong))

    def test_an_update_wants_a_signal(self):
        with pytest.raises((LossScaleError, TypeError)):
            self.framework.module.update(Dynamic(), self.state(8.0), False)

    def test_select_does_not_let_a_discarded_nan_through(self):
        new = self.arrays([np.float32([np.nan])])
        old = self.arrays([np.float32([5.0])])
        select = self.framework.compile(self.framework.module.select)
        chosen = select(self.flag(False), new, old)
        assert [5.0] == self.framework.numpy(chosen[0]).tolist()

    def test_select_refuses_structures_that_differ(self):
        new, old = self.arrays({"w": np.float32(1)}), self.arrays({"v": np.float32(1)})
        finite = self.framework.array(np.asarray(True))
        with pytest.raises((StructureError, ValueError, TypeError)):
            self.framework.module.select(finite, new, old)

    @pytest.mark.parametrize(
        "policy",
        [
            Dynamic(growth_interval=2),
            Dynamic(init_scale=2.0**-120, growth_interval=1),
            presets.get("torch", init_scale=2.0**120, growth_interval=1),
            Fixed(2.0**15),
        ],
        ids=["default", "near the floor", "near the cap", "fixed"],
    )
    def test_weights_never_become_infinite_or_nan_whatever_arrives(self, policy):
        module = self.framework.module
        rng = np.random.default_rng(1)
        flags = overflow_pattern(random.Random(1), 60) + [False] * 200 + [True] * 60
        weights = self.framework.array(np.ones(4, np.float32))
        state = module.init(policy)

        @self.framework.compile
        def step(weights, state, gradient):
            grads, signal = module.unscale([gradient], state)
            proposed = weights - grads[0]
            weights = module.select(signal.finite, [proposed], [weights])[0]
            return weights, module.update(policy, state, signal)

        for flag in flags:
            scale = self.framework.numpy(state.scale)
            with np.errstate(over="ignore"):
                gradient = rng.standard_normal(4).astype(np.float32) * scale
            if not flag:
                gradient[rng.integers(4)] = rng.choice([np.inf, -np.inf, np.nan])
            weights, state = step(weights, state, self.framework.array(gradient))
            assert np.isfinite(self.framework.numpy(weights)).all()

    def test_a_portable_state_goes_through_json_and_back(self):
        import json

        policy = Dynamic(growth_interval=3)
        module = self.framework.module
        state = module.update(policy, module.init(policy), Signal(self.flag(True)))
        text = json.dumps(to_portable(policy, state))
        same_policy, plain = from_portable(json.loads(text))
        assert policy == same_policy
        assert self.plain(state) == self.plain(module.init(same_policy, plain))

    def flag(self, value):
        return self.framework.array(np.asarray(value))


def magnitude_trace(seed, steps=120):
    """Return steps of (finite, largest unscaled magnitude) that move every policy."""
    rng = random.Random(seed)
    level, trace = -8.0, []
    for _ in range(steps):
        level += rng.gauss(0.0, 0.7)
        magnitude = 0.0 if rng.random() < 0.03 else 2.0 ** (level + rng.random())
        trace.append((rng.random() > 0.06, np.float32(magnitude)))
    return trace


SHORT_RULE = Dynamic(growth_interval=7, min_scale=2.0**-24, max_scale=2.0**40)

DATA_POLICIES = [
    Headroom(SHORT_RULE, window=6),
    Headroom(presets.get("megatron", growth_interval=5), margin=1.5, window=9),
    LogMax(SHORT_RULE, window=5, patience=2),
    Histogram(SHORT_RULE, period=3),
    Saturation(SHORT_RULE, doubling=4),
    OverflowRate(SHORT_RULE, tolerance=0.1),
    WindowFollowsScale(Dynamic(init_scale=4.0, growth_interval=3)),
    RisingFloor(SHORT_RULE, floors=((20, 64.0), (60, 4096.0))),
    AutoStart(SHORT_RULE),
]

STARTS = {
    "explained": [(False, 1.0), (False, 1.0), (True, 0.0), (True, 900.0), (True, 1.0)],
    "inside the network": [(False, 1.0), (True, 2.0**-9), (False, 1.0)],
    "a bad batch": [*[(False, 1.0)] * 6, (True, 2.0**-5), (True, 1.0)],
    "nothing to lower": [(True, 2.0**-30), (False, 1.0)],
    "at once": [(True, 0.75), (True, 0.75)],
}
"""First steps, as (finite, largest unscaled magnitude)."""


class DataPolicyConformance:
    """Policies that see more than a flag: the same numbers as in NumPy, to the bit."""

    @pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
    def test_a_trace_gives_the_states_of_numpy(self, policy):
        import lossscale.numpy as reference

        module = self.framework.module
        expected, state = reference.init(policy), module.init(policy)
        step = self.framework.compile(
            lambda state, finite, amax: module.update(
                policy, state, Signal(finite, amax=amax)
            )
        )
        for finite, magnitude in magnitude_trace(5):
            with np.errstate(over="ignore"):
                amax = np.float32(min(magnitude * expected.scale, np.float32(3e38)))
            expected = reference.update(policy, expected, Signal(finite, amax=amax))
            state = step(state, self.flag(finite), self.framework.array(amax))
            assert self.plain(expected) == self.plain(state)

    @pytest.mark.parametrize("name", STARTS)
    def test_a_start_gives_the_states_of_numpy(self, name):
        import lossscale.numpy as reference

        module, policy = self.framework.module, AutoStart(SHORT_RULE)
        expected, state = reference.init(policy), module.init(policy)
        for finite, magnitude in STARTS[name]:
            amax = np.float32(magnitude * expected.scale)
            expected = reference.update(policy, expected, Signal(finite, amax=amax))
            signal = Signal(self.flag(finite), amax=self.framework.array(amax))
            state = module.update(policy, state, signal)
            assert self.plain(expected) == self.plain(state)

    def test_each_reads_what_unscale_measures(self):
        """All of them in one function: to compile costs more than to run."""
        module = self.framework.module

        @self.framework.compile
        def step(states, gradient):
            signals = [
                module.unscale([gradient], state, measure=policy.wants)[1]
                for policy, state in zip(DATA_POLICIES, states, strict=True)
            ]
            return [
                module.update(*given)
                for given in zip(DATA_POLICIES, states, signals, strict=True)
            ]

        states = [module.init(policy) for policy in DATA_POLICIES]
        for dtype in self.framework.dtypes:
            gradient = np.array([3.0, -70.0, 0.5], dtype)
            states = step(states, self.framework.array(gradient))
        for policy, state in zip(DATA_POLICIES, states, strict=True):
            assert 0 < self.plain(state)[0] < math.inf, policy
            assert ["float32", "int32", "int32"] == [
                str(self.framework.numpy(value).dtype) for value in state[:3]
            ], policy

    @pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
    def test_fractions_above_an_edge_give_the_states_of_numpy(self, policy):
        """Gradients of which a few values pass the edge: `amax` alone would differ."""
        import lossscale.numpy as reference

        edges = [item for item in policy.wants if isinstance(item, AboveEdge)]
        if not edges:
            pytest.skip("reads no fraction")
        policy = replace(policy, fraction=0.3)
        module, rng = self.framework.module, np.random.default_rng(3)
        expected, state = reference.init(policy), module.init(policy)
        by_amax = reference.init(policy)
        for _ in range(40):
            size = edges[0].edge / float(expected.scale)
            gradient = rng.standard_normal(10) * size * 2.0 ** rng.integers(-3, 3)
            with np.errstate(over="ignore"):
                scaled = np.float16(gradient * expected.scale)
            stored = self.framework.array(scaled)
            _, theirs = reference.unscale([scaled], expected, measure=policy.wants)
            _, ours = module.unscale([stored], state, measure=policy.wants)
            expected = reference.update(policy, expected, theirs)
            state = module.update(policy, state, ours)
            by_amax = reference.update(
                policy, by_amax, theirs._replace(above_edge=None)
            )
            assert self.plain(expected) == self.plain(state)
        assert by_amax.scale != expected.scale

    @pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
    def test_its_state_goes_through_json_and_back(self, policy):
        module = self.framework.module
        state = module.init(policy)
        for finite, magnitude in ((True, 900.0), (False, 3.0), (True, 7.0)):
            amax = self.framework.array(np.asarray(magnitude, np.float32))
            state = module.update(policy, state, Signal(self.flag(finite), amax=amax))
        same, plain = from_portable(to_portable(policy, state))
        assert policy == same
        assert self.plain(state) == self.plain(module.init(same, plain))

    @pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
    def test_a_vector_of_scales_is_the_same_code(self, policy):
        module = self.framework.module
        one = module.init(policy)
        pair = type(one)(
            *(
                self.framework.array(np.stack([self.framework.numpy(value)] * 2))
                for value in one
            )
        )
        for finite, amax in magnitude_trace(9, 25):
            amaxes = np.array([amax, amax], np.float32)
            one = module.update(
                policy,
                one,
                Signal(self.flag(finite), amax=self.framework.array(amaxes[0])),
            )
            flags = self.framework.array(np.array([finite, finite]))
            pair = module.update(
                policy, pair, Signal(flags, amax=self.framework.array(amaxes))
            )
        assert [[value, value] for value in self.plain(one)] == [
            self.framework.numpy(value).tolist() for value in pair
        ]


class HeadroomConformance:
    """What the functions do about finite gradients that an optimizer cannot square."""

    def too_large(self, values, scale, dtype="float32"):
        """Return whether a step is applied, and whether it is too large."""
        _, signal = self.unscale([np.array(values, dtype)], scale)
        flags = signal.finite, signal.too_large
        return tuple(bool(self.framework.numpy(flag)) for flag in flags)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_a_finite_gradient_that_cannot_be_squared_is_too_large(self, sign):
        assert (False, True) == self.too_large([1.0, sign * 3e38], 65536.0)
        assert (False, True) == self.too_large([sign * 1.9e19], 1.0)
        assert (True, False) == self.too_large([sign * 1.8e19], 1.0)
        assert (True, False) == self.too_large([sign * 1.8e19 * 65536], 65536.0)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_a_gradient_that_is_not_finite_is_not_called_too_large(self, bad):
        assert (False, False) == self.too_large([3e38, bad, 1.0], 65536.0)
        # Infinite once it is divided by a scale below 1.
        assert (False, False) == self.too_large([1e30], 2.0**-100)

    def test_every_dtype_has_its_own_bound(self):
        for dtype in self.framework.dtypes:
            largest = float(np.finfo(dtype).max)
            # float16 gradients become float32, which can square all of them.
            expected = (True, False) if dtype == "float16" else (False, True)
            assert expected == self.too_large([largest], 1.0, dtype)

    @pytest.mark.parametrize("policy", [Dynamic(growth_interval=1), Fixed(8.0)])
    def test_a_step_that_is_too_large_leaves_the_state(self, policy):
        module = self.framework.module
        before = module.init(policy, ScaleState(8.0, 0, 0))
        run = self.framework.compile(
            lambda tree, state: module.update(
                policy, state, module.unscale(tree, state)[1]
            )
        )
        after = run(self.arrays([np.array([3e38], np.float32)]), before)
        assert (8.0, 0, 0) == self.plain(after)


class ClassicConformance:
    """The seven classic classes, eagerly."""

    framework: Framework

    def value(self, tensor):
        return self.framework.numpy(tensor).item()

    def gradient(self, finite):
        return self.framework.array(np.asarray(1.0 if finite else np.nan, np.float32))

    def manager_scales(self, flags, *arguments, **keywords):
        manager = self.framework.module.ExponentialUpdateLossScaleManager(
            *arguments, **keywords
        )
        scales = []
        for flag in flags:
            assert manager.update_loss_scale(flag == "G") is None
            scales.append(self.value(manager.get_loss_scale()))
        return scales

    def dynamic_scales(self, flags, *arguments):
        loss_scale = self.framework.module.DynamicLossScale(*arguments)
        scales = []
        for flag in flags:
            operation, should_apply = loss_scale.update([self.gradient(flag == "G")])
            assert operation is None
            assert (flag == "G") == bool(self.framework.numpy(should_apply))
            scales.append(self.value(loss_scale()))
        return scales

    def test_a_fixed_manager_keeps_its_value(self):
        manager = self.framework.module.FixedLossScaleManager(1000)
        for _ in range(10):
            assert manager.update_loss_scale(False) is None
            assert 1000.0 == self.value(manager.get_loss_scale())

    QUARTER = FLOAT32_MAX / 4

    @pytest.mark.parametrize(
        ("arguments", "flags", "expected"),
        [
            ((1, 2, 2, 2, 0.5), "GGGGGG", [1, 2, 2, 4, 4, 8]),
            ((1024, 2, 2, 2, 0.5), "BBBBBB", [1024, 512, 512, 256, 256, 128]),
            ((16, 2, 2, 2, 0.5), "BBBBBBBBBB", [16, 8, 8, 4, 4, 2, 2, 1, 1, 1]),
            ((1, 2, 2, 2, 0.5), "GGGBG", [1, 2, 2, 2, 2]),
            ((1, 2, 2, 2, 0.5), "GGGBGB", [1, 2, 2, 2, 2, 1]),
            ((1, 1, 1, 2, 0.5), "GGGBGG", [2, 4, 8, 4, 8, 16]),
            ((1, 1, 1, 2, 0.5), "GBGBGBGBG", [2, 1, 2, 1, 2, 1, 2, 1, 2]),
            ((32, 2, 1, 2, 0.5), "GBGBGBG", [32, 16, 16, 8, 8, 4, 4]),
            (
                (4, 2, 2, 2, 0.5),
                "BBGGGBGBGGGB",
                [4, 2, 2, 4, 4, 4, 4, 2, 2, 4, 4, 4],
            ),
        ],
    )
    def test_the_exponential_manager(self, arguments, flags, expected):
        assert expected == self.manager_scales(flags, *arguments)

    def test_growth_of_a_manager_stops_at_the_largest_float32(self):
        quarter = self.QUARTER
        expected = [quarter, 2 * quarter, 2 * quarter, *[4 * quarter] * 3]
        assert expected == self.manager_scales("GGGGGG", quarter, 2, 2, 2, 0.5)

    def test_a_fixed_loss_scale_says_true_to_anything(self):
        fixed = self.framework.module.FixedLossScale(1000)
        for finite in (True, False):
            operation, should_apply = fixed.update([self.gradient(finite)])
            assert operation is None
            assert should_apply is True
            assert 1000.0 == self.value(fixed())

    def test_a_fixed_loss_scale_goes_through_its_config(self):
        fixed = self.framework.module.get(123)
        assert {"loss_scale_value": 123.0} == fixed.get_config()
        again = type(fixed).from_config(fixed.get_config())
        assert 123.0 == self.value(again())
        assert "FixedLossScale(123.0)" == repr(again)

    @pytest.mark.parametrize(
        ("arguments", "flags", "expected"),
        [
            ((1, 2, 2), "GGGGGG", [1, 2, 2, 4, 4, 8]),
            ((1024, 2, 2), "BBBBBB", [512, 256, 128, 64, 32, 16]),
            ((16, 2, 2), "BBBBBB", [8, 4, 2, 1, 1, 1]),
            ((1, 2, 2), "GGGBG", [1, 2, 2, 1, 1]),
            ((1, 1, 2), "GGGBGG", [2, 4, 8, 4, 8, 16]),
            ((1, 1, 2), "GBGBGBGBG", [2, 1, 2, 1, 2, 1, 2, 1, 2]),
            ((32, 2, 2), "GBGBGBG", [32, 16, 16, 8, 8, 4, 4]),
            ((4, 2, 3), "GGBGG", [4, 12, 4, 4, 12]),
            ((4, 2, 2), "BGGGBGBGGGB", [2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
        ],
    )
    def test_the_dynamic_loss_scale(self, arguments, flags, expected):
        assert expected == self.dynamic_scales(flags, *arguments)

    def test_growth_of_a_loss_scale_stops_at_the_largest_float32(self):
        quarter = self.QUARTER
        expected = [quarter, 2 * quarter, 2 * quarter, *[4 * quarter] * 3]
        assert expected == self.dynamic_scales("GGGGGG", quarter, 2, 2)

    def test_a_single_bare_tensor_is_accepted(self):
        loss_scale = self.framework.module.DynamicLossScale()
        _, should_apply = loss_scale.update(self.gradient(True))
        assert bool(self.framework.numpy(should_apply))

    def test_the_config_keeps_its_three_settings(self):
        loss_scale = self.framework.module.DynamicLossScale(1, 2, 3)
        config = loss_scale.get_config()
        assert {
            "initial_loss_scale": 1.0,
            "increment_period": 2,
            "multiplier": 3.0,
        } == config
        again = type(loss_scale).from_config(config)
        assert config == again.get_config()
        assert (1.0, 2, 3.0) == (
            again.initial_loss_scale,
            again.increment_period,
            again.multiplier,
        )

    def test_none_gradients_are_ignored_and_nothing_at_all_is_a_finite_step(self):
        for nothing in ([None], [], None, {}):
            loss_scale = self.framework.module.DynamicLossScale(8, 1, 2)
            _, should_apply = loss_scale.update(nothing)
            assert bool(self.framework.numpy(should_apply))
            assert 16.0 == self.value(loss_scale())

    def test_get_dynamic_has_the_defaults(self):
        found = self.framework.module.get("dynamic")
        assert {
            "initial_loss_scale": 2.0**15,
            "increment_period": 2000,
            "multiplier": 2.0,
        } == found.get_config()

    @pytest.mark.parametrize(
        "wrong", ["Dynamic", "fixed", "8", b"dynamic", {}, [], 0.5]
    )
    def test_get_refuses_anything_else(self, wrong):
        with pytest.raises(ValueError, match=r"must be|A loss scale is"):
            self.framework.module.get(wrong)

    def test_get_gives_back_a_loss_scale_and_none(self):
        loss_scale = self.framework.module.FixedLossScale(8)
        assert loss_scale is self.framework.module.get(loss_scale)
        assert self.framework.module.get(None) is None

    def test_a_floor_below_one_is_an_argument(self):
        module = self.framework.module
        loss_scale = module.DynamicLossScale(1.0, 2000, 2, floor=0.25)
        for _ in range(5):
            loss_scale.update([self.gradient(False)])
        assert 0.25 == self.value(loss_scale())
        assert 0.25 == type(loss_scale).from_config(loss_scale.get_config()).floor
        scales = self.manager_scales("BBB", 1.0, 2000, 1, 2, 0.5, floor=0.25)
        assert [0.5, 0.25, 0.25] == scales

    def test_at_the_floor_hold_refuses_and_clamp_goes_there(self):
        first = float(np.float32(1.2))
        assert [first, first] == self.manager_scales("BB", 1.2, 9, 1)
        clamped = self.manager_scales("BB", 1.2, 9, 1, at_floor="clamp")
        assert [1.0, 1.0] == clamped

    def optimizer(self, loss_scale, **options):
        """Return the wrapper and the optimizer inside it, which only takes notes."""
        inner = Notes()
        return self.framework.module.LossScaleOptimizer(
            inner, loss_scale, **options
        ), inner

    def test_bad_gradients_are_never_handed_to_the_optimizer(self):
        module = self.framework.module
        for loss_scale in (
            8,
            "dynamic",
            module.FixedLossScaleManager(8),
            module.ExponentialUpdateLossScaleManager(8, 2),
        ):
            optimizer, inner = self.optimizer(loss_scale)
            optimizer.apply_gradients([(self.gradient(False), "w")])
            assert [] == inner.applied
            optimizer.apply_gradients(iter([(self.gradient(True), "w"), (None, "v")]))
            assert [["w"]] == inner.applied

    def test_the_scale_moves_with_what_was_seen(self):
        loss_scale = self.framework.module.DynamicLossScale(2, 1, 2)
        optimizer, _ = self.optimizer(loss_scale)
        seen = []
        for finite in (True, False, True):
            optimizer.apply_gradients([(self.gradient(finite), "w")])
            seen.append(self.value(loss_scale()))
        assert [4.0, 2.0, 4.0] == seen

    def test_the_scale_stays_when_the_optimizer_raises(self):
        loss_scale = self.framework.module.DynamicLossScale(8, 1, 2)
        optimizer, inner = self.optimizer(loss_scale)
        inner.fails = True
        with pytest.raises(OSError, match="no device"):
            optimizer.apply_gradients([(self.gradient(True), "w")])
        assert 8.0 == self.value(loss_scale())

    def test_an_incomplete_subclass_cannot_be_made_and_base_bodies_return_none(self):
        class Half(self.framework.module.LossScaleManager):
            def get_loss_scale(self):
                return super().get_loss_scale()

        with pytest.raises(TypeError):
            Half()

        class Whole(Half):
            def update_loss_scale(self, finite_grads):
                return super().update_loss_scale(finite_grads)

        assert Whole().get_loss_scale() is None
        assert Whole().update_loss_scale(True) is None

    def test_abstract_classes_cannot_be_made(self):
        for abstract in (
            self.framework.module.LossScale,
            self.framework.module.LossScaleManager,
        ):
            with pytest.raises(TypeError):
                abstract()
