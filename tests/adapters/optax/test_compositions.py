"""`loss_scaled` combined with optax's other wrappers, inside and outside."""

import random
from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

from helpers.sequences import overflow_pattern  # noqa: E402
from helpers.trees import check_same  # noqa: E402

import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
SCALE = 64.0


def run(optimizer, steps, params=PARAMS):
    """Run steps with these gradients, scaled by the current scale."""
    return train(
        compile_scaled_update(optimizer), optimizer.init(params), steps, params
    )


def run_unscaled(optimizer, steps, params=PARAMS):
    """Run the same steps without a loss scale."""
    return train(jax.jit(optimizer.update), optimizer.init(params), steps, params)


@cache
def compile_scaled_update(optimizer):
    """Return a compiled update that scales the gradients first."""

    def update(grads, state, params):
        scaled = jax.tree.map(lambda leaf: leaf * ls.get_scale(state), grads)
        return optimizer.update(scaled, state, params)

    return jax.jit(update)


def train(update, state, steps, params):
    """Return parameters and state after some steps."""
    for grads in steps:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def make_gradients(count, overflows=()):
    """Return some gradients; those at the indices `overflows` contain an infinity."""
    rng = np.random.default_rng(0)
    steps = []
    for index in range(count):
        a, b = rng.normal(size=2), rng.normal(size=1)
        if index in overflows:
            a[0] = np.inf
        steps.append({"a": jnp.asarray(a, "float32"), "b": jnp.asarray(b, "float32")})
    return steps


def keep_finite(steps):
    return [g for g in steps if np.isfinite(g["a"]).all()]


def check_steps(optimizer, reference, policy, overflows=(1, 4)):
    """Raise unless the steps equal those of the reference without the overflows."""
    steps = make_gradients(7, overflows)
    params, state = run(optimizer, steps)
    expected, _ = run_unscaled(reference, keep_finite(steps))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, params
    )
    scale = policy.init().scale * 0.5 ** len(overflows)
    if isinstance(policy, Dynamic) and scale != ls.get_scale(state):
        message = f"expected a scale of {scale}, got {ls.get_scale(state)}"
        raise AssertionError(message)
    return state


POLICY = Dynamic(init_scale=SCALE)


def test_the_check_of_steps_can_fail():
    with pytest.raises(AssertionError):
        check_steps(ls.loss_scaled(optax.sgd(0.1), POLICY), optax.sgd(0.2), POLICY)
    with pytest.raises(AssertionError):
        check_steps(ls.loss_scaled(optax.sgd(0.1), POLICY), optax.sgd(0.1), Dynamic())


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
        lambda: optax.adamw(0.1),
        lambda: optax.lion(0.1),
        lambda: optax.adafactor(0.1),
        lambda: optax.lamb(0.1),
        lambda: optax.radam(0.1),
        lambda: optax.contrib.muon(0.1),
        lambda: optax.contrib.schedule_free_sgd(0.1),
        lambda: optax.contrib.prodigy(0.1),
        lambda: optax.rmsprop(0.1),
        lambda: optax.chain(
            optax.adaptive_grad_clip(0.1),
            optax.scale_by_adam(mu_dtype=jnp.bfloat16),
            optax.add_decayed_weights(0.1),
            optax.scale_by_schedule(optax.cosine_decay_schedule(-0.1, 10)),
        ),
    ],
    ids=lambda _: "",
)
def test_any_wrapped_optimizer_receives_only_the_finite_steps(make, skip):
    optimizer = ls.loss_scaled(make(), POLICY, skip=skip)
    check_steps(optimizer, make(), POLICY)


def test_a_chain_may_continue_after_it():
    optimizer = optax.chain(
        ls.loss_scaled(optax.clip_by_global_norm(0.5), POLICY), optax.scale(-0.1)
    )
    reference = optax.chain(optax.clip_by_global_norm(0.5), optax.scale(-0.1))
    check_steps(optimizer, reference, POLICY)


def test_named_chains_are_searched():
    optimizer = optax.named_chain(("scaled", ls.loss_scaled(optax.sgd(0.1), POLICY)))
    check_steps(optimizer, optax.sgd(0.1), POLICY)


def test_a_mask_inside_passes_the_other_gradients_on_unscaled():
    mask = {"a": True, "b": False}
    check_steps(
        ls.loss_scaled(optax.masked(optax.adam(0.1), mask), POLICY),
        optax.masked(optax.adam(0.1), mask),
        POLICY,
    )


