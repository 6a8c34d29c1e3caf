"""A finite gradient that is too large on one rank: all skip, and no scale moves."""

import pytest

PATHS = ("step", "unscale", "fused", "clip", "step_all", "accumulate", "DTensor")
HUGE = 3e38


def skip_once(path, values):
    """Take a step in which every rank has its own largest gradient."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    start = torch.full((4,), 2.0)
    if path == "DTensor":
        start, group = (
            distribute_tensor(start, init_device_mesh("cpu", (4,)), [Shard(0)]),
            None,
        )
    weight = torch.nn.Parameter(start)
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=path == "fused")
    scaler = GradScaler("cpu", process_groups=group)
    scaler.scale(torch.ones(()))
    weight.grad = torch.ones_like(weight)
    here = weight.grad.to_local() if path == "DTensor" else weight.grad
    here[-1] = values[rank]
    if path == "unscale":
        scaler.unscale_(optimizer)
    if path == "clip":
        # Not below what the optimizer can square.
        scaler.clip_grad_norm_(optimizer, 1e37)
    if path == "accumulate":
        scaler.accumulate(optimizer)
    if path == "step_all":
        scaler.step_all(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()
    local = weight.to_local() if path == "DTensor" else weight
    moved = not bool((local == 2.0).all())
    return moved, scaler.get_scale(), scaler.last_step.reason


@pytest.mark.parametrize("path", PATHS)
def test_one_rank_with_a_gradient_too_large_holds_all_back(four_ranks, path):
    values = [1.0, 1.0, HUGE, 1.0]
    expected = (False, 65536.0, "headroom")
    assert [expected] * 4 == four_ranks.run(skip_once, path, values)


@pytest.mark.parametrize("path", PATHS)
def test_an_overflow_on_another_rank_is_what_counts(four_ranks, path):
    values = [1.0, float("inf"), HUGE, 1.0]
    results = four_ranks.run(skip_once, path, values)
    assert [(False, 32768.0)] * 4 == [result[:2] for result in results]
