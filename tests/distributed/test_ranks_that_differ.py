"""Steps that break off, ranks with other gradients than the rest, orders of groups."""

import math

import pytest
from helpers.ranks import local, scaler_of_all


def error_of(call, *arguments):
    """Return the kind of error that a call raises; nothing if it does not."""
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return ""


def step_after_a_failed_look(fused, overrides):
    """Have the ranks differ at `unscale_`; try to step all the same."""
    import torch

    from lossscale.torch import GradScaler

    class Mine(GradScaler):
        def _unscale_grads_(self, *arguments):
            return torch.amp.GradScaler._unscale_grads_(self, *arguments)

    kind = Mine if overrides else GradScaler
    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
    world = torch.distributed.group.WORLD
    scaler = kind("cpu", init_scale=8.0, process_groups=world, on_no_gradients="ignore")
    good = scaler.state_dict()
    if rank == 1:
        scaler.load_state_dict({**good, "_growth_tracker": 5})
    factor = math.nan if rank == 0 else 1.0
    scaler.scale((factor * weight).sum()).backward()
    errors = [error_of(scaler.unscale_, optimizer)]
    errors += [error_of(scaler.step, optimizer), error_of(scaler.update)]
    between = weight.tolist()
    scaler.load_state_dict(good)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    errors += [error_of(scaler.step, optimizer), error_of(scaler.update)]
    return errors, between, weight.tolist(), scaler.get_scale()


@pytest.mark.parametrize("overrides", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_stepped_after_a_check_that_failed(two_ranks, fused, overrides):
    for errors, between, after, scale in two_ranks.run(
        step_after_a_failed_look, fused, overrides
    ):
        assert ["DriftError", "AssertionError", "AssertionError", "", ""] == errors
        assert [1.0, 1.0] == between
        # What the message advises is a way to go on.
        assert ([0.75, 0.75], 8.0) == (after, scale)


def sum_after_a_failed_look():
    """Have the ranks differ when the sum of micro-batches is judged."""
    import torch

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of_all()
    scaler.scale(weight.sum()).backward()
    scaler.accumulate(optimizer)
    if rank == 1:
        scaler._growth_tracker.fill_(5)
    first = error_of(scaler.step, optimizer)
    scaler._growth_tracker.fill_(0)
    return first, error_of(scaler.step, optimizer), weight.tolist()


def test_a_sum_is_not_unscaled_after_it_was_given_back(two_ranks):
    for result in two_ranks.run(sum_after_a_failed_look):
        assert ("DriftError", "AssertionError", [0.0, 0.0]) == result


def own_look(fused):
    """Let a subclass check by itself, rank 0 having no gradient."""
    import torch

    from lossscale.torch import GradScaler

    class Mine(GradScaler):
        def _unscale_grads_(self, *arguments):
            return torch.amp.GradScaler._unscale_grads_(self, *arguments)

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
    scaler = Mine("cpu", 8.0, process_groups=torch.distributed.group.WORLD)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        factor = math.inf if step == 1 and rank == 1 else 1.0
        loss = scaler.scale((factor * weight).sum())
        if rank != 0:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weight.tolist()


@pytest.mark.parametrize("fused", [False, True])
def test_a_check_of_a_subclass_is_shared(four_ranks, fused):
    first, *others = four_ranks.run(own_look, fused)
    assert ([8.0, 4.0, 4.0], [1.0, 1.0]) == first
    assert [([8.0, 4.0, 4.0], [0.5, 0.5])] * 3 == others


def clip_in_a_closure():
    """Clip inside the closure of a fused optimizer; rank 0 has no gradients."""
    import torch

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    scaler = scaler_of_all()

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(weight.sum())
        if rank != 0:
            loss.backward()
        scaler.clip_grad_norm_(optimizer, 1e6)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    return weight.tolist(), scaler.get_scale()


def test_a_rank_without_gradients_clips_in_a_closure(two_ranks):
    expected = [([1.0, 1.0], 8.0), ([0.75, 0.75], 8.0)]
    assert expected == two_ranks.run(clip_in_a_closure)


def scales_of_a_policy(field, path):
    """Let a policy go by a measurement that differs from rank to rank."""
    import dataclasses

    import torch

    from lossscale import ScaleState
    from lossscale.torch import GradScaler

    @dataclasses.dataclass(frozen=True)
    class ByMeasurement:
        def init(self):
            return ScaleState(4.0, 0, 0)

        def step(self, state, signal, *, where):
            high = getattr(signal, field) > 20.0
            return state._replace(scale=where(high, state.scale / 2, state.scale * 2))

    rank = torch.distributed.get_rank()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    world = torch.distributed.group.WORLD
    scaler = GradScaler("cpu", policy=ByMeasurement(), process_groups=world)
    scales = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = scaler.scale((100.0 * rank * weight).sum())
        if rank:
            loss.backward()
        if path == "accumulate":
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("field", "path"), [("amax", "accumulate"), ("amax", "step"), ("norm", "step")]
)
def test_a_policy_moves_the_scales_of_all_ranks_alike(two_ranks, field, path):
    assert [[2.0, 1.0]] * 2 == two_ranks.run(scales_of_a_policy, field, path)


