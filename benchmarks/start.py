# SPDX-License-Identifier: Apache-2.0
"""How many of the first 100 updates does the start of the scale cost?

Writes results/start.csv: for the network of `lossscale demo`, three more float16 models
and examples/train_torch.py, from the first scales that libraries have (2**16: PyTorch;
2**24: MindSpore; 2**32: Megatron), the updates lost in the first 100 steps

    dynamic        with `Dynamic`
    auto           with `AutoStart`, whose attempts each cost a batch
    auto, retried  with `AutoStart` where a batch of the search is computed again
    all retried    the same, with every later overflow retried too (JAX: `with_retries`)

The other examples train the same network by the same optimizer as train_torch.py.

    python benchmarks/start.py            runs, and writes rows as they come
    python benchmarks/start.py --table    the table, from the file
"""

import csv
import math
import sys
from pathlib import Path
from typing import Any

from machine import RESULTS, describe

from lossscale import AutoStart, Dynamic

STEPS = 100
STARTS = (2.0**16, 2.0**24, 2.0**32)
FILE = RESULTS / "start.csv"
COLUMNS = ["model", "init_scale", "start", "lost_updates", "attempts", "scale"]


def main() -> None:
    import float16_models  # JAX, which a table does not need

    models: dict[str, Any] = {
        name: kind() for name, kind in float16_models.MODELS.items()
    }
    facts = describe("numpy", "jax", "torch")
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *facts])
        for name in [*models, "train_torch.py"]:
            for scale in STARTS:
                rule = Dynamic(init_scale=scale)
                auto = AutoStart(rule, jump=round(math.log2(scale) / 4))
                for label, policy, retries in (
                    ("dynamic", rule, 0),
                    ("auto", auto, 0),
                    ("auto, retried", auto, auto.tries),
                    ("all retried", auto, auto.tries),
                ):
                    every = label == "all retried"
                    if every and name not in models:
                        continue  # GradScaler.attempts retries the search alone
                    if name in models:
                        outcome = float16_models.run(
                            models[name],
                            policy,
                            0,
                            steps=STEPS,
                            retries=retries,
                            every_overflow=every,
                        )
                        found = (
                            STEPS - outcome.first_updates,
                            outcome.attempts,
                            outcome.final_scale,
                        )
                    else:
                        found = run_example(policy, retried=retries > 0)
                    writer.writerow([name, scale, label, *found, *facts.values()])
                    file.flush()
    print_table()


def run_example(policy: Any, *, retried: bool) -> tuple[int, int, float]:
    """Run the training loop of examples/train_torch.py with a policy.

    Returns the lost updates, how often a batch was computed again, and the scale.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import torch
    import train_torch as example

    from lossscale.torch import GradScaler

    scaler = GradScaler(example.DEVICE, policy=policy)
    run = example.make_run(scaled=True)._replace(scaler=scaler)
    random = torch.Generator().manual_seed(0)
    updates = attempts = 0
    for _ in range(STEPS):
        rows = torch.randint(
            len(example.DIGITS.train_labels), (example.BATCH_SIZE,), generator=random
        ).to(example.DEVICE)
        images = example.DIGITS.train_images[rows]
        labels = example.DIGITS.train_labels[rows]
        for attempt in scaler.attempts() if retried else (1,):
            attempts += attempt > 1
            loss = example.compute_loss(run.model, images, labels, half=True)
            example.train_step(run, loss)
        updates += bool(scaler.last_step.applied)
    return STEPS - updates, attempts, scaler.get_scale()


def print_table() -> None:
    """Print the lost updates as a table of Markdown."""
    lost: dict[tuple[str, str], dict[str, str]] = {}
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["model"], row["init_scale"]
            lost.setdefault(key, {})[row["start"]] = row["lost_updates"]
    print("| model | first scale | dynamic | auto | auto, retried | all retried |")
    print("|---|---|---|---|---|---|")
    for (model, scale), found in lost.items():
        names = ("dynamic", "auto", "auto, retried", "all retried")
        cells = [found.get(name, "") for name in names]
        print(f"| {model} | 2^{math.log2(float(scale)):.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    print_table() if "--table" in sys.argv else main()
