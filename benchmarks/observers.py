# SPDX-License-Identifier: Apache-2.0
"""How many operators and host reads does watching a training step add?

    python benchmarks/observers.py benchmarks/results/observers.csv

Training steps of a GPT of six layers (76 parameter tensors) on a CPU, in torch. Counted
are the operators that the training's thread dispatches, and among them those that read
a number to the host: on a GPU each of these waits for the device. Tools that do more on
some steps do so once in 50 here, and 50 steps are counted: the usual step is the
median, the largest is the one with the most operators. The count has no noise. Tools
whose package is not installed are left out; to have all of them:

    pip install wandb trainscope torchinstruments
"""

import importlib.util
import io
import statistics
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
EVERY = 50
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

    steps = 3
    """How many steps are counted: those of a tool that samples differ."""

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


class TrainScoped(Plain):
    """trainscope with its defaults: gradients, weights, activations of every layer."""

    steps = EVERY

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        from trainscope import TrainScope, TrainScopeConfig

        config = TrainScopeConfig(run_dir=folder)
        self.scope = TrainScope(model, optimizer, config=config).attach()
        stack.callback(self.scope.detach)

    def finish(self, loss):
        """Go backwards, record as its manual says, and take the step."""
        loss.backward()
        self.scope.step(loss.item())
        self.optimizer.step()


class Instrumented(Plain):
    """torchinstruments with its defaults, except that it samples by steps, not time."""

    steps = EVERY

    def __init__(self, model, optimizer, stack, folder):
        super().__init__(model, optimizer, stack, folder)
        from torchinstruments import (
            EveryNForwardsSampler,
            inject_observer,
            remove_observer,
        )

        inject_observer(model, output_dir=folder, sampler=EveryNForwardsSampler(EVERY))
        stack.callback(remove_observer, model)


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
    """Our scaler with a recorder: every step, and every tensor every 50 steps."""

    steps = EVERY

    every = EVERY

    def make(self, folder):
        """Return the scaler."""
        path = Path(folder) / "run.jsonl"
        recorder = Recorder(path, statistics_every=self.every, writers=())
        self.stack.enter_context(recorder)
        return GradScaler("cpu", init_scale=8.0, module=self.model, on_step=recorder)


class RecordedAlone(Recorded):
    """The same without tensor statistics."""

    every = 0


TOOLS = {
    "plain step": (Plain, None),
    "torch set_detect_anomaly": (Anomaly, None),
    "transformers DebugUnderflowOverflow": (Debugged, "transformers"),
    "wandb.watch every step": (Watched, "wandb"),
    "trainscope": (TrainScoped, "trainscope"),
    "torchinstruments every 50 steps": (Instrumented, "torchinstruments"),
    "p.grad.norm().item() for every tensor": (Norms, None),
    "torch._foreach_norm(inf)": (Foreach, None),
    "torch GradScaler": (Scaled, None),
    "lossscale GradScaler": (Ours, None),
    "lossscale GradScaler with a Recorder": (RecordedAlone, None),
    "the same with statistics every 50 steps": (Recorded, None),
}


def count(kind):
    """Return the operators and reads of a usual step and of the largest."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(WORDS, (2, LENGTH))
    found = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        loop = kind(model, optimizer, stack, folder)
        for _ in range(2):  # these warm up
            loop.step(tokens)
        for _ in range(kind.steps):
            with Count() as counted:
                loop.step(tokens)
            found.append((counted.operators, counted.reads))
    usual = tuple(int(statistics.median(column)) for column in zip(*found, strict=True))
    return usual, max(found)


COLUMNS = (
    "tool,extra operators of a usual step,extra host reads of a usual step,"
    "extra operators of the largest,extra host reads of the largest"
)


def main(output):
    lines = [COLUMNS]
    (operators, reads), _ = count(Plain)
    for name, (kind, package) in TOOLS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed", file=sys.stderr)
            continue
        row = [
            number
            for found in count(kind)
            for number in (found[0] - operators, found[1] - reads)
        ]
        lines.append(",".join([name, *map(str, row)]))
        print(lines[-1], flush=True)
    if output:
        Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
