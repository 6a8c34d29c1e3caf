"""What else ranks reduce: norms, losses, micro-batches; and what it takes."""

import math
import random

import numpy as np
import pytest
from helpers.ranks import scaler_of_all


def without_gradients(path):
    """Let rank 0 have no gradients, and rank 3 a bad one at step 1."""
    import torch

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=path == "fused")
    world = torch.distributed.group.WORLD
    scaler = scaler_of_all(shard_groups=world if path == "sharded clip" else None)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        factor = math.inf if step == 1 and rank == 3 else 1.0
        loss = scaler.scale((factor * weight).sum())
        if rank != 0:
            loss.backward()
        if path.endswith("clip"):
            scaler.clip_grad_norm_(optimizer, 1e6)
        if path == "accumulate":
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weight.tolist(), scaler.skipped_steps, scaler.last_step.applied


@pytest.mark.parametrize(
    "path", ["step", "fused", "clip", "sharded clip", "accumulate"]
)
def test_a_rank_without_gradients_takes_part(four_ranks, path):
    results = four_ranks.run(without_gradients, path)
    assert ([8.0, 4.0, 4.0], [1.0, 1.0], 1, True) == results[0]
    for result in results[1:]:
        assert ([8.0, 4.0, 4.0], [0.5, 0.5], 1, True) == result


def random_steps(seed, path, bad):
    """Take steps that are bad on some ranks; return scales and weights."""
    import torch

    from lossscale.torch import GradScaler

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(4))
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.5, fused=path == "fused")
    scaler = GradScaler(
        "cpu", 2.0**10, growth_interval=3, process_groups=torch.distributed.group.WORLD
    )
    seen = []
    for flags in bad:
        optimizer.zero_grad()
        factor = flags[rank]
        scaler.scale(weight.sum() + (factor * other).sum()).backward()
        if path == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), weight[0].item()))
    return seen


def alone(bad):
    """Return what torch's scaler does with the flags of all ranks in one process."""
    import torch

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3)
    seen = []
    for flags in bad:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if not all(map(math.isfinite, flags)):
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), weight[0].item()))
    return seen


@pytest.mark.parametrize("path", ["step", "fused", "unscale"])
@pytest.mark.parametrize("seed", range(3))
def test_the_scale_moves_as_torchs_does_with_all_flags_in_one_place(
    four_ranks, path, seed
):
    chosen = random.Random(seed)
    bad = [
        [chosen.choice([1.0] * 12 + [math.inf, math.nan, -math.inf]) for _ in range(4)]
        for _ in range(40)
    ]
    expected = alone(bad)
    assert [expected] * 4 == four_ranks.run(random_steps, seed, path, bad)


def clipped(norm_type, path, numbers):
    """Clip gradients of which every rank has a part; return norm, gradient, bytes."""
    import torch
    from helpers.collectives import Collectives

    rank = torch.distributed.get_rank()
    world = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.zeros(5))
    # A fused optimizer that moves weights by their gradients alone.
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=path == "fused")
    scaler = scaler_of_all(shard_groups=world)
    own = torch.tensor(numbers[rank])
    scaler.scale((weight * own).sum()).backward()
    with Collectives() as sent:
        if path == "unscaled before":
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 2.0, norm_type=norm_type)
        scaler.step(optimizer)
        scaler.update()
    return float(norm), weight.tolist(), sent.seen, scaler.last_step.norm


