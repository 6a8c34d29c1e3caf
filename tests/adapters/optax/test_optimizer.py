"""`loss_scaled` step by step: against optax alone, and against the NumPy reference."""

import random

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy

from helpers.sequences import draw, overflow_pattern  # noqa: E402
from helpers.traces import replay  # noqa: E402
from helpers.trees import check_same  # noqa: E402

import lossscale.optax as ls  # noqa: E402
from lossscale import Dynamic, Fixed, presets  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    SettingError,
    SettingTypeError,
    StructureError,
)

SKIPS = pytest.mark.parametrize("skip", ["select", "cond"])


def make_chain():
    """Return an optimizer with clipping, moments and a schedule."""
    schedule = optax.linear_schedule(0.1, 0.01, 50)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_params():
    return {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones(3)}


def make_gradients(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=3), jnp.float32),
    }


def multiply(tree, factor):
    return jax.tree.map(lambda leaf: leaf * jnp.float32(factor), tree)


def make_overflow(tree, value=jnp.inf):
    return tree | {"b": tree["b"].at[1].set(value)}


def test_the_check_of_trees_can_fail():
    for other in (jnp.float32(2.0), jnp.float16(1.0), (jnp.float32(1.0),)):
        with pytest.raises(AssertionError):
            check_same(jnp.float32(1.0), other)


@SKIPS
def test_finite_steps_equal_those_of_the_wrapped_optimizer(skip):
    inner, params = make_chain(), make_params()
    optimizer = ls.loss_scaled(make_chain(), Fixed(1024.0), skip=skip)
    expected_state, state = inner.init(params), optimizer.init(params)
    update, inner_update = jax.jit(optimizer.update), jax.jit(inner.update)
    for seed in range(5):
        grads = make_gradients(seed)
        expected, expected_state = inner_update(grads, expected_state, params)
        actual, state = update(multiply(grads, 1024.0), state, params)
        check_same(expected, actual)
        check_same(expected_state, state.inner_state)
        params = optax.apply_updates(params, actual)
    assert (True, False, 0, 0) == tuple(map(int, state[2:]))


@SKIPS
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_an_overflow_changes_only_the_scale_and_the_counts(skip, value):
    optimizer = ls.loss_scaled(make_chain(), Dynamic(init_scale=1024.0), skip=skip)
    params = make_params()
    _, before = optimizer.update(make_gradients(0), optimizer.init(params), params)
    updates, after = optimizer.update(
        make_overflow(make_gradients(1), float(value)), before, params
    )
    check_same(jax.tree.map(jnp.zeros_like, params), updates)
    check_same(before.inner_state, after.inner_state)
    check_same(params, optax.apply_updates(params, updates))
    assert (512.0, False, 1, 1) == (ls.get_scale(after), after.last_finite, *after[4:])


@SKIPS
def test_the_counts_are_those_of_apply_if_finite(skip):
    rng = random.Random(1)
    params = make_params()
    ours = ls.loss_scaled(optax.adam(0.1), Fixed(1.0), skip=skip)
    theirs = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=10**6)

    @jax.jit
    def run(flags):
        def step(states, finite):
            grads = make_overflow(make_gradients(0), jnp.where(finite, 1.0, jnp.nan))
            our_updates, our_state = ours.update(grads, states[0], params)
            their_updates, their_state = theirs.update(grads, states[1], params)
            counts = [
                (s.last_finite, s.notfinite_count, s.total_notfinite)
                for s in (their_state, our_state)
            ]
            outputs = *counts, their_updates, our_updates
            return (our_state, their_state), outputs

        first = (ours.init(params), theirs.init(params))
        return jax.lax.scan(step, first, flags)[1]

    for _ in range(20):
        expected, actual, updates, our_updates = run(
            jnp.asarray(overflow_pattern(rng, 40))
        )
        check_same(expected, actual)
        # XLA fuses them differently.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            updates,
            our_updates,
        )


