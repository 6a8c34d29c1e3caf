"""FSDP1 with our scaler in place of torch's."""

import math
import pickle

import numpy as np
import pytest


def train(whose, fused, use_orig_params, poison, clips):
    """Train a model under FSDP1; return weights, scales and norms."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from lossscale.torch import ShardedGradScaler

    rank = torch.distributed.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    model = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    kind = ShardedGradScaler if whose == "ours" else Theirs
    scaler = kind("cpu", 2.0**8, 0.5, 2.0, 2)
    scales, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4) * (rank + 1)).square().sum()).backward()
        if step == poison and rank == 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            next(g for g in gradients if g.numel()).view(-1)[0] = math.inf
        if clips and whose == "ours":
            norms.append(float(scaler.clip_grad_norm_(optimizer, 0.5)))
        else:
            # torch's class has to be asked to unscale, or ranks differ.
            scaler.unscale_(optimizer)
            if clips:
                norms.append(float(model.clip_grad_norm_(0.5)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().tolist() for p in model.parameters()], scales, norms


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_fsdp1_trains_as_with_torchs_scaler(two_ranks, fused, use_orig_params):
    ours, theirs = (
        two_ranks.run(train, whose, fused, use_orig_params, 2, False)
        for whose in ("ours", "torch's")
    )
    assert theirs == ours
    assert [256.0, 512.0, 256.0, 256.0, 512.0] == ours[0][1]


@pytest.mark.parametrize("fused", [True, False])
def test_fsdp1_is_clipped_by_the_norm_of_the_whole(two_ranks, fused):
    ours, theirs = (
        two_ranks.run(train, whose, fused, True, 2, True)
        for whose in ("ours", "torch's")
    )
    for mine, its in zip(ours, theirs, strict=True):
        assert its[1] == mine[1]
        np.testing.assert_allclose(mine[2], its[2], rtol=1e-5)
        for left, right in zip(mine[0], its[0], strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def made_before():
    """Make a scaler, pickle it between steps, and go on with the copy."""
    import torch

    from lossscale.torch import ShardedGradScaler

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler("cpu", 8.0)
    scales = []
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if bad and torch.distributed.get_rank() == 0:
            weight.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        scaler = pickle.loads(pickle.dumps(scaler))  # noqa: S301
    return scales, weight.tolist()


def test_it_can_be_pickled_and_finds_all_ranks_again(two_ranks):
    assert [([8.0, 4.0], [0.0, 0.0])] * 2 == two_ranks.run(made_before)


def test_it_can_be_made_before_the_process_group_and_used_without():
    import torch

    from lossscale.torch import ShardedGradScaler

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [0.0, 0.0] == weight.tolist()


def test_its_arguments_stand_in_the_order_of_torchs():
    import inspect

    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from lossscale.torch import ShardedGradScaler

    theirs, ours = (
        list(inspect.signature(kind).parameters) for kind in (Theirs, ShardedGradScaler)
    )
    assert theirs == ours[: len(theirs)]
