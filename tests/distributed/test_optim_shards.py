"""Our optimizers on DTensors: each rank updates its shards."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

from lossscale.torch import GradScaler, optim  # noqa: E402

MAKERS = {
    "AdamW": lambda params: optim.AdamW(params, lr=0.1, master_weights=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, master_weights=True),
}


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make_params(dtype, mesh):
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((4, 3), (5,)):
        tensor = torch.randn(shape, generator=generator).to(dtype)
        if mesh is not None:
            tensor = distribute_tensor(tensor, mesh, [Shard(0)])
        made.append(torch.nn.Parameter(tensor))
    return made


def train(optimizer, params):
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum((param.float() ** 2).sum() for param in params)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_sharded_training_equals_that_of_whole_tensors(mesh, name, dtype):
    whole, shards = make_params(dtype, None), make_params(dtype, mesh)
    for params in (whole, shards):
        train(MAKERS[name](params), params)
    for expected, shard in zip(whole, shards, strict=True):
        assert torch.equal(expected, shard.full_tensor())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_the_update_of_a_shard_is_measured(mesh, name, dtype):
    found = []
    for params in (make_params(dtype, None), make_params(dtype, mesh)):
        optimizer = MAKERS[name](params)
        train(optimizer, params)
        optimizer.measure_next_update()
        optimizer.step()
        found.append(optimizer.last_update)
    assert len(found[0].names) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("name", MAKERS)
def test_sums_of_micro_batches_reach_sharded_masters_in_float32(mesh, name):
    for params in (make_params(torch.float16, None), make_params(torch.float16, mesh)):
        optimizer = MAKERS[name](params)
        scaler = GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(torch.zeros(()))
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, 1e-8 * 2.0**16)
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
        kept = "exp_avg" if name == "AdamW" else "momentum_buffer"
        moment = optimizer.state[params[0]][kept]
        moment = moment.full_tensor() if isinstance(moment, DTensor) else moment
        expected = 2e-8 * (0.1 if name == "AdamW" else 1.0)
        found = moment.flatten().tolist()
        assert [expected] * len(found) == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_state_is_sharded_as_its_parameter_is(mesh, name):
    params = make_params(torch.float16, mesh)
    optimizer = MAKERS[name](params)
    train(optimizer, params)
    other = MAKERS[name](make_params(torch.float16, mesh))
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key, value in one.items():
            assert isinstance(two[key], DTensor) == isinstance(value, DTensor)
            assert two[key].dtype == value.dtype
            assert torch.equal(
                *(
                    x.full_tensor() if isinstance(x, DTensor) else x
                    for x in (value, two[key])
                )
            )