@SKIPS
def test_the_scale_follows_the_reference(skip):
    rng = random.Random(2)
    params = jnp.zeros(2)
    for name in ("torch", "flax", "jmp", "megatron", "deepspeed"):
        policy = presets.get(name, init_scale=256.0, growth_interval=3)
        optimizer = ls.loss_scaled(optax.sgd(0.1), policy, skip=skip)

        @jax.jit
        def run(flags, optimizer=optimizer):
            def step(state, finite):
                grads = jnp.where(finite, jnp.ones(2), jnp.full(2, jnp.nan))
                _, after = optimizer.update(grads, state, params)
                return after, after.scale_state

            return jax.lax.scan(step, optimizer.init(params), flags)[1]

        for _ in range(10):
            flags = overflow_pattern(rng, 40)
            states = run(jnp.asarray(flags))
            actual = [tuple(map(float, row)) for row in zip(*states, strict=True)]
            assert [tuple(map(float, s)) for s in replay(policy, flags)] == actual


def test_the_inner_chain_clips_unscaled_gradients():
    clip = optax.clip_by_global_norm(1.0)
    optimizer = ls.loss_scaled(clip, Fixed(2.0**20))
    grads = jnp.array([0.3, 0.4])
    state = optimizer.init(grads)
    updates, _ = optimizer.update(grads * jnp.float32(2.0**20), state)
    check_same(grads, updates)


def test_select_and_cond_give_the_same_steps_with_any_policy():
    rng = random.Random(3)
    params = make_params()
    for _ in range(2):
        settings = draw(
            rng, growth_interval=(1, 2), hysteresis=(1, 2), init_scale=(1.0, 512.0)
        )
        flags = jnp.asarray(overflow_pattern(rng, 12))
        results = []
        for skip in ("select", "cond"):
            optimizer = ls.loss_scaled(make_chain(), Dynamic(**settings), skip=skip)

            def step(state, finite, optimizer=optimizer):
                grads = make_overflow(
                    make_gradients(4), jnp.where(finite, 0.5, jnp.inf)
                )
                updates, after = optimizer.update(grads, state, params)
                return after, updates

            results.append(
                jax.jit(jax.lax.scan, static_argnums=0)(
                    step, optimizer.init(params), flags
                )
            )
        check_same(*results)


@SKIPS
def test_nothing_is_compiled_again_and_buffers_can_be_donated(skip):
    optimizer = ls.loss_scaled(make_chain(), Dynamic(growth_interval=2), skip=skip)
    traces = []

    def step(params, state, grads):
        traces.append(1)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = make_params()
    state = optimizer.init(params)
    for seed in range(6):
        old = params, state
        grads = (
            make_gradients(seed) if seed % 3 else make_overflow(make_gradients(seed))
        )
        params, state = compiled(params, state, grads)
        # jit drops unused arguments, and does not donate their buffers.
        read = (old[0], old[1]._replace(last_finite=None, last_too_large=None))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(read))
    assert [1] == traces


@SKIPS
def test_the_types_of_the_state_never_change(skip):
    optimizer = ls.loss_scaled(make_chain(), Dynamic(), skip=skip)
    params = make_params()
    before = optimizer.init(params)
    _, after = optimizer.update(make_gradients(0), before, params)
    assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)
    assert "float32[] int32[] int32[]" == " ".join(
        str(jax.typeof(leaf)) for leaf in after.scale_state
    )


@SKIPS
def test_each_element_of_a_vmap_has_its_own_scale(skip):
    optimizer = ls.loss_scaled(optax.adam(0.1), Dynamic(init_scale=8.0), skip=skip)
    params = jnp.zeros((3, 2))
    states = jax.vmap(optimizer.init)(params)
    grads = jnp.array([[1.0, 1.0], [1.0, jnp.inf], [2.0, 2.0]])
    updates, states = jax.vmap(optimizer.update)(grads, states, params)
    assert [8.0, 4.0, 8.0] == ls.get_scale(states).tolist()
    assert [True, False, True] == states.last_finite.tolist()
    assert [1, 0, 1] == states.inner_state[0].count.tolist()
    assert [0.0, 0.0] == updates[1].tolist()
    one, _ = optimizer.update(grads[0], optimizer.init(params[0]), params[0])
    assert one.tolist() == updates[0].tolist()


def test_the_members_of_an_axis_skip_together():
    optimizer = ls.loss_scaled(
        optax.sgd(1.0), Dynamic(init_scale=8.0), axis_name="lane"
    )
    params = jnp.zeros((3, 2))
    grads = jnp.array([[1.0, 1.0], [1.0, jnp.inf], [2.0, 2.0]])
    states = jax.vmap(optimizer.init)(params)
    update = jax.vmap(optimizer.update, axis_name="lane")
    updates, states = update(grads, states, params)
    assert [4.0, 4.0, 4.0] == ls.get_scale(states).tolist()
    assert 0.0 == jnp.abs(updates).max()


