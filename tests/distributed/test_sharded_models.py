"""Models that torch spreads over ranks: FSDP2, tensor parallel, several meshes, DDP."""

import math

import numpy as np
import pytest
from helpers.ranks import local

from lossscale.diagnostics import measure_tensors

LAYOUTS = ("1-D", "2-D", "tensor parallel", "FSDP2 and tensor parallel", "DDP")


def build(layout):
    """Return a small model spread over all ranks, and the batch of this rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    ranks = torch.distributed.get_world_size()
    # 6 and 3 are no multiples of 4: some parts are smaller, some are empty.
    first, second = torch.nn.Linear(8, 12), torch.nn.Linear(12, 3)
    model = torch.nn.Sequential(first, torch.nn.LayerNorm(12), torch.nn.ReLU(), second)
    if "tensor parallel" in layout:
        # Its layers have to divide evenly.
        second = model[3] = torch.nn.Linear(12, 4)
        del model[1]
    shape = {"2-D": (2, ranks // 2), "FSDP2 and tensor parallel": (ranks // 2, 2)}
    names = {"2-D": ("replicate", "shard"), "FSDP2 and tensor parallel": ("dp", "tp")}
    mesh = init_device_mesh(
        "cpu", shape.get(layout, (ranks,)), mesh_dim_names=names.get(layout, ("all",))
    )
    row = torch.distributed.get_rank()
    if layout == "tensor parallel":
        row = 0  # every rank has the same batch
    if "tensor parallel" in layout:
        across = mesh if layout == "tensor parallel" else mesh["tp"]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, across, plan)
    if layout == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif layout != "tensor parallel":
        if layout == "FSDP2 and tensor parallel":
            mesh = mesh["dp"]
            row = mesh.get_local_rank()
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    batch = torch.randn(ranks, 5, 8, generator=torch.Generator().manual_seed(1))[row]
    return model, batch


def _has_the_same(layout, other):
    """Whether this rank has the same parts of gradients as another one."""
    import torch

    rank = torch.distributed.get_rank()
    if layout == "2-D":
        return rank % 2 == other % 2
    return rank == other or layout == "DDP"


def train(layout, whose, fused, path, poisoned):
    """Train a few steps; return the weights, the scales and the skipped steps."""
    import torch

    from lossscale.torch import GradScaler

    model, batch = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    kind = {"ours": GradScaler, "torch's": torch.amp.GradScaler}[whose]
    scaler = kind("cpu", init_scale=2.0**8, growth_interval=2)
    scales, norms = [], []
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if step == 3 and poisoned is not None:
            rank, value = poisoned
            every = [local(p.grad) for p in model.parameters()]
            some = [gradient for gradient in every if gradient.numel()]
            if _has_the_same(layout, rank):
                some[0].view(-1)[0] = value
        if path == "unscale":
            scaler.unscale_(optimizer)
        if path == "clip" and whose == "ours":
            norms.append(float(scaler.clip_grad_norm_(optimizer, 0.05)))
        elif path == "clip":
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append(float(getattr(norm, "full_tensor", lambda n=norm: n)()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    weights = [local(p.detach()).tolist() for p in model.parameters()]
    return weights, scales, norms


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_torchs_to_the_bit(four_ranks, layout, fused):
    ours, theirs = (
        four_ranks.run(train, layout, whose, fused, "step", (1, math.inf))
        for whose in ("ours", "torch's")
    )
    assert theirs == ours
    for _, scales, _ in ours:
        assert [256.0, 512.0, 512.0, 256.0, 256.0, 512.0] == scales


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_goes_by_the_norm_of_the_whole_model(four_ranks, layout, fused, value):
    ours, theirs = (
        four_ranks.run(train, layout, whose, fused, "clip", (2, value))
        for whose in ("ours", "torch's")
    )
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine[2], its[2], rtol=1e-5)
        assert its[1] == mine[1]
        for left, right in zip(mine[0], its[0], strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-4, atol=1e-6)
            assert np.isfinite(left).all()
    # One norm for all.
    assert 1 == len({str(norms) for _, _, norms in ours})


def one_replica():
    """Break a gradient in one replica only, as a broken device would."""
    import torch

    from lossscale.torch import GradScaler

    seen = []
    for kind in (GradScaler, torch.amp.GradScaler):
        model, batch = build("2-D")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(model(batch).square().mean()).backward()
        if torch.distributed.get_rank() == 0:
            local(model[0].weight.grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def test_replicas_do_not_diverge_as_they_do_with_torch(four_ranks):
    ours, theirs = zip(*four_ranks.run(one_replica), strict=True)
    assert (4.0, 4.0, 4.0, 4.0) == ours
    assert (4.0, 4.0, 8.0, 8.0) == theirs


def one_step(layout, path):
    """Return what one step of ours sends."""
    import torch
    from helpers.collectives import Collectives

    from lossscale.torch import GradScaler

    model, batch = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused="fused" in path)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch).square().mean()).backward()
    with Collectives() as sent:
        if "clip" in path:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return sent.seen


@pytest.mark.parametrize("path", ["step", "clip", "fused clip"])
@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("DDP", 0),
        ("1-D", 1),
        ("2-D", 2),
        ("tensor parallel", 1),
        ("FSDP2 and tensor parallel", 2),
    ],
)
def test_a_step_sends_at_most_64_bytes_once_in_each_group(
    four_ranks, layout, groups, path
):
    for sent in four_ranks.run(one_step, layout, path):
        assert ["allreduce_"] * groups == [name for name, _ in sent]
        assert all(size <= 64 for _, size in sent)


def on_several_meshes(bad_rank, path):
    """Train dense weights over all ranks and experts over pairs, in one optimizer."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from lossscale.torch import GradScaler

    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    dense = torch.nn.Parameter(distribute_tensor(torch.ones(8), everyone, [Shard(0)]))
    experts = torch.nn.Parameter(
        distribute_tensor(torch.ones(4), pairs, [Replicate(), Shard(0)])
    )
    # One list of tensors on two meshes is nothing that torch's operations take.
    optimizer = torch.optim.SGD([dense, experts], lr=1.0, foreach=False)
    scaler = GradScaler("cpu", init_scale=8.0)
    seen = []
    for step in range(2):
        scaler.scale(torch.ones(()))
        for weight in (dense, experts):
            weight.grad = torch.zeros_like(weight)
            local(weight.grad).fill_(2.0 * scaler.get_scale())
        if step == 0 and torch.distributed.get_rank() == bad_rank:
            local(experts.grad)[0] = math.inf
        norm = None
        if path == "clip":
            norm = float(scaler.clip_grad_norm_(optimizer, 1e6))
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), local(dense).tolist(), norm))
    return seen


