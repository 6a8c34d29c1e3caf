"""A device mesh of one rank: DTensors, and no other rank to decide with."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from lossscale.torch import GradScaler  # noqa: E402


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_gradients_are_clipped_in_the_read_that_checks_them(one_rank):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, max_norm=2.5)
    scaler.step(optimizer)
    scaler.update()
    assert (5.0, 5.0) == (norm.item(), scaler.last_step.norm)
    weight = model.weight.full_tensor().detach()
    torch.testing.assert_close(weight, torch.tensor([[-0.5, -1.0]]), rtol=0, atol=1e-6)