def test_a_mask_around_it_leaves_out_frozen_parameters():
    # Frozen leaves pass through still scaled, and are set to zero after it.
    mask = {"a": True, "b": False}
    freeze = optax.masked(optax.set_to_zero(), {"a": False, "b": True})
    scaled = optax.masked(ls.loss_scaled(optax.adam(0.1), POLICY), mask)
    check_steps(
        optax.chain(scaled, freeze),
        optax.chain(optax.masked(optax.adam(0.1), mask), freeze),
        POLICY,
    )


def test_multi_transform_inside_has_separate_optimizers():
    def make_parts():
        return optax.multi_transform(
            {"x": optax.adam(0.1), "y": optax.sgd(0.5)}, {"a": "x", "b": "y"}
        )

    check_steps(ls.loss_scaled(make_parts(), POLICY), make_parts(), POLICY)


def test_multi_transform_around_it_has_separate_scales():
    optimizer = optax.multi_transform(
        {
            "x": ls.loss_scaled(optax.sgd(0.5), POLICY),
            "y": ls.loss_scaled(optax.sgd(0.5), POLICY),
        },
        {"a": "x", "b": "y"},
    )
    state = optimizer.init(PARAMS)
    grads = {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([SCALE])}
    updates, state = jax.jit(optimizer.update)(grads, state, PARAMS)
    check_same({"a": jnp.zeros(2), "b": jnp.array([-0.5])}, updates)
    first, second = ls.find_states(state)
    assert (SCALE / 2, SCALE) == (ls.get_scale(first), ls.get_scale(second))


def test_hyperparameters_can_be_injected_inside_and_around():
    def make_optimizer(learning_rate):
        return ls.loss_scaled(optax.sgd(learning_rate), POLICY)

    inside = ls.loss_scaled(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.25), POLICY
    )
    state = check_steps(inside, optax.sgd(0.25), POLICY)
    assert 0.25 == state.inner_state.hyperparams["learning_rate"]
    injected = optax.inject_hyperparams(make_optimizer)(learning_rate=0.25)
    state = check_steps(injected, optax.sgd(0.25), POLICY)
    state.hyperparams["learning_rate"] = jnp.float32(0.5)
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, SCALE / 4), PARAMS)
    updates, _ = injected.update(grads, state, PARAMS)
    check_same(jnp.array([-0.5]), updates["b"])


def test_a_schedule_inside_counts_applied_steps():
    def make_scheduled():
        schedule = optax.exponential_decay(0.5, 1, 0.5)
        return optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)

    check_steps(ls.loss_scaled(make_scheduled(), POLICY), make_scheduled(), POLICY)


def test_apply_if_finite_inside_rejects_no_step():
    inner = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=0)
    state = check_steps(ls.loss_scaled(inner, POLICY), optax.adam(0.1), POLICY)
    assert (0, 2) == (state.inner_state.total_notfinite, state.total_notfinite)


def test_apply_if_finite_around_hides_overflows_from_the_scale():
    # The wrong order: the page documents it, so it is tested here.
    scaled = ls.loss_scaled(optax.sgd(0.1), POLICY)
    optimizer = optax.apply_if_finite(scaled, max_consecutive_errors=10)
    _, state = run(optimizer, make_gradients(3, overflows=(0, 1, 2)))
    assert SCALE == ls.get_scale(state)


def test_micro_batches_inside_leave_out_overflows():
    def make_multi_steps():
        return optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()

    check_steps(ls.loss_scaled(make_multi_steps(), POLICY), make_multi_steps(), POLICY)


def test_optaxs_own_multi_steps_never_recovers_from_an_overflow():
    # The reason for ls.MultiSteps.
    optimizer = optax.MultiSteps(ls.loss_scaled(optax.sgd(0.1), POLICY), 2)
    params, state = run(optimizer, make_gradients(6, overflows=(0,)))
    check_same(PARAMS, params)
    assert np.isnan(state.acc_grads["a"]).any()


@pytest.mark.parametrize("use_grad_mean", [True, False])
def test_an_overflow_in_micro_batches_around_it_skips_the_whole_step(use_grad_mean):
    optimizer = ls.MultiSteps(
        ls.loss_scaled(optax.adam(0.1), POLICY), 2, use_grad_mean=use_grad_mean
    )
    steps = make_gradients(8, overflows=(2, 5))
    params, state = run(optimizer, steps)
    # Micro-batches 2 and 3, and 4 and 5, make one step each.
    kept = [*steps[:2], *steps[6:]]
    multi_steps = optax.MultiSteps(optax.adam(0.1), 2, use_grad_mean=use_grad_mean)
    expected, _ = run_unscaled(multi_steps, kept)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, params
    )
    assert SCALE / 4 == ls.get_scale(state)
    assert optimizer.has_updated(state)


