# SPDX-License-Identifier: Apache-2.0
"""What does our GradScaler cost, compared with torch's own and with the limit?

In one run and in turns, on the gradients of GPT-2 medium (292 tensors), GPT-2 XL (580)
and 2,000 tensors of 4,096 numbers, or on a CPU 150 tensors of 20 million numbers:

    unscale           unscale_ and update
    check and clip    unscale_, clip_grad_norm_, update; ours: clip_grad_norm_, update
    step              fused AdamW, not clipped: step and update
    clipped step      the same with clipping
    clipped SGD step  an optimizer that takes no grad_scale
    flat read         one sum over as many bytes in one tensor: the limit
    ... in a graph    the same, captured in a CUDA graph and replayed

The scale is 1, so that nothing shrinks from one turn to the next. On a GPU a time is
that between two CUDA events, the host's own time apart; on a CPU it is the host's. A
ratio is the median over turns. On a GPU it also names the kernels of check and clip and
has torch raise an error if the host waits in a clipped step.

    python benchmarks/torch_step.py cuda FOLDER      writes FOLDER/torch_step.cuda.csv
"""

import csv
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lossscale.torch import GradScaler  # noqa: E402

TURNS = 40
WARM_UP = 5
CAP = 1.0


def gpt2(layers: int, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT-2's parameters."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width)]
    block += [(width,), (width,), (width,), (width, 4 * width), (4 * width,)]
    block += [(4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


CASES = {
    "cuda": {
        "medium": gpt2(24, 1024),
        "XL": gpt2(48, 1600),
        "many small": [(4096,)] * 2000,
    },
    "cpu": {"20 million": [(133_333,)] * 150, "many small": [(64,)] * 500},
}


class Contender:
    """One scaler, with the calls that are timed."""

    def __init__(self, name: str, make, device: str) -> None:
        self.name = name
        self.scaler = make(device, init_scale=1.0, growth_interval=2**30)
        self.scaler.scale(torch.zeros(1, device=device))

    # ruff: noqa: D102
    def unscale(self, optimizer) -> None:
        self.scaler.unscale_(optimizer)
        self.scaler.update()

    def clip(self, optimizer) -> None:
        if self.name == "torch":
            self.scaler.unscale_(optimizer)
            parameters = optimizer.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(parameters, CAP)
        else:
            self.scaler.clip_grad_norm_(optimizer, CAP)

    def check_and_clip(self, optimizer) -> None:
        self.clip(optimizer)
        self.scaler.update()

    def step(self, optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def clipped_step(self, optimizer) -> None:
        self.clip(optimizer)
        self.step(optimizer)


def timed(call, device: str) -> tuple[float, float]:
    """Return milliseconds until the device and until the host was done."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        spent = (time.perf_counter() - start) * 1e3
        return spent, spent
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    before.record()
    call()
    after.record()
    spent = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return before.elapsed_time(after), spent


def in_turns(calls: dict, device: str) -> dict[str, list[tuple[float, float]]]:
    """Return the times of several calls, taken in turns."""
    for call in calls.values():
        for _ in range(WARM_UP):
            timed(call, device)
    times: dict[str, list] = {name: [] for name in calls}
    for turn in range(TURNS):
        names = list(calls) if turn % 2 else list(reversed(calls))
        for name in names:
            times[name].append(timed(calls[name], device))
    return times


def captured(call):
    """Return a replay of a call that was captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()

    replay.keeps = call  # and with it the tensors that the graph reads and writes
    return replay


def kernels_of(call) -> list[str]:
    """Return the names of the kernels that a call launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type.name == "CUDA"]
    return [e.name for e in events if not e.name.startswith(("Memcpy", "Memset"))]


def measure(case: str, shapes: list, device: str, write) -> None:
    """Time one list of gradients and write its rows."""
    parameters = [torch.nn.Parameter(torch.zeros(s, device=device)) for s in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    size = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(size, device=device)
    contenders = [
        Contender("torch", torch.amp.GradScaler, device),
        Contender("lossscale", GradScaler, device),
    ]
    options = {"fused": True, "capturable": device != "cpu"}
    adam = torch.optim.AdamW(parameters, lr=1e-9, **options)
    sgd = torch.optim.SGD(parameters, lr=1e-9, fused=False, foreach=True)
    rows = {
        "unscale": ("unscale", sgd),
        "check and clip": ("check_and_clip", adam),
        "check, clip and multiply": ("check_and_clip", sgd),
        "step": ("step", adam),
        "clipped step": ("clipped_step", adam),
        "clipped SGD step": ("clipped_step", sgd),
    }
    for work, (method, optimizer) in rows.items():
        calls = {
            contender.name: partial(getattr(contender, method), optimizer)
            for contender in contenders
        }
        if work.startswith("check"):
            calls["flat read"] = flat.sum
        write(case, work, in_turns(calls, device))
    if device == "cpu":
        return
    ours = contenders[1]
    calls = {
        "lossscale": captured(lambda: ours.check_and_clip(adam)),
        "flat read": captured(flat.sum),
    }
    write(case, "check and clip in a graph", in_turns(calls, device))
    calls = {
        "lossscale": captured(lambda: ours.clipped_step(adam)),
        "AdamW alone": captured(adam.step),
    }
    write(case, "clipped step in a graph", in_turns(calls, device))
    torch.cuda.set_sync_debug_mode("error")
    ours.clipped_step(adam)
    torch.cuda.set_sync_debug_mode("default")
    names = kernels_of(lambda: ours.check_and_clip(adam))
    print(f"{case}: no wait in a clipped step; kernels of check and clip: {names}")


def main(device: str, folder: Path) -> None:
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cuda":
        import triton

        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        }
    columns = [
        "case",
        "work",
        "of",
        "ms",
        "ms_20",
        "ms_80",
        "host_ms",
        "times_lossscale",
    ]
    with (folder / f"torch_step.{device}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *facts])

        def write(case, work, times) -> None:
            ours = [spent for spent, _ in times["lossscale"]]
            for name, pairs in times.items():
                spent = [pair[0] for pair in pairs]
                low, *_, high = statistics.quantiles(spent, n=5)
                middle = statistics.median(spent)
                ratio = statistics.median(
                    a / b for a, b in zip(spent, ours, strict=True)
                )
                host = statistics.median(pair[1] for pair in pairs)
                row = [f"{number:.4f}" for number in (middle, low, high, host)]
                writer.writerow(
                    [case, work, name, *row, f"{ratio:.3f}", *facts.values()]
                )
                text = (
                    f"{case:11} {work:26} {name:12} {middle:8.3f} ms, host {host:7.3f}"
                )
                print(f"{text}, {ratio:6.2f} times lossscale", flush=True)

        for case, shapes in CASES[device].items():
            measure(case, shapes, device, write)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
