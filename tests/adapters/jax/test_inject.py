"""`lossscale.testing.jax.inject`: what it writes, when, and what it refuses."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402
from lossscale.testing.jax import inject  # noqa: E402

TREE = {
    "a": {"kernel": np.ones((2, 3), np.float16)},
    "b": np.ones(2, np.float32),
    "n": np.arange(2),
}
KERNEL = "['a']['kernel']"


@pytest.mark.parametrize("kind", ["inf", "-inf", "nan", "huge", 7.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_number_of_one_leaf_is_written_at_its_steps(kind, compiled):
    def spoil(tree, step):
        return inject(tree, KERNEL, kind, step=step, steps=(2, 4), element=4)

    function = jax.jit(spoil) if compiled else spoil
    number = np.finfo(np.float16).max if kind == "huge" else float(kind)
    written = TREE["a"]["kernel"].copy()
    written[1, 1] = number
    for step in range(1, 6):
        found = function(TREE, jnp.int32(step))
        expected = written if step in (2, 4) else TREE["a"]["kernel"]
        np.testing.assert_array_equal(np.asarray(found["a"]["kernel"]), expected)
        assert np.float16 == found["a"]["kernel"].dtype
        np.testing.assert_array_equal(np.asarray(found["b"]), TREE["b"])
    np.testing.assert_array_equal(TREE["a"]["kernel"], np.ones((2, 3)))


def test_the_step_is_traced_in_a_scan_and_mapped_by_vmap():
    def body(carry, step):
        return carry, inject(carry, "", "nan", step=step, steps=[1, 3], element=None)

    _, found = jax.lax.scan(body, jnp.ones(2), jnp.arange(1, 5))
    assert [True, False, True, False] == jnp.isnan(found).all(axis=1).tolist()
    mapped = jax.vmap(lambda s: inject(jnp.ones(2), "", "inf", step=s, steps=2))
    assert [[False, False], [True, False]] == jnp.isinf(
        mapped(jnp.array([1, 2]))
    ).tolist()


def test_our_value_and_grad_skips_the_step_whose_scaled_gradient_is_written():
    policy = Dynamic()

    def loss(params, step):
        params = inject(params, "['w']", "inf", step=step, steps=2, where="gradient")
        return jnp.sum(params["w"].astype(jnp.float32))

    state = ls.init(policy)
    step = jax.jit(ls.value_and_grad(loss, policy))
    said = []
    for number in (1, 2, 3):
        value, grads, signal, state = step(state, {"w": jnp.ones(2)}, number)
        said.append((float(value), bool(signal.finite), float(state.scale)))
        flags = jnp.isfinite(grads["w"]).tolist()
        assert [number != 2, True] == flags
    assert [(2.0, True, 65536.0), (2.0, False, 32768.0), (2.0, True, 32768.0)] == said


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"name": "['a']['kernle']"}, SettingError, "Did you mean"),
        ({"name": "['n']"}, SettingTypeError, "int"),
        ({"value": "NaN"}, SettingError, "Did you mean 'nan'"),
        ({"value": 1e5}, SettingError, "65504"),
        ({"where": "output"}, SettingError, "'value' or 'gradient'"),
        ({"element": 6}, SettingError, "has 6 numbers"),
        ({"steps": -1}, SettingError, "first step is 1"),
    ],
)
def test_what_cannot_be_injected_is_one_error(change, error, words):
    settings = {"name": KERNEL, "value": "inf", "step": 1, "steps": 1}
    with pytest.raises(error, match=words):
        inject(TREE, **(settings | change))
