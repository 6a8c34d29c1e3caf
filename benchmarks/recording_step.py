# SPDX-License-Identifier: Apache-2.0
"""What does a Recorder cost a training step, and does the host wait for it?

    python benchmarks/recording_step.py cuda results.csv    GPT-2 124 M, 8,192 tokens
    python benchmarks/recording_step.py cpu                 a small one, to try it

Steps with and without a recorder take turns in one run, ten at a time; the ratio is
that of the medians. On a GPU torch raises an error if the host waits inside a recorded
step.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from lossscale.diagnostics import Recorder, read_run
from lossscale.torch import GradScaler

SIZES = {
    # layers, width, heads, words, length, batch, turns
    "cuda": (12, 768, 12, 50_257, 1_024, 8, 30),
    "cpu": (2, 64, 4, 256, 32, 2, 3),
}
PER_TURN = 10


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

    def turn(self, *, watched):
        """Return the seconds of a step, over ten of them."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if watched else "default")
        start = time.perf_counter()
        for _ in range(PER_TURN):
            self.step()
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / PER_TURN


def main(device, output):
    sizes = SIZES[device]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with Recorder(path) as recorder:
            plain, recorded = Loop(device, sizes, None), Loop(device, sizes, recorder)
            for loop in (plain, recorded):  # compiles kernels, finds a scale
                for _ in range(3):
                    loop.turn(watched=False)
            times = {plain: [], recorded: []}
            for _ in range(sizes[-1]):
                for loop, found in times.items():
                    found.append(loop.turn(watched=loop is recorded))
            recorded.scaler.flush()
        rows = read_run(path).rows
    base, cost = (statistics.median(found) for found in times.values())
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    text = (
        "device,torch,plain step ms,recorded step ms,ratio,recorded steps\n"
        f"{name},{torch.__version__},{base * 1e3:.3f},{cost * 1e3:.3f},"
        f"{cost / base:.4f},{rows}\n"
    )
    print(text)
    if output:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
