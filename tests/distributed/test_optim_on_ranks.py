"""AdamW with masters on two ranks, next to torch's AdamW in float32."""

import pytest


def build(layout):
    """Return a float16 model spread over the ranks, and the batch of this rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from lossscale.torch import to_float16

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 7 if layout == "FSDP2" else 6),
        torch.nn.LayerNorm(7) if layout == "FSDP2" else torch.nn.ReLU(),
        torch.nn.Linear(7 if layout == "FSDP2" else 6, 2),
    )
    to_float16(model)
    mesh = init_device_mesh("cpu", (2,))
    row = torch.distributed.get_rank()
    if layout == "FSDP2":
        # All parameters of a group have one dtype, and the norm is kept in float32.
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        row = 0  # every rank has the same batch
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    batch = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))[row]
    return model, batch


def train(layout, path):
    """Train with masters, and torch's AdamW on the same gradients in float32.

    Returns:
        The largest difference of masters, whether the weights are the masters rounded,
        the kinds of tensors that are kept, and how many steps were skipped.
    """
    import torch
    from helpers.ranks import local
    from torch.distributed.tensor import DTensor

    from lossscale.torch import GradScaler, optim

    def whole(tensor):
        # A bias after a row-wise layer is whole on every rank.
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().float().clone()

    model, batch = build(layout)
    params = list(model.parameters())
    wide = [torch.nn.Parameter(whole(param)) for param in params]
    reference = torch.optim.AdamW(wide, lr=0.1)
    optimizer = optim.AdamW(params, lr=0.1, master_weights=True)
    scaler = GradScaler("cpu", init_scale=2.0**6)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(batch).float().square().mean()).backward()
        if step == 3 and torch.distributed.get_rank() == 1:
            local(params[0].grad).view(-1)[0] = torch.inf
        for param, other in zip(params, wide, strict=True):
            other.grad = whole(param.grad) / scaler.get_scale()
        if path == "clip":
            scaler.clip_grad_norm_(optimizer, 0.05)
            torch.nn.utils.clip_grad_norm_(wide, 0.05)
        elif path == "accumulate":
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            reference.step()
    masters = list(optimizer.master_parameters())
    differences = [
        (whole(master) - other.detach()).abs().max().item()
        for master, other in zip(masters, wide, strict=True)
    ]
    are_rounded = all(
        torch.equal(local(master).to(param.dtype), local(param.detach()))
        for master, param in zip(masters, params, strict=True)
    )
    kinds = {type(master).__name__ for master in masters}
    return max(differences), are_rounded, sorted(kinds), scaler.skipped_steps


@pytest.mark.parametrize("path", ["step", "clip", "accumulate"])
@pytest.mark.parametrize("layout", ["FSDP2", "tensor parallel"])
def test_masters_on_ranks_are_those_of_float32(two_ranks, layout, path):
    for difference, are_rounded, kinds, skipped in two_ranks.run(train, layout, path):
        # torch clips by a factor of its own, rounded to float32.
        assert difference <= (1e-5 if path == "clip" else 0.0)
        assert are_rounded
        assert "DTensor" in kinds
        assert 1 == skipped
