# SPDX-License-Identifier: Apache-2.0
"""Does a GPT learn as well with float16 weights and masters as in float32?

    python benchmarks/torch_quality.py cuda OUT.csv [SECONDS]   600 seconds unless given
    python benchmarks/torch_quality.py cpu OUT.csv [SECONDS]

A GPT is trained on the sources of Python's standard library, byte by byte, with three
seeds: in float32, with torch's autocast and scaler, and with float16 weights and
masters, the moments in float32 or in bfloat16. A row has the mean loss of the last
tenth of the steps, the skipped steps, the time (on a CPU the processor's) and the peak
memory. On a GPU the model has 32 million weights; on a CPU it is a small one of 0.1
million, which shows the spread between seeds and no more than that.

What does not fit into the time is left out, and a run that fails is a row with its
error. The seeds are the outer loop: every kind has as many runs as the others.
"""

import csv
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import describe  # noqa: E402
from torch_gpt import GPT, Shape  # noqa: E402

from lossscale.torch import GradScaler, optim, to_float16  # noqa: E402

SEEDS = 3
KINDS = ("float32", "torch", "masters", "masters, bfloat16 moments")
CAP = 1.0
COLUMNS = ("kind", "seed", "loss", "skipped", "seconds", "memory_mb", "weights")


class Size(NamedTuple):
    """A model, and how it is trained."""

    shape: Shape
    steps: int
    rate: float


SIZES = {
    "cuda": Size(Shape(10, 512, 8, 32, 256, 256), 400, 6e-4),
    "cpu": Size(Shape(2, 64, 4, 8, 64, 256), 300, 6e-3),
}


class Result(NamedTuple):
    """What became of a training."""

    loss: float
    skipped: int
    weights: int


def read_text() -> torch.Tensor:
    """Return the sources of Python's standard library as bytes, in one tensor."""
    folder = Path(csv.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_optimizer(kind: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Convert the model, if it is to be converted, and return its optimizer."""
    if not kind.startswith("masters"):
        return torch.optim.AdamW(model.parameters(), rate, fused=True)
    to_float16(model)
    moments = torch.bfloat16 if "moments" in kind else None
    return optim.AdamW(
        model.parameters(), rate, master_weights=True, moments_dtype=moments
    )


def train(kind: str, seed: int, size: Size, device: str) -> Result:
    """Train a model of its own, with the batches of the seed."""
    torch.manual_seed(seed)
    shape = size.shape
    text = read_text().to(device)
    with torch.device(device):
        model = GPT(shape)
    optimizer = make_optimizer(kind, model, size.rate)
    make = torch.amp.GradScaler if kind == "torch" else GradScaler
    scaler = make(device, growth_interval=200, enabled=kind != "float32")
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.rate, size.steps)
    generator = torch.Generator().manual_seed(seed)
    losses, scales = [], [scaler.get_scale()]
    for _ in range(size.steps):
        starts = torch.randint(
            len(text) - shape.tokens - 1, (shape.rows, 1), generator=generator
        )
        window = starts.to(device) + torch.arange(shape.tokens + 1, device=device)
        tokens = text[window].long()
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=kind == "torch"):
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
            loss = functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        scaler.scale(loss).backward()
        if kind.startswith("masters"):
            scaler.clip_grad_norm_(optimizer, CAP)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CAP)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
    return Result(
        torch.stack(losses[-size.steps // 10 :]).mean().item(),
        sum(after < before for before, after in pairwise(scales)),
        sum(param.numel() for param in model.parameters()),
    )


def measure(kind: str, seed: int, size: Size, device: str) -> list[object]:
    """Return the row of one training."""
    clock = time.perf_counter
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        clock = time.thread_time
    start = clock()
    try:
        result = train(kind, seed, size, device)
    except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
        return [kind, seed, f"{type(error).__name__}: {error}", "", "", "", ""]
    spent = clock() - start
    memory = ""
    if device == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"
    numbers = [f"{result.loss:.4f}", result.skipped, f"{spent:.1f}", memory]
    return [kind, seed, *numbers, result.weights]


def measure_all(device: str, path: Path, seconds: float, size: Size) -> None:
    """Write a row for every training for which there is time."""
    facts = describe("torch", "triton")
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    begin = time.perf_counter()
    longest = 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *facts])
        for seed in range(SEEDS):
            for kind in KINDS:
                start = time.perf_counter()
                if start - begin + longest > seconds:
                    print(f"{kind}, seed {seed}: left out, there is no time")
                    continue
                row = measure(kind, seed, size, device)
                longest = max(longest, time.perf_counter() - start)
                writer.writerow([*row, *facts.values()])
                file.flush()
                print(*row, sep="  ", flush=True)


if __name__ == "__main__":
    place = sys.argv[1]
    limit = float(sys.argv[3]) if len(sys.argv) > 3 else 600.0
    if place == "cpu":
        torch.set_num_threads(1)
    measure_all(place, Path(sys.argv[2]), limit, SIZES[place])
