# SPDX-License-Identifier: Apache-2.0
"""Does scaled float16 match float32 beyond one lucky seed? Ten seeds of the demo.

Writes results/demo_seeds.csv: accuracy, lost gradients and skipped steps of every run.
"""

import csv
import time

import numpy as np
from machine import RESULTS, describe

from lossscale.demo import compare

SEEDS = 10


def main() -> None:
    facts = describe("numpy")
    columns = [
        "seed",
        "run",
        "accuracy",
        "final_loss",
        "lost",
        "skipped",
        "final_scale",
    ]
    accuracies: dict[str, list[float]] = {}
    start = time.perf_counter()
    with (RESULTS / "demo_seeds.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])
        for seed in range(SEEDS):
            for run in compare(seed=seed):
                accuracies.setdefault(run.name, []).append(run.accuracy)
                values = [f"{run.accuracy:.4f}", f"{run.final_loss:.4f}"]
                values += [
                    f"{run.flushed:.4f}",
                    int(run.skipped.sum()),
                    run.final_scale,
                ]
                writer.writerow([seed, run.name, *values, *facts.values()])
    for name, values in accuracies.items():
        print(f"{name:24} {np.mean(values):6.1%} +- {np.std(values, ddof=1):.2%}")
    print(f"{(time.perf_counter() - start) / SEEDS:.1f} s a seed")


if __name__ == "__main__":
    main()
