# SPDX-License-Identifier: Apache-2.0
"""What does one decision for all ranks cost, compared with what torch pays for less?

On 2, 4 and 8 gloo processes of this machine, in one run and in turns, for the gradients
of a small model spread by FSDP2 (150 tensors of 2,048 numbers, DTensors) and for plain
tensors of the same number with a group declared:

    FSDP2: unscale     unscale_, update               torch: GradScaler
    FSDP2: clip        clip_grad_norm_, update        torch: unscale_, clip, update
    FSDP1: unscale     unscale_, update               torch: ShardedGradScaler
    alone: unscale     the same plain gradients, no group: the cost without a reduction
    bare all_reduce    56 bytes, nothing else: the limit

A time is that of the slowest rank, the median of many turns; a barrier is before each.
With more ranks than cores the processes also wait for each other's turn to run, so the
ratios say more than the times. Collectives and their bytes are counted apart.

    python benchmarks/torch_ranks.py FOLDER      writes FOLDER/torch_ranks.csv
"""

import csv
import os
import socket
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers.collectives import Collectives  # noqa: E402
from machine import describe  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp.sharded_grad_scaler import (  # noqa: E402
    ShardedGradScaler as Theirs,
)
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from lossscale.torch import GradScaler, ShardedGradScaler  # noqa: E402

RANKS = 2, 4, 8
TENSORS, NUMBERS = 150, 2048
TURNS, WARM_UP = 60, 10


def parameters(mesh) -> list:
    """Return weights with gradients; spread over a mesh if there is one."""
    made = []
    for _ in range(TENSORS):
        whole = torch.ones(NUMBERS)
        spread = whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])
        weight = torch.nn.Parameter(spread)
        weight.grad = torch.ones_like(weight)
        made.append(weight)
    return made


def unscale(scaler, optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.update()


def clip(scaler, optimizer) -> None:
    if isinstance(scaler, GradScaler):
        scaler.clip_grad_norm_(optimizer, 1e6)
    else:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e6)
        norm.full_tensor()
    scaler.update()


def contenders() -> dict:
    """Return every row's calls: what is measured, and whose."""
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread, plain = (torch.optim.SGD(parameters(m), lr=0.0) for m in (mesh, None))
    settings = {"init_scale": 1.0, "growth_interval": 2**30}

    def made(kind, **more):
        scaler = kind("cpu", **settings, **more)
        scaler.scale(torch.zeros(1))
        return scaler

    lanes = torch.zeros(7, dtype=torch.float64)
    # A scaler of its own for every row: each has an iteration of its own.
    rows = {
        ("FSDP2: unscale", "ours"): (unscale, made(GradScaler), spread),
        ("FSDP2: unscale", "torch"): (unscale, made(torch.amp.GradScaler), spread),
        ("FSDP2: clip", "ours"): (clip, made(GradScaler), spread),
        ("FSDP2: clip", "torch"): (clip, made(torch.amp.GradScaler), spread),
        ("FSDP1: unscale", "ours"): (unscale, made(ShardedGradScaler), plain),
        ("FSDP1: unscale", "torch"): (unscale, made(Theirs), plain),
        ("alone: unscale", "ours"): (unscale, made(GradScaler), plain),
        ("alone: unscale", "torch"): (unscale, made(torch.amp.GradScaler), plain),
    }
    calls = {
        key: (lambda f=function, s=scaler, o=optimizer: f(s, o))
        for key, (function, scaler, optimizer) in rows.items()
    }
    calls["bare all_reduce", "torch"] = lambda: dist.all_reduce(lanes, group=world)
    return calls


def measure(rank: int, ranks: int, port: int, folder: str) -> None:
    """Be one rank; the first writes what all have measured."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks
    )
    calls = contenders()
    times = {key: [] for key in calls}
    for turn in range(WARM_UP + TURNS):
        for key, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= WARM_UP:
                times[key].append(time.perf_counter() - start)
    slowest = torch.tensor([times[key] for key in calls])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rows = []
    for key, own in zip(calls, slowest.tolist(), strict=True):
        with Collectives() as sent:
            calls[key]()
        low, middle, high = statistics.quantiles(own, n=4)
        count, size = len(sent.seen), sum(size for _, size in sent.seen)
        rows.append((ranks, *key, count, size, low, middle, high))
    if rank == 0:
        with Path(folder, f"{ranks}.csv").open("w", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    dist.barrier()
    os._exit(0)  # torch's gloo threads sometimes end a process that ends by itself


def main(folder: str) -> None:
    facts = describe("torch")
    parts = []
    for ranks in RANKS:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(measure, (ranks, port, folder), ranks)
        part = Path(folder, f"{ranks}.csv")
        with part.open(encoding="utf-8") as file:
            parts += list(csv.reader(file))
        part.unlink()
    columns = (
        "ranks,what,whose,collectives,bytes,ms quarter,ms median,ms three quarters"
    )
    path = Path(folder, "torch_ranks.csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns.split(","))
        for *facts_of_row, low, middle, high in parts:
            times = [f"{1e3 * float(value):.3f}" for value in (low, middle, high)]
            writer.writerow([*facts_of_row, *times])
            print(*facts_of_row, *times, sep="  ")


if __name__ == "__main__":
    main(sys.argv[1])
