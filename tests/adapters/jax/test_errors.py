"""Wrong arguments: one error that says what was given and what was expected."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic, Fixed, ScaleState, Signal  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    SettingTypeError,
    StateError,
    StructureError,
)

POLICY = Dynamic()
STATE = ls.init(POLICY)
PARAMS = {"w": jnp.ones(2)}


def compute_loss(params, x):
    return jnp.sum(params["w"] * x)


def steps(**settings):
    return [
        ls.value_and_grad(compute_loss, POLICY, **settings),
        ls.accumulate_gradients(compute_loss, POLICY, **settings),
        ls.with_retries(ls.value_and_grad(compute_loss, POLICY, **settings)),
    ]


@pytest.mark.parametrize("index", range(3))
def test_a_missing_or_misplaced_state_is_reported(index):
    step = steps()[index]
    x = jnp.ones((2, 2))
    for arguments in ((PARAMS, STATE, x), (PARAMS, x), (POLICY, PARAMS, x)):
        given = type(arguments[0]).__name__
        with pytest.raises(StateError, match=f"is a {given}, expected the ScaleState"):
            step(*arguments)


def test_a_policy_instead_of_a_state_is_reported():
    for call in (
        lambda: ls.unscale(PARAMS, POLICY),
        lambda: ls.scale(1.0, POLICY),
        lambda: ls.update(POLICY, POLICY, Signal(True)),
    ):
        with pytest.raises(StateError, match="is a Dynamic, expected the ScaleState"):
            call()


@pytest.mark.parametrize("index", range(3))
def test_a_missing_argument_is_reported(index):
    step = steps(argnums=5)[index]
    with pytest.raises(SettingError, match=r"argnums=5, and .* with 2 positional"):
        step(STATE, PARAMS, jnp.ones((2, 2)))


def test_a_missing_batch_argument_is_reported():
    step = ls.accumulate_gradients(compute_loss, POLICY, batch_argnums=3)
    with pytest.raises(SettingError, match="batch_argnums=3"):
        step(STATE, PARAMS, jnp.ones((2, 2)))


@pytest.mark.parametrize("argnums", [np.int64(0), np.array(0), (np.int32(0),), [0]])
def test_positions_may_be_integers_of_any_type(argnums):
    result = ls.value_and_grad(compute_loss, POLICY, argnums=argnums)(
        STATE, PARAMS, 3.0
    )
    grads = result.grads[0] if isinstance(argnums, (tuple, list)) else result.grads
    assert [3.0, 3.0] == grads["w"].tolist()


@pytest.mark.parametrize("argnums", [1.5, "0", None, (0, "1")])
def test_positions_that_are_no_integers_are_refused_at_construction(argnums):
    with pytest.raises(SettingTypeError, match="argnums must be a position"):
        ls.value_and_grad(compute_loss, POLICY, argnums=argnums)


@pytest.mark.parametrize(
    ("has_aux", "result", "given"),
    [
        (True, lambda loss: loss, "returned a "),
        (True, lambda loss: (loss,), "a tuple of 1"),
        (True, lambda loss: (loss, 1, 2), "a tuple of 3"),
        (True, lambda loss: [loss, 1], "a list"),
        (False, lambda loss: (loss, 1), "a tuple of 2"),
    ],
)
def test_the_result_of_a_function_must_match_has_aux(has_aux, result, given):
    step = ls.value_and_grad(lambda w: result(w * 2.0), POLICY, has_aux=has_aux)
    with pytest.raises(GradientError, match=f"{given}.*has_aux=True"):
        step(STATE, jnp.float32(1.0))


def test_two_trees_of_the_very_same_arrays_are_refused():
    tree = {"stats": jnp.ones(2), "name": "x"}
    with pytest.raises(StructureError, match="very same arrays"):
        ls.select(jnp.bool_(True), tree, dict(tree))
    # One array that differs is enough; trees without arrays are accepted too.
    ls.select(jnp.bool_(True), tree | {"w": jnp.ones(1)}, tree | {"w": jnp.zeros(1)})
    assert {"name": "x"} == ls.select(jnp.bool_(True), {"name": "x"}, {"name": "x"})


def test_the_largest_float32_number_is_accepted_as_max_scale():
    largest = float(np.finfo(np.float32).max)
    for value in (3.4028235e38, largest, np.float32(largest)):
        assert largest == Dynamic(max_scale=value).max_scale
    with pytest.raises(SettingError, match="max_scale"):
        Dynamic(max_scale=3.4028236e38)


def test_a_state_resumed_above_max_scale_starts_at_max_scale():
    policy = Dynamic(init_scale=8.0, max_scale=16.0)
    state = ls.init(policy, ScaleState(64.0, 3, 0))
    assert (16.0, 3, 0) == tuple(value.item() for value in state)
    assert 16.0 == ls.update(policy, state, Signal(True)).scale
    with pytest.raises(StateError, match="fixed at"):
        ls.init(Fixed(8.0), ScaleState(64.0, 3, 0))


@pytest.mark.parametrize("wrong", [8.0, Dynamic, "torch", None])
def test_what_is_no_policy_is_refused(wrong):
    for call in (
        lambda: ls.init(wrong),
        lambda: ls.value_and_grad(compute_loss, wrong),
        lambda: ls.accumulate_gradients(compute_loss, wrong),
    ):
        with pytest.raises(SettingTypeError, match="policy must be a policy"):
            call()


def test_what_is_no_function_is_refused_at_construction():
    for make in (ls.value_and_grad, ls.accumulate_gradients):
        with pytest.raises(SettingTypeError, match=r"fun must be a function .* None"):
            make(None, POLICY)
        with pytest.raises(SettingTypeError, match="has_aux must be True or False"):
            make(compute_loss, POLICY, has_aux=1)
    with pytest.raises(SettingTypeError, match="step must be what value_and_grad"):
        ls.with_retries(None)
    with pytest.raises(SettingError, match="a whole number of retries"):
        ls.with_retries(steps()[0], retries=0)


def test_an_array_is_called_a_jax_array():
    with pytest.raises(StateError, match="The state is a JAX array, expected"):
        ls.scale(1.0, jnp.ones(2))
    with pytest.raises(StateError, match="The state is a JAX array, expected"):
        jax.jit(lambda w: ls.unscale(w, w))(jnp.ones(2))
    step = ls.value_and_grad(lambda w: w * 2.0, POLICY, has_aux=True)
    with pytest.raises(GradientError, match=r"returned a JAX array\. With has_aux"):
        step(STATE, jnp.float32(1.0))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_of_several_numbers_is_reported(has_aux):
    def compute(w, x):
        return (w * x, x) if has_aux else w * x

    words = r"loss of shape \((2, )?3,?\), expected one number\. .* jnp.mean\(loss\)"
    for make in (ls.value_and_grad, ls.accumulate_gradients):
        step = make(compute, POLICY, has_aux=has_aux)
        with pytest.raises(GradientError, match=words):
            step(STATE, jnp.ones(3), jnp.ones((2, 3)))
        step(STATE, jnp.ones(()), jnp.ones(2) if make is ls.accumulate_gradients else 1)


@pytest.mark.parametrize("loss", [None, {"loss": 1.0}, [1.0]])
def test_a_loss_that_is_a_container_is_reported(loss):
    step = ls.value_and_grad(lambda w: loss, POLICY)
    with pytest.raises(GradientError, match="expected the loss: one number"):
        step(STATE, jnp.ones(2))


@pytest.mark.parametrize("finite", [True, np.bool_(False)])
def test_two_shapes_are_refused_with_a_python_boolean_too(finite):
    with pytest.raises(StructureError, match=r"\['w'\] differ: float32 \(3,\)"):
        ls.select(finite, {"w": jnp.ones(3)}, {"w": jnp.ones(2)})
    with pytest.raises(StructureError, match=r"the top differ: float32 .* float16"):
        ls.select(finite, jnp.ones(2), jnp.ones(2, jnp.float16))
    new = {"step": 1, "name": "x", "call": len, "w": jnp.ones(2), "x": np.ones(1)}
    old = {"step": 2, "name": "y", "call": max, "w": np.zeros(2, "f"), "x": jnp.ones(1)}
    assert (new if finite else old) is ls.select(finite, new, old)


@pytest.mark.parametrize("flags", [True, None, (1, 2), Signal(True)])
def test_flags_of_something_else_are_reported(flags):
    with pytest.raises(GradientError, match=r"flags must be what leaf_flags\(grads\)"):
        ls.nonfinite_leaves(PARAMS, flags)


def test_the_limit_of_the_alarm_counts_skipped_steps():
    with pytest.raises(SettingError, match="a whole number of skipped steps"):
        ls.CollapseAlarm(0)
