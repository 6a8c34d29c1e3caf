# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices and AdamW for the rest: both take a step, or neither does.

    pip install 'lossscale[torch]'
    python examples/recipes/two_optimizers.py

At one of ten steps a gradient is infinite: that of a bias, which belongs to AdamW. With
torch's scaler each optimizer checks its own gradients. Muon's are finite, so it moves
on while AdamW does not, and the schedules count a step for both. `step_all` asks
once for all of them, and `step_scheduler` steps a schedule only if its optimizer moved.
"""

import torch

from lossscale.torch import GradScaler

STEPS, BAD = 10, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def start():
    """Return a model, and Muon and AdamW with a schedule for each."""
    torch.manual_seed(0)  # the same start in every run
    layers = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    optimizers = muon, torch.optim.AdamW(others, lr=0.001, fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR
    schedules = [decay(optimizer, 0.9) for optimizer in optimizers]
    return model, optimizers, schedules


def weights(optimizer):
    """Return what the weights of an optimizer are now."""
    return [one.detach().clone() for one in optimizer.param_groups[0]["params"]]


def train(kind):
    """Take ten steps; print who moved, and how far the schedules are."""
    model, optimizers, schedules = start()
    scaler = kind(DEVICE, init_scale=2.0**10)
    rows = torch.randn(64, 16, device=DEVICE)
    moved = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            found = model(rows)
        loss = torch.nn.functional.mse_loss(found.float(), rows[:, :4])
        broken = torch.inf * model[2].bias.sum()
        scaler.scale(loss + broken if step == BAD else loss).backward()
        before = [weights(optimizer) for optimizer in optimizers]
        if kind is GradScaler:
            scaler.step_all(*optimizers)
            scaler.update()
            for schedule in schedules:
                # Muon has made the host wait already, so the rate need not be late.
                scaler.step_scheduler(schedule, wait=True)
        else:
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                scaler.step(optimizer)
                schedule.step()
            scaler.update()
        pairs = zip(before, map(weights, optimizers), strict=True)
        moved.append([not all(map(torch.equal, old, new)) for old, new in pairs])
    name = "step_all" if kind is GradScaler else "torch's"
    muon, adamw = ("moved" if one else "stayed" for one in moved[BAD])
    print(f"{name:8} at the infinite gradient Muon {muon}, AdamW {adamw}")
    muon, adamw = map(sum, zip(*moved, strict=True))
    first, second = (schedule.last_epoch for schedule in schedules)
    print(f"{name:8} Muon took {muon} steps, its schedule {first}; ", end="")
    print(f"AdamW {adamw}, its schedule {second}")


if __name__ == "__main__":
    train(torch.amp.GradScaler)
    train(GradScaler)