@pytest.mark.parametrize("path", ["step", "clip"])
@pytest.mark.parametrize("bad_rank", range(4))
def test_gradients_on_different_meshes_are_decided_on_together(
    four_ranks, bad_rank, path
):
    for first, second in four_ranks.run(on_several_meshes, bad_rank, path):
        assert (4.0, [1.0, 1.0]) == first[:2]
        assert (4.0, [-1.0, -1.0]) == second[:2]
        if path == "clip":
            assert second[2] == pytest.approx(2.0 * math.sqrt(8 + 4), rel=1e-6)


def accumulated():
    """Add micro-batches up under FSDP2, one of them bad on one rank."""
    import torch

    from lossscale.torch import GradScaler

    model, batch = build("1-D")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [local(p.detach()).clone() for p in model.parameters()]
    scaler = GradScaler("cpu", init_scale=8.0)
    for micro in range(3):
        scaler.scale(model(batch).square().mean()).backward()
        if micro == 1 and torch.distributed.get_rank() == 3:
            every = [local(p.grad) for p in model.parameters()]
            next(g for g in every if g.numel()).view(-1)[0] = math.nan
        if micro == 2:
            expected = [
                (w - 3 * local(p.grad) / 8.0).tolist()
                for w, p in zip(before, model.parameters(), strict=True)
            ]
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = [local(p.detach()).tolist() for p in model.parameters()]
    return expected, after, scaler.get_scale(), scaler.last_step.applied


def test_a_bad_micro_batch_is_dropped_under_fsdp2(four_ranks):
    for expected, after, scale, applied in four_ranks.run(accumulated):
        for wanted, got in zip(expected, after, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        assert (4.0, True) == (scale, applied)


def partial_sums():
    """Have summands on two ranks that are finite, and whose sum is not."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (4,))
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    weight = torch.nn.Parameter(whole)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    seen = []
    for summand in (2e38, 4.0):
        scaler.scale(torch.ones(()))
        mine = torch.full((2,), summand)
        weight.grad = DTensor.from_local(mine, mesh, [Partial()])
        norm = float(scaler.clip_grad_norm_(optimizer, 1e30))
        scaler.step(optimizer)
        scaler.update()
        seen.append((norm, local(weight).tolist(), scaler.get_scale()))
    return seen


def test_a_gradient_that_is_still_a_sum_is_added_up_before_it_is_judged(four_ranks):
    for first, second in four_ranks.run(partial_sums):
        assert (math.inf, [1.0, 1.0], 4.0) == first
        # 4 ranks x 4, at a scale of 4: the gradient is 4.
        norm, weight, scale = second
        assert norm == pytest.approx(math.hypot(4.0, 4.0))
        assert ([-3.0, -3.0], 4.0) == (weight, scale)


def resumed():
    """Save in the middle and go on with new objects; return both ends."""
    import copy

    import torch

    from lossscale.torch import GradScaler

    ends = []
    for interrupted in (False, True):
        model, batch = build("1-D")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(5):
            if interrupted and step == 3:
                parts = model, optimizer, scaler
                saved = [copy.deepcopy(one.state_dict()) for one in parts]
                model, batch = build("1-D")
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                scaler = GradScaler("cpu")
                for one, state in zip((model, optimizer, scaler), saved, strict=True):
                    one.load_state_dict(state)
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
        weights = [local(p.detach()).tolist() for p in model.parameters()]
        ends.append((weights, scaler.state_dict()))
    return ends


def test_a_run_under_fsdp2_goes_on_from_its_checkpoint(four_ranks):
    for whole, interrupted in four_ranks.run(resumed):
        assert whole == interrupted


def sampled(layout):
    """Return what a step reports of every tensor, and what this rank has of it."""
    import torch

    from lossscale.torch import GradScaler

    class Asked:
        def wants_statistics(self, step):
            return step == 1

        def __call__(self, report):
            self.found = report.statistics

    model, batch = build(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = Asked()
    scaler = GradScaler("cpu", init_scale=8.0, module=model, on_step=asked)
    scaler.scale(model(batch).square().mean()).backward()
    grads = {
        name: local(param.grad).clone().numpy()
        for name, param in model.named_parameters()
    }
    scaler.step(optimizer)
    scaler.update()
    return asked.found, grads


@pytest.mark.parametrize("layout", ["1-D", "FSDP2 and tensor parallel", "DDP"])
def test_statistics_are_those_of_the_shards_of_a_rank(four_ranks, layout):
    for found, grads in four_ranks.run(sampled, layout):
        assert measure_tensors(grads) == found
