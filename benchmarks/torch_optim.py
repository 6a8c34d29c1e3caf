# SPDX-License-Identifier: Apache-2.0
"""What do lossscale.torch.optim and float16 weights with masters save?

In one run and in turns:

    phase     clip, step and update of GPT-2 medium, GPT-2 XL and 2,000 tensors of 4,096
              numbers: torch's scaler, clip_grad_norm_ and fused AdamW; ours; ours with
              float16 weights and masters; ours while other code holds its state, which
              is then compared at every step; torch's fused AdamW alone, unscaled and
              not clipped; and our update alone, with its share of the memory's speed
    training  whole steps of GPTs, forward to update: torch's autocast, scaler, clipping
              and fused AdamW; the same without scaler and clipping; ours on float16
              weights with masters, with normalisation in float32 and in float16

each as it is and, on a GPU, captured in a CUDA graph. On a GPU a time is that between
two CUDA events, the host's own time apart; a ratio is torch's time divided by the
contender's, the median over turns. On a CPU our AdamW is compared with torch's foreach.

    python benchmarks/torch_optim.py cuda OUT.csv [SECONDS]     540 seconds unless given
    python benchmarks/torch_optim.py cpu OUT.csv
    python benchmarks/torch_optim.py rehearse OUT.csv

A case that fails on the GPU is a row that says so, and the next one is measured; no
case is started when the time is spent. `rehearse` runs the whole of it on tiny models
without a GPU, to try the program; its times mean nothing.

On a CPU a time is the processor's, with one thread. There the update alone is compared,
for 10, 150 and 2,000 tensors of 64 numbers and for large ones: torch's foreach AdamW;
ours; ours with a scale, which torch's alone does not divide out; ours on float16
weights with masters; and the same with a scaler's step and update, torch's and ours.
"""

import csv
import gc
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import describe  # noqa: E402
from torch_gpt import GPT, Shape  # noqa: E402
from torch_step import CASES, captured  # noqa: E402
from torch_step import timed as timed_on_gpu  # noqa: E402

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
    """Return ours, and the optimizer."""
    optimizer = optim.AdamW(params, 1e-9, master_weights=True)
    scaler = make_scaler(GradScaler, params[0].device.type)

    def phase():
        scaler.clip_grad_norm_(optimizer, CAP)
        scaler.step(optimizer)
        scaler.update()

    return phase, optimizer


def measure_phase(case, shapes, table) -> None:
    """Measure the optimizer phase of one list of parameters."""
    size, device = sum(torch.Size(shape).numel() for shape in shapes), table.device
    wide = make_params(shapes, device)
    theirs = torch_phase(wide)
    ours, optimizer = our_phase(wide)
    half = make_params(shapes, device, torch.float16)
    masters, optimizer_with_masters = our_phase(half)
    shared, shared_optimizer = our_phase(make_params(shapes, device))
    held = shared_optimizer.state
    calls = {
        "torch": theirs,
        "ours": ours,
        "ours, masters": masters,
        "ours, state held": shared,
    }
    table.write(case, "phase", in_turns(calls, device), against="torch")
    del calls, shared, shared_optimizer, held
    alone = torch.optim.AdamW(wide, 1e-9, fused=True, capturable=device == "cuda")
    calls = {
        "torch's AdamW alone": alone.step,
        "torch": theirs,
        "ours": ours,
        "ours, masters": masters,
        "our update": optimizer.step,
        "our update, masters": optimizer_with_masters.step,
    }
    if device == "cuda":
        for call in (ours, masters):
            check_no_wait(call)
        calls = {name: captured(call) for name, call in calls.items()}
    table.write(
        case,
        "phase in a graph",
        in_turns(calls, device),
        against="torch's AdamW alone",
        moved=size * BYTES,
    )


def our_update(params, **options):
    """Return our update alone, with options of the optimizer."""
    return optim.AdamW(params, 1e-9, **options).step