def norm_of_one_pair():
    """Have the norm of one pair of ranks be beyond float32, and all ranks skip."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.nn.Parameter(
        distribute_tensor(torch.zeros(4), mesh["tp"], [Shard(0)])
    )
    optimizer = torch.optim.SGD([weight], lr=1.0)
    world = torch.distributed.group.WORLD
    scaler = GradScaler("cpu", init_scale=1.0, process_groups=world)
    scaler.scale(torch.ones(()))
    weight.grad = torch.zeros_like(weight)
    local(weight.grad).fill_(3e38 if torch.distributed.get_rank() > 1 else 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), scaler.last_step.applied, local(weight).tolist()


def test_a_norm_beyond_float32_is_skipped_by_all_ranks_at_the_same_scale(four_ranks):
    expected = (1.0, False, [0.0, 0.0])
    assert [expected] * 4 == four_ranks.run(norm_of_one_pair)


def stages_of_two_kinds(bad_rank, clips):
    """Have a stage of DTensors and a stage of plain weights."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = torch.distributed.get_rank()
    first = distribute_tensor(torch.zeros(4), mesh["dp"], [Shard(0)])
    weight = torch.nn.Parameter(first if rank < 2 else torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler(
        "cpu", 8.0, meshes=mesh, shard_groups=mesh["pp"] if clips else None
    )
    scaler.scale(torch.ones(()))
    weight.grad = torch.zeros_like(weight)
    local(weight.grad).fill_(8.0)
    if rank == bad_rank:
        local(weight.grad)[0] = math.inf
    norm = float(scaler.clip_grad_norm_(optimizer, 1e6)) if clips else None
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), norm


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("bad_rank", [None, 0, 1, 2, 3])
def test_stages_with_other_meshes_agree(four_ranks, bad_rank, clips):
    for scale, norm in four_ranks.run(stages_of_two_kinds, bad_rank, clips):
        assert (8.0 if bad_rank is None else 4.0) == scale
        if clips and bad_rank is None:
            # Four numbers in the parts of one stage, four in the other.
            assert norm == pytest.approx(math.sqrt(8.0), rel=1e-6)


def other_parameters(change):
    """Give an optimizer DTensors after its first step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (4,))
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    new = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    if change == "swapped":
        optimizer.param_groups[0]["params"][0] = new
    else:
        optimizer.add_param_group({"params": [new]})
    new.grad = torch.zeros_like(new)
    if torch.distributed.get_rank() == 0:
        local(new.grad)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("change", ["swapped", "added"])
def test_parameters_that_come_later_bring_their_ranks(four_ranks, change):
    assert [4.0] * 4 == four_ranks.run(other_parameters, change)


def a_loss_over_ranks():
    """Have a loss that is a DTensor itself, with a policy that checks it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale import Dynamic
    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2,))
    policy = Dynamic(init_scale=8.0, hold_on_nonfinite_loss=True)
    scaler = GradScaler("cpu", policy=policy)
    seen = []
    for start in (1.0, 3e38):
        whole = torch.full((4,), start)
        weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler.last_step.applied))
    return seen


def test_a_loss_that_is_spread_over_ranks_is_checked(two_ranks):
    # Parts of the second loss are finite on no rank, and their sum is not either.
    assert [[(8.0, True), (8.0, False)]] * 2 == two_ranks.run(a_loss_over_ranks)


def declared_twice(clips):
    """Have DTensors over one group, and plain parts over it and another one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    whole = torch.nn.Parameter(
        distribute_tensor(torch.zeros(3), mesh["tp"], [Replicate()])
    )
    own = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([whole, own], lr=1.0, foreach=False)
    scaler = GradScaler("cpu", 8.0, shard_groups=mesh)
    scaler.scale(torch.ones(()))
    for weight in (whole, own):
        weight.grad = torch.zeros_like(weight)
        local(weight.grad).fill_(8.0)
    return float(scaler.clip_grad_norm_(optimizer, clips))


def test_a_whole_dtensor_counts_once_in_its_own_ranks_and_is_added_over_others(
    four_ranks,
):
    # `whole` is one tensor on each of two stages, `own` another one on each rank.
    for norm in four_ranks.run(declared_twice, 1e6):
        assert norm == pytest.approx(math.sqrt(2 * 3 + 4 * 5), rel=1e-6)


def stages_without_parts(norm_type, whole):
    """Clip a stage of DTensors and a stage of plain weights under one declaration."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lossscale.torch import GradScaler

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = torch.distributed.get_rank()
    first = distribute_tensor(torch.zeros(4), mesh["dp"], [Shard(0)])
    weight = torch.nn.Parameter(first if rank < 2 else torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    world = torch.distributed.group.WORLD
    scaler = GradScaler("cpu", 8.0, process_groups=world)
    seen = []
    for step in range(2):
        scaler.scale(torch.ones(()))
        weight.grad = torch.zeros_like(weight)
        local(weight.grad).fill_(scaler.get_scale())
        if step == 0 and rank == 3:
            local(weight.grad)[0] = math.nan
        norm = float(scaler.clip_grad_norm_(optimizer, 1e6, norm_type=norm_type))
        scaler.step(optimizer)
        scaler.update()
        seen.append((norm, scaler.get_scale(), scaler.last_step.applied))
    return seen


@pytest.mark.parametrize(("norm_type", "whole"), [(2.0, 2.0), (math.inf, 1.0)])
def test_ranks_with_nothing_to_add_up_make_the_same_calls(four_ranks, norm_type, whole):
    for first, second in four_ranks.run(stages_without_parts, norm_type, whole):
        assert (4.0, False) == first[1:]
        assert (4.0, True) == second[1:]
        assert second[0] == pytest.approx(whole, rel=1e-6)
