# SPDX-License-Identifier: Apache-2.0
"""Where is the edge? Unscaled float16 compared with float32 at five to nine layers.

Writes results/demo_depths.csv: accuracy and lost gradients, three seeds at each depth.
"""

import csv

import numpy as np
from machine import RESULTS, describe

from lossscale import Fixed
from lossscale.demo import train

DEPTHS, SEEDS = range(5, 10), range(3)


def main() -> None:
    facts = describe("numpy")
    with (RESULTS / "demo_depths.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["layers", "seed", "run", "accuracy", "lost", *facts])
        for depth in DEPTHS:
            for seed in SEEDS:
                for name, number in (("float32", np.float32), ("float16", np.float16)):
                    run = train(name, Fixed(1.0), number, seed=seed, depth=depth)
                    values = (f"{run.accuracy:.4f}", f"{run.flushed:.4f}")
                    writer.writerow([depth, seed, name, *values, *facts.values()])
                    print(depth, seed, name, *values)


if __name__ == "__main__":
    main()
