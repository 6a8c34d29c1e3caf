"""Ranks of a declared group: one decision, whichever way the step is taken."""

import pytest

PATHS = ("step", "unscale", "clip", "fused", "fused and clip", "step_all", "closure")


def step_once(path, bad_rank, value):
    """Take a finite step and one with a bad gradient on one rank; return what came."""
    import torch

    from lossscale.torch import GradScaler

    rank = torch.distributed.get_rank()
    weights = [torch.nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
    if path.startswith("fused"):
        optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    else:
        optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = GradScaler(
        "cpu",
        init_scale=8.0,
        growth_interval=1,
        process_groups=torch.distributed.group.WORLD,
    )
    seen = []
    for step in range(3):
        factor = value if step == 1 and rank == bad_rank else 1.0

        def loss(factor=factor):
            optimizer.zero_grad()
            result = scaler.scale(weights[0].sum() + (factor * weights[1]).sum())
            result.backward()
            return result

        if path == "closure":
            scaler.step(optimizer, closure=loss)
        else:
            loss()
            if path == "unscale":
                scaler.unscale_(optimizer)
            if path.endswith("clip"):
                scaler.clip_grad_norm_(optimizer, 100.0)
            if path == "step_all":
                scaler.step_all(optimizer)
            else:
                scaler.step(optimizer)
        scaler.update()
        last = scaler.last_step
        seen.append(
            (
                [weight.tolist() for weight in weights],
                scaler.get_scale(),
                last.applied,
                last.reason,
                len(last.nonfinite_names),
            )
        )
    return seen


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("path", PATHS)
def test_a_bad_gradient_of_one_rank_is_skipped_by_all(four_ranks, path, value):
    results = four_ranks.run(step_once, path, 2, value)
    for rank, (first, second, third) in enumerate(results):
        assert ([[1.0] * 3] * 2, 16.0, True, None, 0) == first
        reason = "nan" if value != value else "inf"  # noqa: PLR0124
        reason = "loss" if rank == 2 else reason  # which knows of its own loss
        nonfinite_names = 1 if rank == 2 else 0
        assert ([[1.0] * 3] * 2, 8.0, False, reason, nonfinite_names) == second
        assert ([[0.0] * 3] * 2, 16.0, True, None, 0) == third
