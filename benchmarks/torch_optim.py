# SPDX-License-Identifier: Apache-2.0
"""What do lossscale.torch.optim and float16 weights with masters save?

In one run and in turns:

    phase     clip, step and update of GPT-2 medium, GPT-2 XL and 2,000 tensors of 4,096
              numbers: torch's scaler, clip_grad_norm_ and fused AdamW; ours; ours with
              float16 weights and masters; torch's fused AdamW alone, unscaled and not
              clipped; and our update alone, with its share of the memory's speed
    training  whole steps of GPTs, forward to update: torch's autocast, scaler, clipping
              and fused AdamW; ours on float16 weights with masters, with normalisation
              in float32 and in float16

each as it is and, on a GPU, captured in a CUDA graph. On a GPU a time is that between
two CUDA events, the host's own time apart; a ratio is torch's time divided by the
contender's, the median over turns. On a CPU our AdamW is compared with torch's foreach.

    python benchmarks/torch_optim.py cuda OUT.csv [SECONDS]     120 seconds unless given
    python benchmarks/torch_optim.py cpu OUT.csv
    python benchmarks/torch_optim.py quality OUT.csv [SECONDS]

The last one trains a GPT of 32 million weights on the sources of Python's standard
library, byte by byte, with three seeds: in float32, with torch's autocast and scaler,
and with float16 weights and masters. It writes the last losses, skipped steps, time and
memory.
"""

import csv
import statistics
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

from torch_step import CASES, captured, timed  # noqa: E402

from lossscale.torch import GradScaler, optim, to_float16  # noqa: E402

TURNS = 20
WARM_UP = 3
CAP = 1.0
MEMORY_SPEED = 4.8e12
"""Bytes a second of an H200's memory."""
BYTES = 28
"""What AdamW moves for each float32 weight, or float16 weight with its master."""


# -- the optimizer phase ---------------------------------------------------------------


def make_scaler(kind, device):
    scaler = kind(device, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.zeros(1, device=device))
    return scaler


def make_params(shapes, device, dtype=torch.float32):
    params = [nn.Parameter(torch.zeros(s, device=device, dtype=dtype)) for s in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def torch_phase(params):
    """Return torch's recipe."""
    device = params[0].device.type
    optimizer = torch.optim.AdamW(params, 1e-9, fused=True, capturable=device == "cuda")
    scaler = make_scaler(torch.amp.GradScaler, device)

    def phase():
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, CAP)
        scaler.step(optimizer)
        scaler.update()

    return phase


def our_phase(params):
    """Return ours, and the update alone."""
    optimizer = optim.AdamW(params, 1e-9, master_weights=True)
    scaler = make_scaler(GradScaler, params[0].device.type)

    def phase():
        scaler.clip_grad_norm_(optimizer, CAP)
        scaler.step(optimizer)
        scaler.update()

    return phase, optimizer.step


def measure_phase(case, shapes, table) -> None:
    """Measure the optimizer phase of one list of parameters on a GPU."""
    size = sum(torch.Size(shape).numel() for shape in shapes)
    wide = make_params(shapes, "cuda")
    theirs = torch_phase(wide)
    ours, update = our_phase(wide)
    masters, update_masters = our_phase(make_params(shapes, "cuda", torch.float16))
    calls = {"torch": theirs, "ours": ours, "ours, masters": masters}
    table.write(case, "phase", in_turns(calls), against="torch")
    for call in (ours, masters):
        check_no_wait(call)
    alone = torch.optim.AdamW(wide, 1e-9, fused=True, capturable=True)
    calls = {
        "torch's AdamW alone": captured(alone.step),
        "torch": captured(theirs),
        "ours": captured(ours),
        "ours, masters": captured(masters),
        "our update": captured(update),
        "our update, masters": captured(update_masters),
        "our update, blocks of 1,024": captured(update_in_blocks(wide, 1024)),
    }
    table.write(
        case,
        "phase in a graph",
        in_turns(calls),
        against="torch's AdamW alone",
        moved=size * BYTES,
    )


def update_in_blocks(params, block):
    """Return our update alone, with another number of elements for each program."""
    from lossscale.torch.optim.kernels import tables

    optimizer = optim.AdamW(params, 1e-9)
    usual, tables.BLOCK = tables.BLOCK, block
    optimizer.step()
    tables.BLOCK = usual
    return optimizer.step


