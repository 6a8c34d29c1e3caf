# SPDX-License-Identifier: Apache-2.0
"""How many operators and host reads does watching a training step add?

    python benchmarks/observers.py benchmarks/results/observers.csv

One training step of a GPT of six layers (76 parameter tensors) on a CPU, in torch.
Counted are the operators that are dispatched, and among them those that read a number
to the host: on a GPU each of these waits for the device. The count has no noise. Tools
whose package is not installed are left out.
"""

import importlib.util
import io
import sys
import tempfile
import warnings
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale.diagnostics import Recorder
from lossscale.torch import GradScaler

READS = ("_local_scalar_dense", "aten.equal", "is_nonzero", "aten.item")
WIDTH, HEADS, LAYERS, WORDS, LENGTH = 64, 4, 6, 128, 16


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm before it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return what the block makes of a sequence."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        """Return the logits of the next words."""
        x = self.words(tokens) + self.places(torch.arange(LENGTH))
        return self.norm(self.blocks(x)) @ self.words.weight.T


class Count(TorchDispatchMode):
    """Counts operators and host reads."""

    def __init__(self):
        super().__init__()
        self.operators = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one operator."""
        self.operators += 1
        self.reads += any(name in str(func) for name in READS)
        return func(*args, **(kwargs or {}))


class Plain:
    """A step without a scaler, and what a tool does around it."""

    def __init__(self, model, optimizer, stack, folder):
        del stack, folder
        self.model, self.optimizer = model, optimizer

    def step(self, tokens):
        """Take one training step."""
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.view(-1, WORDS), tokens.view(-1))
        self.finish(loss)
        self.optimizer.zero_grad()

    def finish(self, loss):
        """Go backwards, and take the step."""
        loss.backward()
        self.look()
        self.optimizer.step()

    def look(self):
        """Do what the tool does with gradients."""


class Anomaly(Plain):
    """Raises where the backward pass makes a NaN."""

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        stack.enter_context(torch.autograd.set_detect_anomaly(True))


class Norms(Plain):
    """Reads the norm of every gradient, as many loops do."""

    def look(self):
        """Read every norm."""
        return [p.grad.norm().item() for p in self.model.parameters()]


class Foreach(Plain):
    """Computes the largest magnitude of every gradient, and reads none."""

    def look(self):
        """Compute every largest magnitude."""
        grads = [p.grad for p in self.model.parameters()]
        return torch.stack(torch._foreach_norm(grads, torch.inf))


class Debugged(Plain):
    """Transformers' check of every input, output and weight of the forward pass."""

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)


class Watched(Plain):
    """Histograms of every gradient on every step, by wandb."""

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        import wandb

        run = stack.enter_context(wandb.init(mode="offline", dir=folder))
        run.watch(model, log="gradients", log_freq=1)


class Scaled(Plain):
    """torch's own scaler."""

    def make(self, folder):
        """Return the scaler."""
        del folder
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        self.stack = stack
        self.scaler = self.make(folder)

    def finish(self, loss):
        """Scale, go backwards, and take the step."""
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Scaled):
    """Our scaler."""

    def make(self, folder):
        """Return the scaler."""
        del folder
        return GradScaler("cpu", init_scale=8.0)


class Recorded(Scaled):
    """Our scaler with a recorder: scale, cause, names, every step."""

    def make(self, folder):
        """Return the scaler."""
        recorder = self.stack.enter_context(Recorder(Path(folder) / "run.jsonl"))
        return GradScaler("cpu", init_scale=8.0, module=self.model, on_step=recorder)


TOOLS = {
    "plain step": (Plain, None),
    "torch set_detect_anomaly": (Anomaly, None),
    "transformers DebugUnderflowOverflow": (Debugged, "transformers"),
    "wandb.watch every step": (Watched, "wandb"),
    "p.grad.norm().item() for every tensor": (Norms, None),
    "torch._foreach_norm(inf)": (Foreach, None),
    "torch GradScaler": (Scaled, None),
    "lossscale GradScaler": (Ours, None),
    "lossscale GradScaler with a Recorder": (Recorded, None),
}


def count(kind):
    """Return the operators and reads of a step, after two that warm up."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(WORDS, (2, LENGTH))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        loop = kind(model, optimizer, stack, folder)
        for _ in range(2):
            loop.step(tokens)
        counted = stack.enter_context(Count())
        loop.step(tokens)
    return counted.operators, counted.reads


def main(output):
    lines = ["tool,operators,extra operators,host reads,extra host reads"]
    base = count(Plain)
    for name, (kind, package) in TOOLS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed", file=sys.stderr)
            continue
        found = count(kind)
        row = [found[0], found[0] - base[0], found[1], found[1] - base[1]]
        lines.append(",".join([name, *map(str, row)]))
    text = "\n".join(lines) + "\n"
    print(text)
    if output:
        Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
