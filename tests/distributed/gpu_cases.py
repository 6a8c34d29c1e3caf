"""Two ranks on one GPU: what CI cannot run. A script, not collected by pytest.

    PYTHONPATH=src:tests python tests/distributed/gpu_cases.py

gloo reduces CUDA tensors as well, and lets two ranks share a GPU, which NCCL does not.
Every case runs on both ranks and raises if it fails.
"""

# ruff: noqa: T201  # a script prints
import math
import os
import socket
import sys
import traceback

import torch
import torch.distributed as dist

from lossscale.errors import DriftError
from lossscale.torch import GradScaler

RANKS = 2


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def prepared(path, **settings):
    """Return a weight, its optimizer and a scaler of all ranks, on the GPU."""
    weight = torch.nn.Parameter(torch.full((1000,), 2.0, device="cuda"))
    fused = path.startswith("fused")
    optimizer = torch.optim.AdamW([weight], lr=0.125, weight_decay=0.0, fused=fused)
    world = dist.group.WORLD
    sharded = world if "parts" in path else None
    scaler = GradScaler(
        "cuda", init_scale=8.0, process_groups=world, shard_groups=sharded, **settings
    )
    return weight, optimizer, scaler


def step(path, weight, optimizer, scaler, factor=1.0):
    optimizer.zero_grad()
    scaler.scale((factor * weight).sum()).backward()
    norm = None
    if "clip" in path:
        norm = scaler.clip_grad_norm_(optimizer, 1e6)
    scaler.step(optimizer)
    scaler.update()
    return norm


def skips_together(path):
    weight, optimizer, scaler = prepared(path)
    for at in range(4):
        before = weight.detach().clone()
        bad = at == 1 and dist.get_rank() == 1
        norm = step(path, weight, optimizer, scaler, math.nan if bad else 1.0)
        report = scaler.last_step
        check(report.applied == (at != 1), f"step {at} applied: {report.applied}")
        moved = not torch.equal(before, weight)
        check(moved == (at != 1), f"step {at} moved: {moved}")
        if at == 1:
            check(report.reason in ("nan", "loss"), report.reason)
            check(bool(report.nonfinite_names) == bad, report.nonfinite_names)
        elif norm is not None:
            wanted = math.sqrt(1000.0 * (RANKS if "parts" in path else 1))
            check(abs(norm.item() - wanted) < 1e-4, (norm.item(), wanted))
    check(scaler.get_scale() == 4.0, scaler.get_scale())


def waits_for_nothing():
    """Count the synchronisations that torch sees in a fused, clipped step.

    gloo itself copies to the host and waits; so the reduction is left out: one rank
    alone, of whose group nothing is asked.
    """
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = GradScaler("cuda")
    for at in range(4):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        torch.cuda.set_sync_debug_mode("error" if at else "default")
        try:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def raises_late_on_all(path):
    weight, optimizer, scaler = prepared(path)
    step(path, weight, optimizer, scaler)
    if dist.get_rank() == 1:
        scaler.update(32.0)
    before, taken = weight.detach().clone(), []
    try:
        for at in range(5):
            step(path, weight, optimizer, scaler)
            taken.append(at)
    except DriftError as error:
        check("rank 1" in str(error), str(error))
    check(taken == [0, 1], f"steps before the error: {taken}")
    check(torch.equal(before, weight), "a step was taken")


def sharded_over(fused):
    """Train DTensors on the GPU as with torch's scaler, to the bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (RANKS,))
    ends = []
    for kind in (GradScaler, torch.amp.GradScaler):
        whole = torch.linspace(-1.0, 1.0, 64, device="cuda")
        weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        scaler = kind("cuda", init_scale=2.0**8, growth_interval=2)
        for at in range(5):
            optimizer.zero_grad()
            scaler.scale((weight * weight).sum().full_tensor()).backward()
            if at == 2 and dist.get_rank() == 0:
                weight.grad._local_tensor[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        ends.append((weight._local_tensor.detach().clone(), scaler.get_scale()))
    (ours, scale), (theirs, its) = ends
    check(torch.equal(ours, theirs), "weights differ")
    check(scale == its, (scale, its))


CASES = [
    *((skips_together, path) for path in ("step", "clip", "parts clip", "fused")),
    *((skips_together, path) for path in ("fused clip", "fused parts clip")),
    (raises_late_on_all, "fused"),
    (raises_late_on_all, "fused parts clip"),
    (sharded_over, False),
    (sharded_over, True),
    (waits_for_nothing,),
]


def be(rank, port):
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS
    )
    failed = 0
    for case, *arguments in CASES:
        dist.barrier()
        try:
            case(*arguments)
        except Exception:  # noqa: BLE001  # every case is to be run
            failed += 1
            print(f"rank {rank}: {case.__name__} {arguments} FAILED")
            traceback.print_exc()
        else:
            if rank == 0:
                print(f"{case.__name__} {arguments}: passed", flush=True)
    sys.stdout.flush()
    os._exit(failed)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number = free.getsockname()[1]
    torch.multiprocessing.spawn(be, (number,), RANKS)
    print(torch.__version__, torch.cuda.get_device_name())
