# SPDX-License-Identifier: Apache-2.0
"""How many of the first 100 updates does the start of the scale cost?

Writes results/start.csv: for the network of `lossscale demo`, three more float16 models
and the examples of five frameworks, from the first scales that libraries have (2**16:
PyTorch; 2**24: MindSpore; 2**32: Megatron), the updates lost in the first 100 steps

    dynamic        with `Dynamic`
    auto           with `AutoStart`, whose attempts each cost a batch
    auto, retried  with `AutoStart` where a batch of the search is computed again
    all retried    the same, with every later overflow retried too (JAX: `with_retries`)

An example runs its own training loop, so it has only the columns that this loop can
have: attempts around a step in PyTorch, `with_retries` in JAX.

    python benchmarks/start.py            runs, and writes rows as they come
    python benchmarks/start.py --table    the table, from the file
"""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import RESULTS, describe
from start_examples import STARTS, STEPS

from lossscale import AutoStart, Dynamic

STARTS_OF_LIBRARIES = (2.0**16, 2.0**24, 2.0**32)
FILE = RESULTS / "start.csv"
COLUMNS = ["model", "init_scale", "start", "lost_updates", "attempts", "scale"]


def main() -> None:
    import float16_models  # JAX, which a table does not need

    models: dict[str, Any] = {
        name: kind() for name, kind in float16_models.MODELS.items()
    }
    facts = describe("numpy", "jax", "torch", "tensorflow-cpu", "keras")
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *facts])
        for name in [*models, *STARTS]:
            for scale in STARTS_OF_LIBRARIES:
                rule = Dynamic(init_scale=scale)
                auto = AutoStart(rule)
                for label, policy, retries in (
                    ("dynamic", rule, 0),
                    ("auto", auto, 0),
                    ("auto, retried", auto, auto.tries),
                    ("all retried", auto, auto.tries),
                ):
                    if name in models:
                        outcome = float16_models.run(
                            models[name],
                            policy,
                            0,
                            steps=STEPS,
                            retries=retries,
                            every_overflow=label == "all retried",
                        )
                        found = [
                            STEPS - outcome.first_updates,
                            outcome.attempts,
                            outcome.final_scale,
                        ]
                    elif label in STARTS[name]:
                        found = run_example(name, scale, label)
                    else:
                        continue
                    writer.writerow([name, scale, label, *found, *facts.values()])
                    file.flush()
    print_table()


def run_example(name: str, scale: float, start: str) -> list[float]:
    """Return lost updates, attempts and scale of an example, from its own process."""
    script = Path(__file__).with_name("start_examples.py")
    arguments = [sys.executable, str(script), name, str(scale), start]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(  # noqa: S603  # our own script
        arguments, env=quiet, check=True, capture_output=True, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


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