@pytest.mark.parametrize("path", ["host", "fused", "unscaled before"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_parts_is_that_of_the_whole(four_ranks, norm_type, path):
    chosen = np.random.default_rng(0)
    numbers = chosen.normal(size=(4, 5)).astype(np.float32)
    expected = np.linalg.norm(numbers.astype(np.float64).ravel(), norm_type)
    results = four_ranks.run(clipped, norm_type, path, numbers.tolist())
    assert 1 == len({norm for norm, *_ in results})
    factor = min(1.0, 2.0 / (expected + 1e-6))
    for rank, (norm, weight, sent, reported) in enumerate(results):
        assert norm == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(weight, -factor * numbers[rank], rtol=1e-5)
        if path != "unscaled before":
            assert reported == norm
            assert [("allreduce_", 56)] == sent


def amax_seen(path):
    """Return the largest magnitude reported: the gradients are rank plus 1."""
    import torch

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of_all()
    scaler.scale((weight * (rank + 1.0)).sum()).backward()
    if path == "accumulate":
        scaler.accumulate(optimizer)
    if path == "inf norm":
        scaler.clip_grad_norm_(optimizer, 1e6, norm_type=math.inf)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.amax


@pytest.mark.parametrize(
    ("path", "expected"), [("step", None), ("accumulate", 4.0), ("inf norm", 4.0)]
)
def test_the_largest_magnitude_is_that_of_all_ranks(four_ranks, path, expected):
    assert [expected] * 4 == four_ranks.run(amax_seen, path)


def a_loss_of_nan(path):
    """Let the loss of rank 1 be NaN while its gradients are finite."""
    import torch

    from lossscale import Dynamic
    from lossscale.torch import GradScaler

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = GradScaler(
        "cpu",
        policy=Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True),
        process_groups=torch.distributed.group.WORLD,
    )
    loss = weight.sum()
    if rank == 1:
        loss = loss + torch.tensor(math.nan)
    scaler.scale(loss).backward()
    if path == "accumulate":
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.tolist(), scaler.last_step.applied


@pytest.mark.parametrize("path", ["step", "accumulate"])
def test_a_loss_of_one_rank_holds_the_scale_of_all(four_ranks, path):
    for result in four_ranks.run(a_loss_of_nan, path):
        assert (8.0, [1.0, 1.0], False) == result


def a_bad_micro_batch():
    """Let the second of four micro-batches be bad on rank 2 only."""
    import torch

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of_all()
    for batch in range(4):
        factor = math.inf if batch == 1 and rank == 2 else batch + 1.0
        scaler.scale((factor * weight).sum()).backward()
        scaler.accumulate(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist(), scaler.get_scale(), scaler.last_step.applied


def test_a_micro_batch_is_dropped_by_all_ranks(four_ranks):
    # 1 + 3 + 4, for three of four, as if there were four.
    expected = -8.0 * 4 / 3
    for weight, scale, applied in four_ranks.run(a_bad_micro_batch):
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
        assert (4.0, True) == (scale, applied)


def what_a_policy_receives(clips):
    """Return what a policy of one's own sees, and how many collectives it took."""
    import dataclasses

    import torch
    from helpers.collectives import Collectives

    from lossscale import ScaleState
    from lossscale.torch import GradScaler

    received = []

    @dataclasses.dataclass(frozen=True)
    class Receiving:
        def init(self):
            return ScaleState(4.0, 0, 0)

        def step(self, state, signal, *, where):
            received.append(
                (bool(signal.finite), float(signal.amax), float(signal.norm))
            )
            return state

    world = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", policy=Receiving(), shard_groups=world)
    scaler.scale((weight * (rank + 1.0)).sum()).backward()
    with Collectives() as sent:
        if clips:
            scaler.clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        scaler.update()
    return received, sent.seen


@pytest.mark.parametrize("clips", [True, False])
def test_a_policy_of_ones_own_receives_the_same_on_every_rank(four_ranks, clips):
    norm = math.sqrt(2 * (1 + 4 + 9 + 16))
    for received, sent in four_ranks.run(what_a_policy_receives, clips):
        ((finite, amax, seen),) = received
        assert (True, 16.0) == (finite, amax)
        assert seen == pytest.approx(norm, rel=1e-6)
        assert ["allreduce_"] * 2 == [name for name, _ in sent]


def sent_by(path):
    """Return the collectives of one step."""
    import torch
    from helpers.collectives import Collectives

    weights = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    fused = path.startswith("fused")
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
    scaler = scaler_of_all()
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    with Collectives() as sent:
        if path.endswith("unscale"):
            scaler.unscale_(optimizer)
        if path.endswith("clip"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        if path.endswith("step_all"):
            scaler.step_all(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    return sent.seen


@pytest.mark.parametrize(
    "path", ["step", "unscale", "clip", "step_all", "fused", "fused clip"]
)
def test_a_step_takes_one_collective_of_at_most_56_bytes(four_ranks, path):
    size = 48 if path.endswith("clip") else 56
    assert [[("allreduce_", size)]] * 4 == four_ranks.run(sent_by, path)


def a_stage_without_a_loss():
    """Let only the last of the stages scale a loss."""
    import torch

    from lossscale.torch import GradScaler

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = GradScaler("cpu", 8.0, shard_groups=torch.distributed.group.WORLD)
    seen = []
    for step in range(2):
        # What comes back through the pipeline carries the scale of the last stage.
        if rank == 3:
            scaler.scale(torch.ones(()))
        weight.grad = torch.full((2,), math.nan if step and rank == 3 else 8.0)
        norm = float(scaler.clip_grad_norm_(optimizer, 1e6))
        scaler.step(optimizer)
        scaler.update()
        seen.append((norm, weight.tolist(), scaler.get_scale()))
    return seen


def test_pipeline_stages_without_a_loss_take_part(four_ranks):
    for first, second in four_ranks.run(a_stage_without_a_loss):
        norm, *rest = first
        assert norm == pytest.approx(math.sqrt(8.0))
        assert [[0.5, 0.5], 8.0] == rest
        assert math.isnan(second[0])
        assert ([0.5, 0.5], 4.0) == second[1:]


def error_of(call, *arguments, **keywords):
    """Return what a call raises, as text; nothing if it does not."""
    try:
        call(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def refused():
    """Return the errors for what cannot be declared, and for a pickle."""
    import copy
    import pickle

    import torch

    from lossscale.torch import GradScaler

    group = torch.distributed.new_group([0, 1])
    scaler = scaler_of_all()
    return [
        error_of(GradScaler, "cpu", process_groups="world"),
        error_of(GradScaler, "cpu", meshes=3),
        error_of(GradScaler, "cpu", process_groups=group),
        error_of(pickle.dumps, scaler),
        error_of(copy.deepcopy, scaler),
    ]


def test_what_cannot_be_declared_is_refused_with_what_to_type(four_ranks):
    for rank, errors in enumerate(four_ranks.run(refused)):
        first, second, third, *pickled = errors
        assert "process_groups must be a process group or a device mesh" in first
        assert "torch.distributed.group.WORLD" in first
        assert "meshes must be" in second
        member = "" if rank < 2 else "this rank is not a member of"
        assert member in third
        assert (third == "") == (rank < 2)
        assert 2 == len(pickled)
        assert all("state_dict()" in message for message in pickled)


def test_groups_need_processes_that_are_running():
    from lossscale.torch import GradScaler

    with pytest.raises(ValueError, match="init_process_group"):
        GradScaler("cpu", process_groups=[])
