"""Ranks with different scales: an error on all of them, which says who has what."""

import pytest


def step_apart(kind, path):
    """Give rank 1 another state than the others; return the error and what is left."""
    import torch

    from lossscale.errors import DriftError
    from lossscale.torch import GradScaler

    world = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=path == "fused")
    scaler = GradScaler(
        "cpu",
        init_scale=8.0,
        process_groups=world,
        shard_groups=world if path == "sum" else None,
    )
    state = scaler.state_dict()
    if rank == 1:
        state |= {"scale": 16.0} if kind == "scale" else {"_growth_tracker": 5}
    scaler.load_state_dict(state)
    scaler.scale(weight.sum()).backward()
    try:
        if path == "sum":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    except DriftError as error:
        after = scaler.state_dict()
        same = all(after[name] == value for name, value in state.items())
        return str(error), weight.tolist(), same
    return "no error", weight.tolist(), True


@pytest.mark.parametrize("path", ["host", "fused", "sum"])
def test_another_scale_on_one_rank_is_an_error_on_every_rank(four_ranks, path):
    for message, weight, same in four_ranks.run(step_apart, "scale", path):
        assert (
            "ranks 0, 2, 3 have 8 (0 finite steps); rank 1 has 16 (0 finite steps)"
        ) in message
        assert [1.0, 1.0] == weight
        assert same


@pytest.mark.parametrize("path", ["host", "fused", "sum"])
def test_another_count_towards_growth_is_an_error_before_the_scales_part(
    four_ranks, path
):
    for message, weight, same in four_ranks.run(step_apart, "count", path):
        assert "rank 1 has 8 (5 finite steps)" in message
        assert [1.0, 1.0] == weight
        assert same


def step_in_a_grid():
    """Have one rank of a 2 x 2 mesh differ; return the errors."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from lossscale.errors import DriftError
    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first = 4.0 if torch.distributed.get_rank() == 3 else 8.0
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=first, meshes=mesh)
    scaler.scale(weight.sum()).backward()
    try:
        scaler.step(optimizer)
    except DriftError as error:
        return str(error)
    return "no error"


def test_ranks_that_share_no_group_with_it_are_informed_as_well(four_ranks):
    for message in four_ranks.run(step_in_a_grid):
        assert (
            "ranks 0, 1, 2 have 8 (0 finite steps); rank 3 has 4 (0 finite steps)"
        ) in message


def marks_of_sums(seed):
    """Compare random marks by sums, as SUM does it; return the wrong answers."""
    import random

    import torch

    from lossscale.torch.distributed.consensus import (
        DeviceOps,
        Findings,
        HostOps,
        reduce_findings,
    )
    from lossscale.torch.distributed.rank_groups import parse_rank_groups
    from lossscale.torch.distributed.reduction_plan import ReductionPlan

    world = torch.distributed.group.WORLD
    plan = ReductionPlan(parse_rank_groups(world, None, world), [])
    rank = torch.distributed.get_rank()
    random = random.Random(seed)
    wrong = []
    for at in range(200):
        base = random.choice([0, 1, 2**16, 2**32 - 1, random.randrange(2**32)])
        marks = [base] * 4
        if random.random() < 0.7:
            step = random.choice([1, 2**16, 2**16 - 1, 2**16 + 1, 2**31, 7])
            # Patterns whose mean is the mark of some rank, too.
            for other in range(random.randrange(1, 4)):
                marks[other] = (base + random.choice([-1, 1]) * step) % 2**32
        ops, zero, mark = HostOps(), 0.0, float(marks[rank])
        if at % 2:
            ops = DeviceOps()
            zero, mark = torch.tensor([zero, mark], dtype=torch.float64).unbind()
        found = Findings(zero, zero, zero, zero, zero, {})
        _, drifted = reduce_findings(
            plan, found, mark, ops, wants_amax=at % 3 == 0, sums_squares=True
        )
        if bool(drifted) != (len(set(marks)) > 1):
            wrong.append(marks)
    return wrong


def test_sums_tell_any_difference_on_every_rank(four_ranks):
    assert [[]] * 4 == four_ranks.run(marks_of_sums, 0)