def test_multi_steps_equals_optaxs_without_overflows():
    steps = make_gradients(7)
    for arguments in ({}, {"should_skip_update_fn": optax.skip_not_finite}):
        results = [
            run_unscaled(kind(optax.adam(0.1), 3, **arguments), steps)
            for kind in (optax.MultiSteps, ls.MultiSteps)
        ]
        check_same(*results)


def test_random_sequences_of_micro_batches_leave_no_nan():
    rng = random.Random(5)
    optimizer = ls.MultiSteps(ls.loss_scaled(optax.adam(0.1), POLICY), 3)
    for _ in range(10):
        flags = overflow_pattern(rng, 9)
        overflows = [i for i, finite in enumerate(flags) if not finite]
        params, state = run(optimizer, make_gradients(9, overflows))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_loss_scale_inside_a_loss_scale_is_refused():
    inside = optax.chain(optax.identity(), ls.loss_scaled(optax.sgd(0.1)))
    with pytest.raises(SettingError, match="already has a loss scale"):
        ls.loss_scaled(inside).init(PARAMS)


def test_optax_finds_the_parts_of_the_state():
    optimizer = ls.loss_scaled(optax.adam(0.1), Fixed(8.0))
    state = optimizer.init(PARAMS)
    assert 8.0 == optax.tree.get(state, "scale")
    assert 0 == optax.tree.get(state, "total_notfinite")
    changed = optax.tree.set(state, scale=jnp.float32(4.0))
    assert 4.0 == ls.get_scale(changed)


def test_optax_distinguishes_the_scale_from_other_fields_of_that_name():
    """A plateau has a `scale` too; the name of the tuple distinguishes them."""
    inner = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())
    state = ls.loss_scaled(inner, Fixed(8.0)).init(PARAMS)
    assert 8.0 == optax.tree.get(state, "scale_state").scale
    assert 8.0 == optax.tree.get(state, "ScaleState").scale
    assert 8.0 == ls.get_scale(state)
    with pytest.raises(KeyError, match="multiple"):
        optax.tree.get(state, "scale")


def test_functions_of_optax_read_the_fields_of_the_inner_state():
    schedule_free = optax.contrib.schedule_free_sgd(0.1)
    optimizer = ls.loss_scaled(schedule_free, Fixed(8.0))
    plain, state = schedule_free.init(PARAMS), optimizer.init(PARAMS)
    check_same(
        optax.contrib.schedule_free_eval_params(plain, PARAMS),
        optax.contrib.schedule_free_eval_params(state, PARAMS),
    )
    multi = ls.loss_scaled(
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), Fixed(8.0)
    )
    assert 0 == multi.init(PARAMS).mini_step
    injected = ls.loss_scaled(optax.inject_hyperparams(optax.sgd)(0.5), Fixed(8.0))
    assert 0.5 == injected.init(PARAMS).hyperparams["learning_rate"]
    for name in ("shape", "dtype", "missing", "__array__"):
        assert not hasattr(state, name)


def test_optax_maps_over_the_parameters_in_the_state():
    optimizer = ls.loss_scaled(optax.adam(0.1), Fixed(8.0))
    state = optimizer.init(PARAMS)
    mapped = optax.tree_map_params(
        optimizer,
        lambda leaf, name: name,
        state,
        {"a": "A", "b": "B"},
        transform_non_params=lambda _: None,
    )
    assert {"a": "A", "b": "B"} == mapped.inner_state[0].mu
    assert mapped.scale_state.scale is None


def test_inject_hyperparams_can_create_the_wrapper():
    optimizer = optax.inject_hyperparams(ls.loss_scaled)(optax.sgd(0.1), POLICY)
    check_steps(optimizer, optax.sgd(0.1), POLICY)


def test_line_searches_run_inside():
    def compute_value(x):
        return jnp.sum(x**2)

    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    optimizer = ls.loss_scaled(search, Fixed(16.0))
    params = jnp.array([1.0, 2.0])
    state = optimizer.init(params)
    grads = jax.grad(lambda x: ls.scale_loss(compute_value(x), state))(params)
    updates, _ = optimizer.update(
        grads,
        state,
        params,
        value=compute_value(params),
        grad=2 * params,
        value_fn=compute_value,
    )
    expected, _ = search.update(
        2 * params,
        search.init(params),
        params,
        value=compute_value(params),
        grad=2 * params,
        value_fn=compute_value,
    )
    check_same(expected, updates)
