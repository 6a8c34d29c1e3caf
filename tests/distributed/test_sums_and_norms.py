"""What is sent by sums, norms that are no number, tensors of other kinds."""

import math

import pytest


def one_bad_part(value, norm_type, bad_rank):
    """Clip parts in a 2 x 2 grid of which one is bad; return norm, scale, NaN."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", 8.0, shard_groups=mesh)
    bad = torch.distributed.get_rank() == bad_rank
    scaler.scale((weight * (value if bad else 1.0)).sum()).backward()
    norm = float(scaler.clip_grad_norm_(optimizer, 1.0, norm_type=norm_type))
    scaler.step(optimizer)
    scaler.update()
    return str(norm), scaler.get_scale(), weight.tolist()


@pytest.mark.parametrize("bad_rank", [0, 3])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_says_what_is_wrong_on_any_rank(four_ranks, value, norm_type, bad_rank):
    expected = (str(value), 4.0, [0.0, 0.0])
    found = four_ranks.run(one_bad_part, value, norm_type, bad_rank)
    assert [expected] * 4 == found


def a_lost_loss_of_parts():
    """Let the loss of rank 1 be NaN and clip by sums; return what became of it."""
    import torch

    from lossscale import Dynamic
    from lossscale.torch import GradScaler

    world = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    scaler = GradScaler("cpu", policy=policy, shard_groups=world)
    loss = weight.sum()
    if torch.distributed.get_rank() == 1:
        loss = loss + torch.tensor(math.nan)
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1e6)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.tolist()


def test_a_loss_of_one_rank_holds_the_scale_where_norms_are_added_up(four_ranks):
    assert [(8.0, [1.0, 1.0])] * 4 == four_ranks.run(a_lost_loss_of_parts)


def drift_seen_in_the_first_group():
    """Have one rank of a grid differ where norms are added up."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from lossscale.errors import DriftError
    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first = 4.0 if torch.distributed.get_rank() == 3 else 8.0
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=first, shard_groups=mesh)
    scaler.scale(weight.sum()).backward()
    try:
        scaler.clip_grad_norm_(optimizer, 1.0)
    except DriftError as error:
        return str(error)
    return "no error"


def test_drift_reaches_ranks_of_other_groups_by_sums(four_ranks):
    for message in four_ranks.run(drift_seen_in_the_first_group):
        assert "ranks 0, 1, 2 have 8 (0 finite steps); rank 3 has 4" in message


def gradients_of_a_kind_of_their_own():
    """Let rank 1 have a bad gradient that only torch can read."""
    import torch

    from lossscale.torch import GradScaler

    class Own(torch.Tensor):
        pass

    world = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    scaler = GradScaler("cpu", 8.0, process_groups=world)
    scaler.scale(torch.ones(()))
    gradient = torch.full((2,), 8.0)
    if torch.distributed.get_rank() == 1:
        gradient = torch.tensor([math.inf, 1.0]).as_subclass(Own)
    weight.grad = gradient
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.tolist()


def test_tensors_that_torch_checks_are_shared(four_ranks):
    expected = [(4.0, [1.0, 1.0])] * 4
    assert expected == four_ranks.run(gradients_of_a_kind_of_their_own)


def sent_with_a_covering_group():
    """Return what one step sends if all ranks of a mesh are declared as well."""
    import torch
    from helpers.collectives import Collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)])
    weight = torch.nn.Parameter(whole)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", 8.0, process_groups=torch.distributed.group.WORLD)
    scaler.scale(torch.ones(()))
    weight.grad = torch.zeros_like(weight)
    with Collectives() as sent:
        scaler.step(optimizer)
        scaler.update()
    return len(sent.seen)


def test_a_group_of_all_ranks_is_enough_for_a_decision(four_ranks):
    assert [1] * 4 == four_ranks.run(sent_with_a_covering_group)