def check_no_wait(call) -> None:
    """Have torch raise if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    call()
    torch.cuda.set_sync_debug_mode("default")


# -- whole training steps --------------------------------------------------------------


class Shape(NamedTuple):
    """A GPT and its batch."""

    layers: int
    width: int
    heads: int
    rows: int
    tokens: int
    vocabulary: int = 50257


MODELS = {
    "124 M, 1 x 256": Shape(12, 768, 12, 1, 256),
    "124 M, 8 x 1,024": Shape(12, 768, 12, 8, 1024),
    "48 x 256, 1 x 128": Shape(48, 256, 4, 1, 128),
    "355 M, 1 x 256": Shape(24, 1024, 16, 1, 256),
    "355 M, 4 x 1,024": Shape(24, 1024, 16, 4, 1024),
}


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # noqa: D102
        rows, tokens, width = x.shape
        parts = self.mix(self.norm1(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    """A GPT-2, whose head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        blocks = [Block(shape.width, shape.heads) for _ in range(shape.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # noqa: D102
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


def make_step(shape, kind, *, in_graph):
    """Return a whole training step of a contender.

    Args:
        shape: The model and its batch.
        kind: "torch", "masters", or "masters, float16 norms".
        in_graph: Whether it will be captured, which torch's cache of casts is not for.
    """
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(shape)
        tokens = torch.randint(shape.vocabulary, (shape.rows, shape.tokens + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    is_torchs = kind == "torch"
    if is_torchs:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    else:
        to_float16(model, keep_normalisation=kind == "masters")
        optimizer = optim.AdamW(model.parameters(), master_weights=True)
    scaler = (torch.amp.GradScaler if is_torchs else GradScaler)(
        "cuda", init_scale=2.0**10, growth_interval=2**30
    )
    params = list(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.autocast(
            "cuda", torch.float16, enabled=is_torchs, cache_enabled=not in_graph
        ):
            logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets)
        scaler.scale(loss).backward()
        if is_torchs:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, CAP)
        else:
            scaler.clip_grad_norm_(optimizer, CAP)
        scaler.step(optimizer)
        scaler.update()

    return step


def measure_training(name, shape, table) -> None:
    """Measure whole training steps: as they are, with their memory, and captured."""
    kinds = ("torch", "masters", "masters, float16 norms")
    calls, memory = {}, {}
    for kind in kinds:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        calls[kind] = make_step(shape, kind, in_graph=False)
        for _ in range(2):
            calls[kind]()
        torch.cuda.synchronize()
        memory[kind] = torch.cuda.max_memory_allocated() - held
    table.write(name, "training", in_turns(calls), against="torch", memory=memory)
    calls = {kind: captured(make_step(shape, kind, in_graph=True)) for kind in kinds}
    table.write(name, "training in a graph", in_turns(calls), against="torch")


# -- measuring and writing -------------------------------------------------------------


def in_turns(calls, device="cuda", turns=TURNS) -> dict[str, list[tuple[float, float]]]:
    """Return the times of several calls, taken in turns."""
    for call in calls.values():
        for _ in range(WARM_UP):
            timed(call, device)
    times: dict[str, list] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls) if turn % 2 else list(reversed(calls)):
            times[name].append(timed(calls[name], device))
    return times


class Table:
    """Rows of a CSV file, printed as they are written."""

    columns = (
        "case",
        "work",
        "of",
        "ms",
        "ms_20",
        "ms_80",
        "host_ms",
        "against",
        "ratio",
        "memory_mb",
        "share_of_memory_speed",
    )

    def __init__(self, file, facts: dict[str, str]) -> None:
        self._file, self._facts = file, facts
        self._writer = csv.writer(file)
        self._writer.writerow([*self.columns, *facts])

    def write(self, case, work, times, *, against, memory=None, moved=0) -> None:
        """Write and print a row for each contender."""
        base = [spent for spent, _ in times[against]]
        for name, pairs in times.items():
            spent = [pair[0] for pair in pairs]
            low, *_, high = statistics.quantiles(spent, n=5)
            middle = statistics.median(spent)
            host = statistics.median(pair[1] for pair in pairs)
            ratio = statistics.median(a / b for a, b in zip(base, spent, strict=True))
            size = f"{memory[name] / 2**20:.0f}" if memory else ""
            is_alone = moved and ("update" in name or "alone" in name)
            share = f"{moved / middle * 1e3 / MEMORY_SPEED:.3f}" if is_alone else ""
            numbers = [f"{number:.4f}" for number in (middle, low, high, host)]
            row = [case, work, name, *numbers, against, f"{ratio:.3f}", size, share]
            self._writer.writerow([*row, *self._facts.values()])
            self._file.flush()
            text = f"{case:17} {work:20} {name:27} {middle:8.3f} ms, host {host:7.3f}"
            more = f", {size} MB" if size else ""
            more += f", {float(share):.0%} of the memory's speed" if share else ""
            print(f"{text}, {against} / this {ratio:6.2f}{more}", flush=True)


def measure_on_gpu(table, seconds) -> None:
    """Measure all cases for which there is time; the most wanted first."""
    begin = time.perf_counter()
    cases = CASES["cuda"]
    work = [
        *((measure_phase, name, shapes) for name, shapes in cases.items()),
        *((measure_training, name, shape) for name, shape in MODELS.items()),
    ]
    for measure, name, case in work:
        spent = time.perf_counter() - begin
        if spent > 0.8 * seconds:
            print(f"{name}: left out, {spent:.0f} of {seconds:.0f} seconds are spent")
            continue
        measure(name, case, table)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} seconds")


def measure_on_cpu(table) -> None:
    """Compare our AdamW with torch's foreach AdamW on a CPU."""
    for case, shapes in CASES["cpu"].items():
        params = make_params(shapes, "cpu")
        half = make_params(shapes, "cpu", torch.float16)
        calls = {
            "torch's foreach": torch.optim.AdamW(params, 1e-9, foreach=True).step,
            "ours": optim.AdamW(params, 1e-9).step,
            "ours, foreach": optim.AdamW(params, 1e-9, foreach=True).step,
            "ours, masters": optim.AdamW(half, 1e-9, master_weights=True).step,
        }
        times = in_turns(calls, "cpu", turns=15)
        table.write(case, "update", times, against="torch's foreach")


# -- quality ---------------------------------------------------------------------------

QUALITY = Shape(10, 512, 8, 32, 256, 256)
SEEDS = 3
QUALITY_STEPS = 400
KINDS = ("float32", "torch", "masters", "masters, bfloat16 moments")


def read_text() -> torch.Tensor:
    """Return the sources of Python's standard library as bytes, in one tensor."""
    folder = Path(csv.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train_once(kind, seed, shape, steps, device):
    """Return the mean loss of the last tenth of the steps, and the skipped steps."""
    torch.manual_seed(seed)
    text = read_text().to(device)
    with torch.device(device):
        model = GPT(shape)
    if kind.startswith("masters"):
        to_float16(model)
        moments = torch.bfloat16 if "moments" in kind else None
        optimizer = optim.AdamW(
            model.parameters(), 6e-4, master_weights=True, moments_dtype=moments
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 6e-4, fused=True)
    make = torch.amp.GradScaler if kind == "torch" else GradScaler
    scaler = make(device, growth_interval=200, enabled=kind != "float32")
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, steps)
    generator = torch.Generator().manual_seed(seed)
    losses, scales = [], [scaler.get_scale()]
    for _ in range(steps):
        starts = torch.randint(
            len(text) - shape.tokens - 1, (shape.rows, 1), generator=generator
        )
        window = starts.to(device) + torch.arange(shape.tokens + 1, device=device)
        tokens = text[window]
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
    skipped = sum(after < before for before, after in pairwise(scales))
    last = torch.stack(losses[-steps // 10 :]).mean().item()
    return last, skipped, sum(param.numel() for param in model.parameters())


def measure_quality(
    path, seconds, shape=QUALITY, steps=QUALITY_STEPS, device="cuda"
) -> None:
    """Train with every kind and seed for which there is time."""
    begin = time.perf_counter()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "seed", "loss", "skipped", "seconds", "memory_mb"])
        for seed in range(SEEDS):
            for kind in KINDS:
                start = time.perf_counter()
                if start - begin > 0.9 * seconds:
                    print(f"{kind}, seed {seed}: left out, there is no time")
                    continue
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                loss, skipped, size = train_once(kind, seed, shape, steps, device)
                spent = time.perf_counter() - start
                memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
                row = [kind, seed, f"{loss:.4f}", skipped, f"{spent:.1f}"]
                writer.writerow([*row, f"{memory / 2**20:.0f}"])
                file.flush()
                print(*row, f"{memory / 2**20:.0f} MB, {size:,} weights", flush=True)


def main(device: str, path: Path, seconds: float) -> None:
    if device == "quality":
        measure_quality(path, seconds)
        return
    facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if device == "cuda":
        import triton

        facts["gpu"] = torch.cuda.get_device_name()
        facts["triton"], facts["cuda"] = triton.__version__, str(torch.version.cuda)
    with path.open("w", newline="") as file:
        table = Table(file, facts)
        if device == "cuda":
            measure_on_gpu(table, seconds)
        else:
            measure_on_cpu(table)


if __name__ == "__main__":
    limit = float(sys.argv[3]) if len(sys.argv) > 3 else 120.0
    main(sys.argv[1], Path(sys.argv[2]), limit)