@SKIPS
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_moments_of_half_precision_parameters_are_float32(skip, dtype):
    optimizer = ls.loss_scaled(optax.adamw(0.25), Fixed(1024.0), skip=skip)
    params = jnp.array([1.0, 2.0], dtype)
    state = optimizer.init(params)
    # The square of 2**-20 is 0 in float16.
    grads = jnp.full(2, 2.0**-10, dtype)
    updates, after = optimizer.update(grads, state, params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
    moments = after.inner_state[0]
    assert (jnp.float32, dtype) == (moments.nu.dtype, updates.dtype)
    reference, expected = optax.adamw(0.25), params.astype(jnp.float32)
    _, expected = reference.update(
        jnp.full(2, 2.0**-20), reference.init(expected), expected
    )
    check_same(expected, after.inner_state)


def test_a_gradient_that_overflows_when_it_is_unscaled_is_skipped():
    optimizer = ls.loss_scaled(optax.sgd(0.1), Fixed(2.0**-100))
    params = jnp.zeros(2)
    updates, state = optimizer.update(
        jnp.array([1.0, 1e20]), optimizer.init(params), params
    )
    assert not state.last_finite
    check_same(jnp.zeros(2), updates)


def test_none_and_masked_leaves_pass_through():
    optimizer = ls.loss_scaled(optax.adam(0.1), Fixed(4.0))
    params = {"a": jnp.ones(2), "b": None, "c": optax.MaskedNode()}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    assert params.keys() == updates.keys()
    assert updates["b"] is None
    assert optax.MaskedNode() == updates["c"]
    assert state.last_finite


def test_a_tree_without_gradients_is_a_finite_step():
    optimizer = ls.loss_scaled(optax.adam(0.1))
    _, state = optimizer.update({}, optimizer.init({}), {})
    assert state.last_finite


def test_state_of_float8_layers_is_not_unscaled():
    optimizer = ls.loss_scaled(optax.identity(), Fixed(4.0))
    grads = {"_overwrite_with_gradient": jnp.array(1e30), "w": jnp.array(8.0)}
    updates, state = optimizer.update(grads, optimizer.init(grads))
    assert state.last_finite
    assert (1e30, 2.0) == (
        pytest.approx(updates["_overwrite_with_gradient"]),
        updates["w"],
    )


def test_a_nonfinite_loss_can_hold_the_scale():
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    optimizer = ls.loss_scaled(optax.sgd(0.1), policy)
    params = jnp.zeros(2)
    state = optimizer.init(params)
    nan_grads = jnp.full(2, jnp.nan)
    for loss, scale in ((jnp.nan, 8.0), (1.0, 4.0)):
        updates, after = optimizer.update(
            nan_grads, state, params, value=jnp.float32(loss)
        )
        assert (scale, False) == (ls.get_scale(after), after.last_finite)
        check_same(jnp.zeros(2), updates)


@SKIPS
def test_extra_arguments_are_passed_to_the_wrapped_optimizer(skip):
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    optimizer = ls.loss_scaled(plateau, Fixed(4.0), skip=skip)
    grads, value = jnp.ones(2), jnp.float32(1.0)
    expected_state, state = plateau.init(grads), optimizer.init(grads)
    for _ in range(3):
        expected, expected_state = plateau.update(grads, expected_state, value=value)
        actual, state = optimizer.update(multiply(grads, 4.0), state, value=value)
    check_same((expected, expected_state), (actual, state.inner_state))
    assert 1.0 != state.inner_state.scale


def test_an_update_has_no_host_callback():
    optimizer = ls.loss_scaled(make_chain(), Dynamic())
    params = make_params()
    text = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
    assert "callback" not in text
    assert "cond[" not in text


def test_random_keys_in_the_inner_state_do_not_change_on_an_overflow():
    for key in (0, jax.random.key(0)):
        noise = optax.add_noise(eta=0.1, gamma=0.5, key=key)
        optimizer = ls.loss_scaled(noise, Dynamic())
        before = optimizer.init(jnp.ones(2))
        _, after = optimizer.update(jnp.full(2, jnp.inf), before)
        assert bool(jnp.all(before.inner_state.rng_key == after.inner_state.rng_key))
        _, after = optimizer.update(jnp.ones(2), before)
        assert not jnp.all(before.inner_state.rng_key == after.inner_state.rng_key)


@SKIPS
def test_the_wrapper_does_not_rely_on_implicit_promotion(skip):
    # Only the simple optimizers of optax do not rely on it.
    optimizer = ls.loss_scaled(optax.sgd(0.5, momentum=0.5), Fixed(8.0), skip=skip)
    params = jnp.ones(2)
    with jax.numpy_dtype_promotion("strict"):
        state = optimizer.init(params)
        for dtype in (jnp.float16, jnp.float32):
            grads = jnp.full(2, 8.0, dtype)
            updates, state = optimizer.update(
                grads, state, params, value=jnp.float16(1.0)
            )
    assert [-0.75, -0.75] == updates.tolist()


def test_init_works_on_shapes_alone():
    optimizer = ls.loss_scaled(make_chain())
    shapes = jax.eval_shape(optimizer.init, make_params())
    assert jax.tree.structure(optimizer.init(make_params())) == jax.tree.structure(
        shapes
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Dynamic(), optax.sgd(0.1)), "inner must be an optax optimizer"),
        ((optax.sgd(0.1), 1024.0), "policy must be a policy"),
        ((optax.sgd, Dynamic()), "inner must be an optax optimizer"),
    ],
)
def test_wrong_arguments_raise_errors_that_name_them(arguments, message):
    with pytest.raises(SettingTypeError, match=message):
        ls.loss_scaled(*arguments)


