"""What torch's scalers do wrong on several ranks, and ours compared with them.

The numbers are the rows of the list of defects that the pages give.
"""

import math

import numpy as np


def poisoned(scaler, optimizer, weights, bad, *, unscale):
    """Take a step in which some gradients are infinite; return weights and scale."""
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    for weight, value in zip(weights, bad, strict=True):
        if value:
            weight.grad[0] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [weight.tolist() for weight in weights], scaler.get_scale()


def sharded(whose, unscale):
    """Step a fused optimizer; all ranks but the last have an infinite gradient."""
    import torch
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from lossscale.torch import ShardedGradScaler

    rank = torch.distributed.get_rank()
    last = torch.distributed.get_world_size() - 1
    weight = torch.nn.Parameter(torch.ones(2))
    # Not Adam: the fused one raises when it is given the flag of torch's sharded class,
    # which has one dimension.
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = (ShardedGradScaler if whose == "ours" else Theirs)("cpu", 8.0)
    return poisoned(scaler, optimizer, [weight], [rank != last], unscale=unscale)


def test_row_3_flags_that_add_up_are_no_reason_to_step(four_ranks):
    theirs = four_ranks.run(sharded, "torch's", True)
    # Three ranks found something: the flag is 3, and a fused optimizer waits for 1.
    for weights, _ in theirs[:3]:
        assert not np.isfinite(weights).all()
    for weights, scale in four_ranks.run(sharded, "ours", True):
        assert ([[1.0, 1.0]], 4.0) == (weights, scale)


def test_row_4_a_fused_step_without_unscale_is_decided_by_all_ranks(four_ranks):
    theirs = four_ranks.run(sharded, "torch's", False)
    assert [4.0, 4.0, 4.0, 8.0] == [scale for _, scale in theirs]
    assert [[1.0, 1.0]] != theirs[3][0]  # the last rank stepped, alone
    for weights, scale in four_ranks.run(sharded, "ours", False):
        assert ([[1.0, 1.0]], 4.0) == (weights, scale)


def a_float16_loss():
    """Scale a loss of 1 in float16 by the default scale, by both classes."""
    import torch
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from lossscale.torch import ShardedGradScaler

    loss = torch.ones((), dtype=torch.float16)
    return [float(kind("cpu").scale(loss)) for kind in (Theirs, ShardedGradScaler)]


def test_row_5_a_float16_loss_is_scaled_in_float32(two_ranks):
    assert [[math.inf, 65536.0]] * 2 == two_ranks.run(a_float16_loss)


def two_meshes(whose):
    """Break the gradient of an expert, whose mesh is not that of the first weight."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    weights = [
        torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh[name], [Shard(0)]))
        for name in ("a", "b")
    ]
    optimizer = torch.optim.SGD(weights, lr=1.0, foreach=False)
    kind = GradScaler if whose == "ours" else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if torch.distributed.get_rank() == 3:
        weights[1].grad._local_tensor[0] = math.inf
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    scaler.update()
    return scaler.get_scale()


def test_row_8_the_mesh_of_every_gradient_counts(four_ranks):
    # torch tells the mesh of the first weight, "a": ranks 1 and 3. Not 0 and 2, with
    # which rank 3 shares the weight that is broken or the one that is not.
    assert [8.0, 4.0, 8.0, 4.0] == four_ranks.run(two_meshes, "torch's")
    assert [4.0] * 4 == four_ranks.run(two_meshes, "ours")
