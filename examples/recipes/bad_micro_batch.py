# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: one bad micro-batch need not cost the whole step.

    pip install 'lossscale[torch]'
    python examples/recipes/bad_micro_batch.py

A step is made of eight micro-batches. Every fifth step one of them has a broken row,
beyond what float16 can hold, and its gradients are not finite. In `.grad` that one
spoils the sum of all eight: torch's scaler loses the step. `accumulate` checks each
micro-batch, leaves the bad one out, and the step is made of the other seven.

The same is computed once more, in float32 and with the bad micro-batches left out by
hand: that is where the weights should be.
"""

import torch

from lossscale.torch import GradScaler

STEPS, MICRO_BATCHES, ROWS, WIDTH = 40, 8, 16, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def is_broken(step, micro_batch):
    """Say where the data is bad: in one micro-batch of every fifth step."""
    return step % 5 == 2 and micro_batch == 3


def batches():
    """Yield the micro-batches of each step; the same ones in every run."""
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(WIDTH, 1, generator=random)
    for step in range(STEPS):
        rows = torch.randn(MICRO_BATCHES, ROWS, WIDTH, generator=random)
        targets = rows @ truth
        for micro_batch in range(MICRO_BATCHES):
            if is_broken(step, micro_batch):
                rows[micro_batch, 0] = 1e6  # float16 ends at 65,504
        yield step, zip(rows.to(DEVICE), targets.to(DEVICE), strict=True)


def train(scaler, *, half=True, drops_by_hand=False):
    """Train once; return the weights and how many steps moved them."""
    weight = torch.nn.Parameter(torch.zeros(1, WIDTH, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.05)
    taken = 0
    for step, micro_batches in batches():
        optimizer.zero_grad()
        before, good = weight.detach().clone(), MICRO_BATCHES
        if drops_by_hand:
            good -= sum(is_broken(step, at) for at in range(MICRO_BATCHES))
        for at, (rows, targets) in enumerate(micro_batches):
            if drops_by_hand and is_broken(step, at):
                continue
            with torch.autocast(DEVICE, torch.float16, enabled=half):
                found = torch.nn.functional.linear(rows, weight).float()
            loss = torch.nn.functional.mse_loss(found, targets) / good
            scaler.scale(loss).backward()
            if isinstance(scaler, GradScaler):
                scaler.accumulate(optimizer)  # the line to add, after every backward
        scaler.step(optimizer)
        scaler.update()
        taken += not torch.equal(before, weight)
    return weight.detach(), taken


if __name__ == "__main__":
    goal, _ = train(GradScaler(DEVICE, enabled=False), half=False, drops_by_hand=True)
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler = kind(DEVICE, init_scale=2.0**12)
        weight, taken = train(scaler)
        away = (weight - goal).norm() / goal.norm()
        name = "ours" if kind is GradScaler else "torch's"
        print(f"{name:8} took {taken} of {STEPS} steps, scale {scaler.get_scale():g}")
        print(f"{name:8} weights are {away:.3%} away from those without the bad rows")
