"""Each rank says which layer it was, and on which rank."""

import pytest

LAYOUTS = ("DDP", "DDP around the model", "FSDP2")


def build(layout):
    """Return a model spread over all ranks."""
    import torch
    from helpers.planted.fault import Block
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Block(torch.log1p)
    if layout != "FSDP2":
        return torch.nn.parallel.DistributedDataParallel(model)
    for part in (model.embed, model.head):
        fully_shard(part)
    # A scalar cannot be sharded; this one stays whole.
    return fully_shard(model, ignored_params={model.middle.weight})


def explain(layout, bad_rank, scale):
    """Explain a batch that has a number below -1 on one rank; return all as data."""
    import torch

    from lossscale.torch import GradScaler

    model = build(layout)
    inner = model if layout == "FSDP2" else model.module
    if layout == "FSDP2":
        inner.middle.weight.requires_grad_(False)
    named = inner if layout == "DDP around the model" else model
    scaler = GradScaler("cpu", init_scale=scale, module=named)
    batch = torch.ones(4, 8)
    is_bad = torch.distributed.get_rank() == bad_rank

    def damage(_, inputs):
        return (inputs[0].abs() * (-1 if is_bad else 1) - (5 if is_bad else 0),)

    inner.middle.register_forward_pre_hook(damage)
    before = [p.grad is None for p in model.parameters()]
    weights = [local(p).clone() for p in model.parameters()]
    runs = []

    def step():
        runs.append(None)
        loss = 1000 * model(batch).float().pow(2).sum()
        scaler.scale(loss).backward()

    seen = scaler.explain(step)
    assert before == [p.grad is None for p in model.parameters()]
    for weight, param in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, local(param))
    return {"runs": len(runs), **seen.to_dict()}


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_names_the_rank_and_the_layer(two_ranks, layout):
    first, second = two_ranks.run(explain, layout, 1, 1024.0)
    assert (first["rank"], second["rank"]) == (0, 1)
    own = second["first"]
    assert (own["module"], own["operation"]) == ("middle", "log1p")
    assert own["origin"] == "log of a negative number"
    assert second["loss_finite"] is False
    # The other rank's loss is finite, and its gradients are, until they are added up.
    assert first["loss_finite"] is True
    assert first["finite"] is False
    assert first["first"]["origin"] == "another rank"
    assert first["first"]["is_nan"] is True
    assert own == first["others"][0]["first"]
    assert "Rank 0: " in first["text"]
    assert "Rank 1: " in first["text"]
    assert "log1p took the logarithm of a negative number" in first["text"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_try_the_same_scales(two_ranks, layout):
    first, second = two_ranks.run(explain, layout, None, 2.0**127)
    assert first["trials"] == second["trials"] != []
    assert first["runs"] == second["runs"] == 1 + len(first["trials"])
    assert first["lower_scale_helps"] is True
    assert first["first"]["direction"] == "backward"


def explain_collapse():
    """Collapse on all ranks because of one; return the warning's text and the data."""
    import warnings

    import torch

    from lossscale.torch import GradScaler

    model = build("DDP")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(
        "cpu", module=model, max_consecutive_skips=2, on_collapse="explain"
    )
    batch = torch.ones(4, 8)
    if torch.distributed.get_rank() == 1:
        batch[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(batch).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return scaler.last_explanation.to_dict()


def test_after_an_alarm_every_rank_speaks_for_itself(two_ranks):
    first, second = two_ranks.run(explain_collapse)
    assert second["first"]["origin"] == "batch"
    assert second["text"].startswith("Rank 1: ")
    assert first["first"]["origin"] == "another rank"
    assert first["others"] == second["others"] == []


def explain_between_steps(as_views):
    """Explain between a backward pass and its step; return what changed."""
    import torch
    from helpers.planted.fault import Block

    from lossscale.torch import GradScaler

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        Block(torch.tanh), gradient_as_bucket_view=as_views
    )
    scaler = GradScaler("cpu", init_scale=2.0, module=model)
    batch = torch.ones(4, 8)

    def step(gain=1.0):
        scaler.scale(gain * model(batch).pow(2).mean()).backward()

    step()
    step()
    grads = [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in grads]
    seen = scaler.explain(lambda: step(torch.inf))
    same = [p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True)]
    equal = [torch.equal(*pair) for pair in zip(copies, grads, strict=True)]
    step()  # DDP goes on
    doubled = [torch.equal(3 * a, 2 * b) for a, b in zip(copies, grads, strict=True)]
    return seen.finite, all(same), all(equal), all(doubled)


