# SPDX-License-Identifier: Apache-2.0
"""What does a Recorder cost a training step, and does the host wait for it?

    python benchmarks/recording_step.py cuda results.csv    GPT-2 124 M, 8,192 tokens
    python benchmarks/recording_step.py cpu                 a small one, to try it

Steps with and without a recorder take turns in one run, 50 steps at a time, so that
every turn with a recorder has one step with tensor statistics. A ratio is the median of
the turns, each compared with the turn before it. On a GPU the time is that between two
CUDA events; the wall time of the same turns is printed as well. Operators and host
waits are counted in steps that are not timed: the operators are those on tensors of the
device, the waits those that torch warns of.
"""

import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lossscale.diagnostics import Recorder, read_run
from lossscale.torch import GradScaler

SIZES = {
    # layers, width, heads, words, length, batch, turns
    "cuda": (12, 768, 12, 50_257, 1_024, 8, 5),
    "cpu": (2, 64, 4, 256, 32, 2, 2),
}
EVERY = 50
"""A turn has as many steps as there are from one sample to the next."""


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm before it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return what the block makes of a sequence."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """GPT-2 without dropout."""

    def __init__(self, layers, width, heads, words, length):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("order", torch.arange(length))

    def forward(self, tokens):
        """Return the logits of the next words."""
        x = self.words(tokens) + self.places(self.order)
        return self.norm(self.blocks(x)) @ self.words.weight.T


class Loop:
    """A training loop of its own: model, optimizer and scaler."""

    def __init__(self, device, sizes, on_step):
        layers, width, heads, words, length, batch, _ = sizes
        torch.manual_seed(0)
        self.device, self.words = device, words
        self.model = Gpt(layers, width, heads, words, length).to(device)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.tokens = torch.randint(words, (batch, length), device=device)
        self.scaler = GradScaler(device, module=self.model, on_step=on_step)

    def step(self):
        """Take one step."""
        with torch.autocast(self.device, torch.float16):
            logits = self.model(self.tokens)
            loss = nn.functional.cross_entropy(
                logits.view(-1, self.words), self.tokens.view(-1)
            )
        self.scaler.scale(loss).backward()
        self.scaler.clip_grad_norm_(self.optimizer, max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def turn(self):
        """Return the seconds of a step, by the device's clock and by the host's."""
        begin, end = self.mark(), self.mark()
        if begin is not None:
            torch.cuda.synchronize()
            begin.record()
        start = time.perf_counter()
        for _ in range(EVERY):
            self.step()
        if begin is None:
            wall = time.perf_counter() - start
            return wall / EVERY, wall / EVERY
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        return begin.elapsed_time(end) / 1e3 / EVERY, wall / EVERY

    def mark(self):
        """Return an event of the device's clock; `None` without one."""
        return torch.cuda.Event(enable_timing=True) if self.device == "cuda" else None

    def count(self):
        """Return the operators and the host waits of one step."""
        counted = Count(self.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("warn")
            with counted:
                self.step()
            if self.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchronizing" in str(one.message) for one in caught)
        return Counted(counted.operators, waits)


class Counted(NamedTuple):
    """What was counted in one step, or in several."""

    operators: Counter[str]
    waits: int


class Count(TorchDispatchMode):
    """Counts the operators that are dispatched for a device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.operators = device, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one operator that reads or makes a tensor of the device."""
        made = func(*args, **(kwargs or {}))
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs, made)) if torch.is_tensor(leaf)
        ]
        if any(tensor.device.type == self.device for tensor in tensors):
            self.operators[str(func)] += 1
        return made


def compare(plain, recorded, turns):
    """Return medians: seconds of the plain step, and both ratios of the recorded."""
    pairs = [(plain.turn(), recorded.turn()) for _ in range(turns)]
    ratios = [
        [after[clock] / before[clock] for before, after in pairs] for clock in (0, 1)
    ]
    seconds = statistics.median(before[0] for before, _ in pairs)
    return seconds, *map(statistics.median, ratios)


def count(plain, recorded):
    """Return what the recorded steps have and the plain ones have not.

    Returns:
        For all steps between two samples together, and for a sampled one.
    """
    steps = [(plain.count(), recorded.count()) for _ in range(EVERY)]
    return difference(steps[1:]), difference(steps[:1])


def difference(steps):
    """Return the operators and waits that the second of each pair has more."""
    extra = Counter()
    for before, after in steps:
        extra.update(after.operators)
        extra.subtract(before.operators)
    waits = sum(after.waits - before.waits for before, after in steps)
    return Counted(Counter({name: n for name, n in extra.items() if n}), waits)


def main(device, output):
    sizes = SIZES[device]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with Recorder(path, statistics_every=EVERY) as recorder:
            plain, recorded = Loop(device, sizes, None), Loop(device, sizes, recorder)
            for loop in (plain, recorded):  # compiles kernels, finds a scale
                loop.turn()
            between, sampled = count(plain, recorded)
            seconds, ratio, wall_ratio = compare(plain, recorded, sizes[-1])
            recorded.scaler.flush()
        run = read_run(path)
        samples = sum(1 for _ in run.statistics(run.start, run.end - run.start))
    row = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "plain step ms": f"{seconds * 1e3:.3f}",
        "recorded to plain": f"{ratio:.4f}",
        "wall time, recorded to plain": f"{wall_ratio:.4f}",
        "steps between": EVERY - 1,
        "extra operators between": between.operators.total(),
        "extra host waits between": between.waits,
        "extra operators sampled": sampled.operators.total(),
        "extra host waits sampled": sampled.waits,
        "recorded steps": run.rows,
        "steps with statistics": samples,
    }
    print("extra operators between", dict(between.operators))
    print("extra operators sampled", dict(sampled.operators))
    heads = ",".join(head.replace(",", "") for head in row)
    text = f"{heads}\n{','.join(map(str, row.values()))}\n"
    print(text)
    if output:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