def check_no_wait(call) -> None:
    """Have torch raise if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- whole training steps --------------------------------------------------------------


MODELS = {
    "124 M, 1 x 256": Shape(12, 768, 12, 1, 256),
    "124 M, 8 x 1,024": Shape(12, 768, 12, 8, 1024),
    "the same, 50,257 words": Shape(12, 768, 12, 8, 1024, 50257),
    "48 x 256, 1 x 128": Shape(48, 256, 4, 1, 128),
    "355 M, 1 x 256": Shape(24, 1024, 16, 1, 256),
    "355 M, 4 x 1,024": Shape(24, 1024, 16, 4, 1024),
}


def make_step(shape, kind, device, *, in_graph):
    """Return a whole training step of a contender.

    Args:
        shape: The model and its batch.
        kind: One of `KINDS`.
        device: Where the model is.
        in_graph: Whether it will be captured, which torch's cache of casts is not for.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(shape)
        tokens = torch.randint(shape.vocabulary, (shape.rows, shape.tokens + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    is_torchs, is_scaled = kind.startswith("torch"), kind != UNSCALED
    if is_torchs:
        optimizer = torch.optim.AdamW(
            model.parameters(), fused=True, capturable=device == "cuda"
        )
    else:
        to_float16(model, keep_normalisation=kind == "masters")
        optimizer = optim.AdamW(model.parameters(), master_weights=True)
    scaler = (torch.amp.GradScaler if is_torchs else GradScaler)(
        device, init_scale=2.0**10, growth_interval=2**30, enabled=is_scaled
    )
    params = list(model.parameters())

    def step():
        optimizer.zero_grad()
        with torch.autocast(
            device, torch.float16, enabled=is_torchs, cache_enabled=not in_graph
        ):
            # No variable keeps the logits, which are half of the memory.
            loss = functional.cross_entropy(
                model(inputs).flatten(0, 1).float(), targets
            )
        scaler.scale(loss).backward()
        if is_torchs and is_scaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, CAP)
        elif is_scaled:
            scaler.clip_grad_norm_(optimizer, CAP)
        scaler.step(optimizer)
        scaler.update()

    return step


UNSCALED = "torch without scaler and clipping"
KINDS = ("torch", UNSCALED, "masters", "masters, float16 norms")


def measure_training(name, shape, table) -> None:
    """Measure whole training steps as they are, with their memory."""
    calls, memory = {}, {}
    for kind in KINDS:
        if table.device == "cuda":
            torch.cuda.empty_cache()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        calls[kind] = make_step(shape, kind, table.device, in_graph=False)
        for _ in range(2):
            calls[kind]()
        if table.device == "cuda":
            torch.cuda.synchronize()
            memory[kind] = torch.cuda.max_memory_allocated() - held
    times = in_turns(calls, table.device)
    table.write(name, "training", times, against="torch", memory=memory)


def measure_captured_training(name, shape, table) -> None:
    """Measure whole training steps in CUDA graphs."""
    calls = {}
    for kind in KINDS:
        step = make_step(shape, kind, table.device, in_graph=True)
        calls[kind] = captured(step) if table.device == "cuda" else step
    times = in_turns(calls, table.device)
    table.write(name, "training in a graph", times, against="torch")


# -- measuring and writing -------------------------------------------------------------


def timed(call, device) -> tuple[float, float]:
    """Return milliseconds of the device and of the host."""
    if device == "cuda":
        return timed_on_gpu(call, device)
    start = time.thread_time()
    call()
    spent = (time.thread_time() - start) * 1e3
    return spent, spent


def in_turns(calls, device, turns=TURNS) -> dict[str, list[tuple[float, float]]]:
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

    def __init__(self, file, device: str, facts: dict[str, str]) -> None:
        self.device = device
        self._file, self._facts = file, facts
        self._writer = csv.writer(file)
        self._writer.writerow([*self.columns, *facts])

    def fail(self, case, work, error: Exception) -> None:
        """Write and print that something could not be measured, and why."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        empty = [""] * (len(self.columns) - 3)
        self._writer.writerow([case, work, reason, *empty, *self._facts.values()])
        self._file.flush()
        print(f"{case:17} {work:20} {reason}", flush=True)

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
            text = f"{case:17} {work:20} {name:33} {middle:8.3f} ms, host {host:7.3f}"
            more = f", {size} MB" if size else ""
            more += f", {float(share):.0%} of the memory's speed" if share else ""
            print(f"{text}, {against} / this {ratio:6.2f}{more}", flush=True)


WORK = {
    "phase": measure_phase,
    "training": measure_training,
    "training in a graph": measure_captured_training,
}
ORDER = (
    ("phase", "many small"),
    ("training in a graph", "124 M, 1 x 256"),
    ("training in a graph", "48 x 256, 1 x 128"),
    ("training in a graph", "124 M, 8 x 1,024"),
    ("training in a graph", "the same, 50,257 words"),
    ("training", "124 M, 1 x 256"),
    ("training", "48 x 256, 1 x 128"),
    ("training", "124 M, 8 x 1,024"),
    ("phase", "medium"),
    ("training in a graph", "355 M, 1 x 256"),
    ("training in a graph", "355 M, 4 x 1,024"),
    ("phase", "XL"),
    ("training", "355 M, 1 x 256"),
    ("training", "355 M, 4 x 1,024"),
)
"""The most wanted first."""
TINY = {
    "many small": [(8,)] * 30,
    "medium": [(64, 8)] * 3,
    "XL": [(64, 16)] * 3,
    **{name: Shape(2, 16, 2, 1, 8, 31) for name in MODELS},
}


def measure_everything(table, seconds, *, tiny: bool) -> None:
    """Measure all cases for which there is time."""
    begin = time.perf_counter()
    cases = TINY if tiny else CASES["cuda"] | MODELS
    for work, name in ORDER:
        spent = time.perf_counter() - begin
        if spent > seconds:
            error = TimeoutError(f"left out, {spent:.0f} seconds are spent")
            table.fail(name, work, error)
            continue
        try:
            WORK[work](name, cases[name], table)
        except Exception as error:  # noqa: BLE001 - the other rows are wanted
            table.fail(name, work, error)
        gc.collect()
        if table.device == "cuda":
            with suppress(RuntimeError):  # an error of a kernel is reported again
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} seconds")


CPU_CASES = {
    "10 x 64": ([(64,)] * 10, 300),
    "150 x 64": ([(64,)] * 150, 100),
    "2,000 x 64": ([(64,)] * 2000, 20),
    "150 x 16,384": ([(16_384,)] * 150, 20),
    "10 x 1,000,000": ([(1_000_000,)] * 10, 12),
}
"""Shapes and turns."""


def measure_on_cpu(table) -> None:
    """Compare our AdamW with torch's foreach AdamW on a CPU."""
    for case, (shapes, turns) in CPU_CASES.items():
        calls = {
            "torch's foreach": torch.optim.AdamW(
                make_params(shapes, "cpu"), 1e-9, foreach=True
            ).step,
            "ours": our_update(make_params(shapes, "cpu")),
            "ours, scaled": scaled_update(make_params(shapes, "cpu")),
            "ours, masters": our_update(
                make_params(shapes, "cpu", torch.float16), master_weights=True
            ),
            "ours, masters, scaled": scaled_update(
                make_params(shapes, "cpu", torch.float16), master_weights=True
            ),
            "torch's scaler and foreach": host_phase(
                torch.amp.GradScaler,
                torch.optim.AdamW(make_params(shapes, "cpu"), 1e-9, foreach=True),
            ),
            "our scaler, ours": host_phase(
                GradScaler, optim.AdamW(make_params(shapes, "cpu"), 1e-9)
            ),
            "our scaler, ours, masters": host_phase(
                GradScaler,
                optim.AdamW(
                    make_params(shapes, "cpu", torch.float16), 1e-9, master_weights=True
                ),
            ),
        }
        times = in_turns(calls, "cpu", turns=turns)
        table.write(case, "update", times, against="torch's foreach")


def host_phase(kind, optimizer):
    """Return what a scaler does after the backward pass."""
    scaler = make_scaler(kind, "cpu")

    def phase():
        scaler.step(optimizer)
        scaler.update()

    return phase


def scaled_update(params, **options):
    """Return our update with what a scaler would have set."""
    optimizer = optim.AdamW(params, 1e-9, **options)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    return optimizer.step


def main(work: str, path: Path, seconds: float) -> None:
    facts = describe("torch", "triton") | {"threads": str(torch.get_num_threads())}
    device = "cuda" if work == "cuda" else "cpu"
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    with path.open("w", newline="") as file:
        table = Table(file, device, facts)
        if work == "cpu":
            measure_on_cpu(table)
        else:
            measure_everything(table, seconds, tiny=work == "rehearse")


if __name__ == "__main__":
    if sys.argv[1] != "cuda":
        torch.set_num_threads(1)
    limit = float(sys.argv[3]) if len(sys.argv) > 3 else 540.0
    main(sys.argv[1], Path(sys.argv[2]), limit)