@pytest.mark.parametrize("as_views", [False, True])
def test_gradients_of_ddp_are_put_back(two_ranks, as_views):
    for found in two_ranks.run(explain_between_steps, as_views):
        assert (False, True, True, True) == found


def build_layers(layout):
    """Return two layers with a ReLU between them, spread over the ranks."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    is_ddp = layout == "DDP"
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=is_ddp), nn.Linear(16, 1))
    if is_ddp:
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    if layout == "FSDP2 of one rank":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        mesh = mesh["inner"]
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def explain_layers(layout, scale, bad_shard=None, bad_batch=None):
    """Explain a batch of two layers under autocast; return it as data.

    Args:
        layout: How the model is spread.
        scale: The scale.
        bad_shard: The rank whose shard of the first weight has a NaN.
        bad_batch: The rank whose batch has one.
    """
    import torch

    from lossscale.torch import GradScaler

    model = build_layers(layout)
    rank = torch.distributed.get_rank()
    weight = next(model.parameters())
    if rank == bad_shard:
        with torch.no_grad():
            local(weight)[0] = torch.nan
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    if rank == bad_batch:
        batch[0, 0] = torch.nan
    scaler = GradScaler("cpu", init_scale=scale, module=model)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).float().pow(2).mean()
        scaler.scale(loss).backward()

    return scaler.explain(step).to_dict()


@pytest.mark.parametrize("layout", ["FSDP2", "FSDP2 of one rank"])
def test_an_overflow_of_every_rank_is_its_own_with_fsdp2(two_ranks, layout):
    expected = two_ranks.run(explain_layers, "DDP", 2.0**36)
    for ours, of_ddp in zip(
        two_ranks.run(explain_layers, layout, 2.0**36), expected, strict=True
    ):
        found = ours["first"]
        assert found["origin"] == "overflow"
        assert found["direction"] == "backward"
        keys = ("module", "operation", "node", "magnitude", "origin")
        assert [of_ddp["first"][key] for key in keys] == [found[key] for key in keys]
        assert of_ddp["helping_scale"] == ours["helping_scale"] > 1.0
        assert "another rank" not in ours["text"]
        assert "Clean the data" not in ours["text"]


def test_a_damaged_shard_is_a_parameter_on_every_rank(two_ranks):
    first, second = two_ranks.run(explain_layers, "FSDP2", 1024.0, 1)
    names = ("role", "tensor", "module", "direction")
    expected = ["parameter", "0.weight", "0", "given"]
    for seen in (first, second):
        assert expected == [seen["first"][name] for name in names]
    assert (first["first"]["origin"], second["first"]["origin"]) == (
        "another rank",
        "parameter",
    )
    assert (
        "the parameter 0.weight is NaN; it arrived from another rank" in (first["text"])
    )


def test_a_damaged_parameter_is_one_with_fsdp2_of_one_rank(two_ranks):
    _, seen = two_ranks.run(explain_layers, "FSDP2 of one rank", 1024.0, 1)
    assert (seen["first"]["origin"], seen["first"]["tensor"]) == (
        "parameter",
        "0.weight",
    )


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_the_first_layer_reads_a_bad_batch_before_a_relu_in_place(two_ranks, layout):
    first, second = two_ranks.run(explain_layers, layout, 1024.0, None, 1)
    assert first["first"]["origin"] == "another rank"
    assert first["loss_finite"] is True
    assert (second["first"]["origin"], second["first"]["module"]) == ("batch", "0")
