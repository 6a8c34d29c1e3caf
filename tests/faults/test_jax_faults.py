"""A short run of the fault harness on JAX and optax; see tools/run_faults.py."""

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("flax", reason="flax is not installed")
pytest.importorskip("jmp", reason="jmp is not installed")

from faults import jax_driver

STEPS = 300


@pytest.mark.parametrize("configuration", jax_driver.CONFIGURATIONS)
def test_no_fault_changes_weights_or_state(configuration):
    outcome = jax_driver.run(configuration, own=False, steps=STEPS, seed=3)
    assert "" == outcome.broken
    # Three micro-batches make one step, which one fault skips.
    minimum = STEPS // 30 if "around" in configuration else STEPS // 10
    assert outcome.applied > minimum
    assert outcome.skipped > minimum


@pytest.mark.parametrize(
    "configuration",
    ["adam: loss_scaled", "adam: value_and_grad", "adamw: loss_scaled, cond"],
)
def test_the_scales_of_flax_and_jmp_fail_with_the_same_faults(configuration):
    outcome = jax_driver.run(configuration, own=True, steps=2000, seed=3)
    assert outcome.broken
