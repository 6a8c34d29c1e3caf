"""A rank that dies in the middle of a step: the others change nothing by halves."""

import os
import signal

import pytest
from helpers.ranks import Pool


def step_until(dies_at, path):
    """Take steps until rank 1 dies; return what is left, from before and after."""
    import torch

    from lossscale.torch import GradScaler

    world = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.full((2,), 10.0))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=path == "fused")
    shared = world if path == "clip" else None
    scaler = GradScaler(
        "cpu", 8.0, growth_interval=1, process_groups=world, shard_groups=shared
    )
    states = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if step == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        states.append((weight.tolist(), scaler.state_dict()))
        try:
            if path == "unscale":
                scaler.unscale_(optimizer)
            if path == "clip":
                scaler.clip_grad_norm_(optimizer, 1e6)
            scaler.step(optimizer)
            scaler.update()
        except RuntimeError as error:
            after = weight.tolist(), scaler.state_dict()
            again = "nothing"
            try:
                scaler.step(optimizer)
            except (AssertionError, RuntimeError) as second:
                again = type(second).__name__
            left = weight.tolist(), scaler.state_dict()
            return step, type(error).__name__, states[-1] == after == left, again
    return "no error"


@pytest.mark.parametrize("path", ["step", "unscale", "clip", "fused"])
def test_weights_and_scale_stay_together_when_a_rank_dies(path):
    pool = Pool(3)
    try:
        for rank, answer in enumerate(pool.run(step_until, 2, path, but=(1,))):
            if rank == 1:
                continue
            step, _, unchanged, again = answer
            assert 2 == step
            assert unchanged
            assert again in ("AssertionError", "RuntimeError", "DistBackendError")
    finally:
        pool.close()
