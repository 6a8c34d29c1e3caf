# SPDX-License-Identifier: Apache-2.0
"""Train in float16 with PyTorch: without a loss scale nothing is learned.

    pip install 'lossscale[numpy,torch]'
    python examples/train_torch.py

The experiment of `lossscale demo`: eight layers without biases, weights N(0, 0.02²),
trained by Muon on 1,437 handwritten digits. The gradients are below float16's smallest
number; a dynamic loss scale lifts them above it. Half-way each run is saved and loaded
into new objects. At step 200 the scaled run gets an infinite loss, which is skipped.
"""

import io
from itertools import pairwise
from typing import NamedTuple

import torch

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS = 300
BATCH_SIZE = 64
LAYER_SIZES = [64] * 8 + [10]
OVERFLOW_AT = 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())


class Run(NamedTuple):
    """Everything that is saved in a checkpoint."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: GradScaler


def make_run(scaled):
    """Return a run at its first step; every run starts from the same weights."""
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in pairwise(LAYER_SIZES):
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        torch.nn.init.normal_(linear.weight, std=0.02)
        layers += [linear, torch.nn.GELU("tanh")]
    model = torch.nn.Sequential(*layers[:-1]).to(DEVICE)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    scaler = GradScaler(DEVICE, growth_interval=20, enabled=scaled)
    return Run(model, optimizer, scheduler, scaler)


def save_and_load(run, scaled):
    """Return new objects with the state of a run, as after a restart."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in run], file)
    file.seek(0)
    new = make_run(scaled)
    for part, state in zip(new, torch.load(file), strict=True):
        part.load_state_dict(state)
    return new


def compute_loss(model, images, labels, half):
    """Return the loss of a batch; with `half` the model computes in float16."""
    with torch.autocast(DEVICE, torch.float16, enabled=half):
        logits = model(images)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def train_step(run, loss):
    """Take one step; it is skipped if a gradient is not finite."""
    run.optimizer.zero_grad()
    run.scaler.scale(loss).backward()
    run.scaler.clip_grad_norm_(run.optimizer, max_norm=1.0)  # unscales, checks, clips
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.scaler.step_scheduler(run.scheduler)  # only if the step was applied


def train(name, half, scaled):
    """Train once; print test accuracy, skipped steps and the last scale."""
    run = make_run(scaled)
    generator = torch.Generator().manual_seed(0)  # the same batches in every run
    for step in range(STEPS):
        rows = torch.randint(
            len(DIGITS.train_labels), (BATCH_SIZE,), generator=generator
        )
        loss = compute_loss(
            run.model, DIGITS.train_images[rows], DIGITS.train_labels[rows], half
        )
        overflows = scaled and step == OVERFLOW_AT
        train_step(run, torch.inf * loss if overflows else loss)
        if overflows:
            report = run.scaler.last_step
            layers = len(report.nonfinite_names)
            print(f"step {step} skipped: {report.reason}, {layers} layers")
        if step == STEPS // 2:
            run = save_and_load(run, scaled)

    with torch.no_grad(), torch.autocast(DEVICE, torch.float16, enabled=half):
        guesses = run.model(DIGITS.test_images).argmax(1)
    accuracy = (guesses == DIGITS.test_labels).float().mean()
    skipped, scale = run.scaler.skipped_steps, run.scaler.get_scale()
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
