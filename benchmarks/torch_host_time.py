# SPDX-License-Identifier: Apache-2.0
"""How much of the host's time does a step take with our GradScaler and with torch's?

In one run and in turns: `scale`, `step` and `update`, for 10, 150 and 2,000 small
parameters on a CPU with one thread (16, 300 and 2,000 on a GPU), with foreach SGD and
with fused AdamW:

    step           not clipped
    clipped step   ours: clip_grad_norm_; torch: unscale_ and torch's clip_grad_norm_
    overflow       one gradient is infinite; not clipped
    clipped overflow

Time is the processor time of the thread. On a GPU it ends when `update` returns:
nothing waits for the device. The gradients are written before the clock starts. A ratio
is the median over turns of ours divided by torch's.

    python benchmarks/torch_host_time.py cpu FOLDER   writes torch_host_time.cpu.csv
"""

import csv
import math
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from machine import describe  # noqa: E402

from lossscale.errors import CollapseWarning  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402

SIZES = {"cpu": (10, 150, 2000), "cuda": (16, 300, 2000)}
ELEMENTS = 64
TURNS = {10: 400, 16: 200, 150: 200, 300: 100, 2000: 30}
WARM_UP = 5
CAP = 1.0
SCALE = 1024.0
CASES = (
    ("step", 0.5, False),
    ("clipped step", 0.5, True),
    ("overflow", math.inf, False),
    ("clipped overflow", math.inf, True),
)
OPTIMIZERS = {
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.0, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.0, fused=True),
}


class Contender:
    """One scaler with parameters and an optimizer of its own."""

    def __init__(self, make, make_optimizer, size: int, device: str) -> None:
        """Make a scaler and everything that it steps."""
        self.params = [
            torch.nn.Parameter(torch.ones(ELEMENTS, device=device)) for _ in range(size)
        ]
        self.optimizer = make_optimizer(self.params)
        self.scaler = make(device, init_scale=SCALE, growth_interval=2**30)
        self.loss = torch.ones((), device=device)
        self.is_torch = make is torch.amp.GradScaler

    def fill(self, first: float) -> None:
        """Write the gradients that a backward pass would leave, after `zero_grad`."""
        self.optimizer.zero_grad()
        for param in self.params:
            param.grad = torch.full_like(param, 0.5)
        self.params[0].grad[0] = first

    def step(self, *, clip: bool) -> None:
        """Take one step."""
        self.scaler.scale(self.loss)
        if clip and self.is_torch:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, CAP)
        elif clip:
            self.scaler.clip_grad_norm_(self.optimizer, CAP)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def time_step(self, first: float, *, clip: bool) -> float:
        """Return the seconds that the host needs for one step."""
        self.fill(first)
        if self.loss.is_cuda:
            torch.cuda.synchronize()
        start = time.thread_time()
        self.step(clip=clip)
        seconds = time.thread_time() - start
        if first == math.inf:  # back to the same scale for the next turn
            self.scaler.update(SCALE)
        return seconds


def compare(ours: Contender, torchs: Contender, first: float, *, clip: bool):
    """Return the median seconds of both, and the median ratio."""
    turns = TURNS[len(ours.params)]
    pairs = []
    for turn in range(WARM_UP + turns):
        if turn % 2:
            pair = ours.time_step(first, clip=clip), torchs.time_step(first, clip=clip)
        else:
            second = torchs.time_step(first, clip=clip)
            pair = ours.time_step(first, clip=clip), second
        pairs.append(pair)
    pairs = pairs[WARM_UP:]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return mine, theirs, statistics.median(one / other for one, other in pairs)


def main(device: str, folder: Path) -> None:
    """Time every case and write a row for each."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES[device]:
        for name, make_optimizer in OPTIMIZERS.items():
            for case, first, clip in CASES:
                ours, torchs = (
                    Contender(make, make_optimizer, size, device)
                    for make in (GradScaler, torch.amp.GradScaler)
                )
                mine, theirs, ratio = compare(ours, torchs, first, clip=clip)
                rows.append(
                    {
                        "tensors": size,
                        "optimizer": name,
                        "case": case,
                        "ours_us": f"{mine * 1e6:.1f}",
                        "torch_us": f"{theirs * 1e6:.1f}",
                        "ours_over_torch": f"{ratio:.2f}",
                    }
                )
                print(*rows[-1].values(), sep="\t", flush=True)
    facts = describe("torch")
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    with (folder / f"torch_host_time.{device}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows(row | facts for row in rows)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        main(sys.argv[1], Path(sys.argv[2]))
