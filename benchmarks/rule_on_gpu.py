# SPDX-License-Identifier: Apache-2.0
"""Does the rule agree with NumPy on a real GPU, and what does an update cost there?

Runs the kernel of tests/kernels over every combination of switches with odd factors,
step for step with NumPy, and times one update and torch's own. It divides in
float64: in float32 Triton's `/` is an approximation, and a second run counts how often
that shows. Needs torch, triton and a GPU; writes rule_on_gpu.csv into the folder given
as its argument. No test runs it.
"""

import csv
import random
import sys
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers.rules import policies  # noqa: E402
from helpers.sequences import overflow_pattern  # noqa: E402
from helpers.traces import replay  # noqa: E402
from kernels.rule_kernel import rule_kernel  # noqa: E402

STEPS = 60
QUANTILES = (0.2, 0.5, 0.8)


def launch(policy, state, finite, *, wide: bool) -> None:
    """Take one step in place; `wide` divides in float64."""
    settings, switches = policy.settings, policy.switches
    rule_kernel[(1,)](*state, finite, *settings, 1, *switches, wide, 16)


def trajectory(policy, flags, *, wide: bool) -> list[tuple]:
    """Return the states after each step on the GPU."""
    scale = torch.tensor([policy.init_scale], dtype=torch.float32, device="cuda")
    counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)]
    state = (scale, *counters)
    states = []
    for flag in flags:
        finite = torch.tensor([flag], dtype=torch.int8, device="cuda")
        launch(policy, state, finite, wide=wide)
        states.append(tuple(value.item() for value in state))
    return states


def count_equal_steps(*, wide: bool) -> dict[str, int]:
    """Count steps that equal NumPy's, apart for policies that divide."""
    rng = random.Random(0)
    counts = {"multiplies": 0, "divides": 0, "differs": 0}
    for policy in policies():
        flags = overflow_pattern(rng, STEPS)
        expected = [tuple(state) for state in replay(policy, flags)]
        actual = trajectory(policy, flags, wide=wide)
        equal = sum(e == a for e, a in zip(expected, actual, strict=True))
        key = "divides" if policy.switches.backoff_divides else "multiplies"
        counts[key] += equal
        counts["differs"] += STEPS - equal
    return counts


def times() -> dict[str, list[float]]:
    """Return quantiles of one update in microseconds, ours and torch's."""
    policy = next(iter(policies()))
    scale = torch.tensor([65536.0], device="cuda")
    good, bad = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    finite = torch.ones(1, dtype=torch.int8, device="cuda")
    found = torch.zeros(1, device="cuda")
    runs = {
        "lossscale": lambda: launch(policy, (scale, good, bad), finite, wide=True),
        "torch": lambda: torch._amp_update_scale_(scale, good, found, 2.0, 0.5, 2000),
    }
    return {
        name: [1000 * t for t in triton.testing.do_bench(run, quantiles=QUANTILES)]
        for name, run in runs.items()
    }


def main(folder: str) -> None:
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    rows = []
    for wide in (True, False):
        name = f"division in {'float64' if wide else 'float32'}"
        for what, steps in count_equal_steps(wide=wide).items():
            rows.append((f"steps, {name}", what, steps, "", ""))
    for name, (low, middle, high) in times().items():
        values = (f"{value:.2f}" for value in (low, middle, high))
        rows.append(("microseconds (20, 50, 80 %)", name, *values))
    path = Path(folder) / "rule_on_gpu.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "of", "value", "middle", "high", *facts])
        for row in rows:
            writer.writerow([*row, *facts.values()])
            print(*row)


if __name__ == "__main__":
    main(sys.argv[1])