def test_an_unknown_value_of_skip_is_reported():
    with pytest.raises(SettingError, match="skip must be 'select' or 'cond'"):
        ls.loss_scaled(optax.sgd(0.1), skip="never")


def test_a_gradient_of_integers_is_reported():
    optimizer = ls.loss_scaled(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    with pytest.raises(GradientError, match="'w'"):
        optimizer.update({"w": jnp.arange(2)}, optimizer.init(params), params)


def test_an_optimizer_that_changes_the_dtype_of_its_state_is_reported():
    def update(updates, state, params=None):
        return updates, state.astype(jnp.float16)

    changing = optax.GradientTransformation(lambda _: jnp.zeros(()), update)
    optimizer = ls.loss_scaled(changing)
    with pytest.raises(StructureError, match="differ"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))


def test_the_default_policy_is_dynamic():
    state = ls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
    assert Dynamic().init_scale == ls.get_scale(state)


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"w": jnp.ones(2)}, r"only the gradients have \[\], .* \[\"\['b'\]\"\]"),
        ({"w": jnp.ones(2), "c": jnp.ones(1)}, r"have \[\"\['c'\]\"\], .*'b'"),
        ([jnp.ones(2), jnp.ones(1)], r"have \['\[0\]', '\[1\]'\]"),
    ],
)
def test_gradients_of_another_structure_are_reported(grads, words, skip):
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    optimizer = ls.loss_scaled(optax.adam(0.1), skip=skip)
    state = optimizer.init(params)
    with pytest.raises(StructureError, match=f"structure of the parameters: .*{words}"):
        optimizer.update(grads, state, params)


def test_an_error_of_the_wrapped_optimizer_is_its_own():
    optimizer = ls.loss_scaled(optax.add_decayed_weights(0.1))
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="params"):
        optimizer.update(params, optimizer.init(params))


def test_the_count_of_micro_batches_is_checked_at_construction():
    with pytest.raises(SettingError, match="whole number of micro-batches, 1 or more"):
        ls.MultiSteps(optax.sgd(0.1), 0)
    with pytest.raises(SettingTypeError, match="every_k_schedule must be a whole"):
        ls.MultiSteps(optax.sgd(0.1), "2")
    with pytest.raises(SettingTypeError, match="opt must be an optax optimizer"):
        ls.MultiSteps(2, optax.sgd(0.1))
    params = jnp.ones(2)
    for every, mean in ((2, False), (lambda step: 2, True), (np.int64(2), False)):
        optimizer = ls.MultiSteps(optax.sgd(1.0), every, mean)
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(jnp.ones(2), state, params)
        assert [-1.0 if mean else -2.0] * 2 == updates.tolist()
