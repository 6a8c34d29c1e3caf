# SPDX-License-Identifier: Apache-2.0
"""How well does a backtest predict what other policies really do?

    python benchmarks/backtest.py

Two networks are trained with each policy, from the same weights on the same batches,
and recorded. Each of two records per network then predicts all the others. The last
rows compare the training with a bad start with the one that `recommend` makes of its
record. The networks: the demonstration's, in NumPy, and a recurrent network in PyTorch
that predicts the next character of this project's pages, under autocast in float16,
with a loss that is summed over time. Both really overflow.

One column is the skipped steps of the real training ("skipped"), next to what the
backtest says is likely, and its bounds. Scales are powers of two. "lost" is the share
of gradient values that are zero in the sampled steps, those that are zero indeed
included: those of the prediction are its lower and its upper number.

Ten minutes of one core at most. Writes benchmarks/results/backtest.csv.
"""

import csv
import tempfile
import time
from math import log2
from pathlib import Path

import machine
import numpy as np
import torch

import lossscale
from lossscale.cli.demo_runs import DemoRuns
from lossscale.cli.policies import parse_policy
from lossscale.demo.training import train
from lossscale.diagnostics import Recorder, backtest, recommend
from lossscale.torch import GradScaler

POLICIES = (
    "dynamic:growth_interval=20",
    "dynamic:growth_interval=100",
    "torch",
    "megatron",
    "fixed:2**10",
    "fixed:2**18",
    "headroom",
    "log_max",
    "overflow_rate:growth_interval=20",
)
RECORDS = ("dynamic:growth_interval=20", "fixed:2**4")
BEFORE = "dynamic:init_scale=2**24,growth_interval=20"
"""A start that is too high, and growths that often lead to a skip."""


def train_demo(path, policy, steps=300):
    """Train the demonstration's network, and record it."""
    with DemoRuns(path.parent, lambda: None) as runs:
        train(path.stem, policy, np.float16, steps=steps, on_step=runs.add)


class Characters(torch.nn.Module):
    """A plain recurrent network: a character in, the next one out."""

    def __init__(self, size, width=96):
        super().__init__()
        self.embedding = torch.nn.Embedding(size, width)
        self.inner = torch.nn.Linear(width, width)
        self.output = torch.nn.Linear(width, size)

    def forward(self, rows):
        """Return the logits of the next characters."""
        state = torch.zeros(rows.shape[0], self.inner.in_features)
        logits = []
        for column in self.embedding(rows).unbind(1):
            state = torch.tanh(self.inner(state) + column)
            logits.append(self.output(state))
        return torch.stack(logits, 1)


def load_text():
    """Return this project's pages as numbers, and how many characters there are."""
    folder = Path(__file__).parent.parent / "docs"
    names = ("why.md", "how-it-works.md", "recording.md", "distributed.md")
    text = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    letters = sorted(set(text))
    return torch.tensor([letters.index(letter) for letter in text]), len(letters)


def train_characters(path, policy, steps=400, length=24, rows=16):
    """Train the recurrent network, and record it."""
    torch.manual_seed(0)
    text, size = load_text()
    model = Characters(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    names = [name for name, _ in model.named_parameters()]
    with Recorder(
        path, policy=policy, names=names, statistics_every=10, writers=()
    ) as recorder:
        scaler = GradScaler(
            "cpu", policy=policy, module=model, on_step=recorder, measure_amax=True
        )
        for _ in range(steps):
            starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
            batch = torch.stack([text[i : i + length + 1] for i in starts.tolist()])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(batch[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(),
                    batch[:, 1:].flatten(),
                    reduction="sum",
                )
            scaler.scale(loss / rows).backward()
            scaler.step(optimizer)
            scaler.update()
        scaler.flush()


MODELS = {"demonstration": train_demo, "recurrent": train_characters}


class Runs:
    """Trains with a policy once, and keeps the record."""

    def __init__(self, folder, model):
        self.folder, self.model = folder / model, model
        self.folder.mkdir()
        self.paths = {}

    def path(self, text, policy=None):
        """Return the record of the training with a policy."""
        if text not in self.paths:
            self.paths[text] = self.folder / f"run{len(self.paths)}.jsonl"
            MODELS[self.model](self.paths[text], policy or parse_policy(text))
        return self.paths[text]

    def real(self, text, policy=None):
        """Return what a training with a policy really did."""
        found = backtest(self.path(text, policy), [lossscale.Fixed(1.0)])
        return found.recorded


def predictions(model, runs):
    """Yield a row for each policy that a record predicts."""
    for record in RECORDS:
        others = [text for text in POLICIES if text != record]
        policies = {text: parse_policy(text) for text in others}
        found = backtest(runs.path(record), policies)
        for text, outcome in found.outcomes.items():
            real = runs.real(text)
            yield row("prediction", model, record, text, outcome, real)


def recommendations(model, runs):
    """Yield what the policy was like that was recommended, before and after."""
    found = recommend(runs.path(BEFORE))
    text = found.code.splitlines()[-2].removeprefix("policy = ")
    before, after = runs.real(BEFORE), runs.real(text, found.policy)
    yield row("before", model, "", BEFORE, None, before)
    yield row("recommended", model, BEFORE, text, found.outcome, after)


def row(kind, model, record, policy, likely, real):
    skipped = None if likely is None else likely.skipped
    return {
        "kind": kind,
        "model": model,
        "record": record,
        "policy": policy,
        "predicted_skipped": "" if skipped is None else skipped.likely,
        "predicted_low": "" if skipped is None else skipped.low,
        "predicted_high": "" if skipped is None else skipped.high,
        "skipped": real.skipped.likely,
        "predicted_median_scale": "" if likely is None else power(likely.median_scale),
        "median_scale": power(real.median_scale),
        "predicted_lost_known": "" if likely is None else f"{likely.lost.known:.4f}",
        "predicted_lost_most": "" if likely is None else f"{likely.lost.most:.4f}",
        "lost": f"{real.lost.most:.4f}",
    }


def power(estimate):
    return f"{log2(estimate.likely):.1f}"


def main():
    start = time.process_time()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            runs = Runs(Path(folder), model)
            for make in (predictions, recommendations):
                for one in make(model, runs):
                    rows.append(one)
                    print(*one.values(), sep=" | ", flush=True)
    described = machine.describe("numpy", "torch")
    seconds = round(time.process_time() - start)
    with (machine.RESULTS / "backtest.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *described, "processor_seconds"])
        writer.writeheader()
        writer.writerows({**r, **described, "processor_seconds": seconds} for r in rows)


if __name__ == "__main__":
    main()
