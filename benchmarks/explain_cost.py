# SPDX-License-Identifier: Apache-2.0
"""How much more processor time than a plain step does an explanation take?

    python benchmarks/explain_cost.py benchmarks/results/explain_cost.csv

The GPT of six layers of benchmarks/observers.py on a CPU, under float16 autocast. In
turns: forward and backward of one batch; the same batch explained, finite, with a NaN
in an embedding (one run), and at a scale that is too high (lower scales are tried as
well). The thread's processor time, as a ratio to the plain step of the same turn; the
median of the turns.
"""

import csv
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from machine import describe
from observers import LENGTH, WORDS, Gpt

from lossscale.torch import GradScaler

TURNS = 5


class Batch:
    """A model, a batch, and a scaler at a given scale."""

    def __init__(self, scale=1024.0, *, has_nan=False):
        torch.manual_seed(0)
        self.model = Gpt()
        self.tokens = torch.randint(WORDS, (2, LENGTH))
        if has_nan:
            with torch.no_grad():
                self.model.words.weight[self.tokens[0, 0], 0] = math.nan
        self.scaler = GradScaler("cpu", init_scale=scale, module=self.model)

    def step(self):
        """Run forward and backward."""
        with torch.autocast("cpu", torch.float16):
            logits = self.model(self.tokens)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), self.tokens.flatten()
            )
        self.scaler.scale(loss).backward()

    def explain(self):
        """Explain the step."""
        return self.scaler.explain(self.step)


def measure(call):
    """Return the processor time of a call in this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main(outputs):
    torch.set_num_threads(1)
    cases = {
        "finite": Batch(),
        "NaN in a parameter": Batch(has_nan=True),
        "scale too high": Batch(scale=2.0**60),
    }
    plain = Batch()
    plain.step()
    runs = {name: 1 + len(batch.explain().trials) for name, batch in cases.items()}
    ratios = {name: [] for name in cases}
    for _ in range(TURNS):
        plain.model.zero_grad()
        unit = measure(plain.step)
        for name, batch in cases.items():
            ratios[name].append(measure(batch.explain) / unit)
    machine = describe("torch")
    rows = [
        (name, runs[name], round(statistics.median(ratios[name]), 1), *machine.values())
        for name in cases
    ]
    head = "batch", "runs of the batch", "processor time over that of a step"
    for row in rows:
        print(*row[:3], sep=", ")
    for output in outputs:
        with Path(output).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*head, *machine])
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
