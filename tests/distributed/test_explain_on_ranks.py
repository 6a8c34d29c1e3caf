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
