"""The rule in Triton's interpreter, step for step with the recordings and the table."""

import os
import random

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from helpers.recordings import tensorflow_contrib  # noqa: E402
from helpers.sequences import overflow_pattern  # noqa: E402
from helpers.traces import read, replay  # noqa: E402

from lossscale import presets  # noqa: E402


def interpreted(policy, flags):
    """Return the states after each step, from the interpreted kernel."""
    from kernels.rule_kernel import rule_kernel

    scale = torch.tensor([policy.init_scale], dtype=torch.float32)
    good, bad = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    states = []
    for flag in flags:
        finite = torch.tensor([flag], dtype=torch.int8)
        with np.errstate(over="ignore"):  # growth past float32 is tried, then refused
            rule_kernel[(1,)](
                scale,
                good,
                bad,
                finite,
                *policy.settings,
                1,
                *policy.switches,
                False,
                16,
            )
        states.append((scale.item(), good.item(), bad.item()))
    return states


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_agrees_with_numpy_step_for_step(name):
    rng = random.Random(name)
    for _ in range(3):
        policy = presets.get(name, growth_interval=rng.randint(1, 4), init_scale=64.0)
        flags = overflow_pattern(rng, 60)
        expected = [tuple(state) for state in replay(policy, flags)]
        assert expected == interpreted(policy, flags)


def test_the_recorded_manager_is_replayed_bit_for_bit():
    rows = read("tensorflow/unit_exponential.tf1.15.5.eager")
    for row in rows:
        policy = tensorflow_contrib(row["config"])
        expected = list(zip(row["scale"], row["good"], row["bad"], strict=True))
        assert expected == interpreted(policy, row["finite"])
