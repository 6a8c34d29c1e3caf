# SPDX-License-Identifier: Apache-2.0
"""float16 with Accelerate: without a loss scale nothing moves, with one it learns.

    pip install 'lossscale[numpy,torch]' accelerate
    python examples/train_accelerate.py

The story of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
by Muon on 1,437 handwritten digits. Their gradients are below float16's smallest
number. A dynamic loss scale lifts them above it. Half-way each run is saved and taken
up by new objects, and the run with a scale has to get over one infinite loss.
"""

import tempfile
from itertools import pairwise

import torch
from accelerate import Accelerator

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS, BATCH, SIZES = 300, 64, [64] * 8 + [10]


def start(half, scaled):
    """Return what a run is made of, at its first step."""
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.native_amp = half  # autocast; on a GPU it is on if nobody says no
    device = accelerator.device.type
    accelerator.scaler = GradScaler(device, growth_interval=20, enabled=scaled)
    torch.manual_seed(0)  # the same start in every run
    layers = []
    for width, height in pairwise(SIZES):
        layers += [torch.nn.GELU("tanh"), torch.nn.Linear(width, height, bias=False)]
        torch.nn.init.normal_(layers[-1].weight, std=0.02)
    model = torch.nn.Sequential(*layers[1:])
    muon = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(muon, 1.0, 0.0, total_iters=STEPS)
    return accelerator, *accelerator.prepare(model, muon, schedule)


def train(name, half, scaled):
    """Train once; print test accuracy, skipped steps and the last scale."""
    accelerator, model, muon, schedule = start(half, scaled)
    digits = load_digits()
    digits = digits._make(torch.as_tensor(x).to(accelerator.device) for x in digits)
    random = torch.Generator().manual_seed(0)  # the same batches in every run
    for step in range(STEPS):
        chosen = torch.randint(len(digits.train_labels), (BATCH,), generator=random)
        logits = model(digits.train_images[chosen])
        loss = torch.nn.functional.cross_entropy(logits, digits.train_labels[chosen])
        muon.zero_grad()
        accelerator.backward(torch.inf * loss if scaled and step == 200 else loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # unscales first
        muon.step()  # skipped if a gradient was not finite
        schedule.step()  # for the steps that were taken
        if muon.step_was_skipped and step == 200:
            seen = accelerator.scaler.last_step
            print(f"step {step} skipped: {seen.reason}, {len(seen.culprits)} layers")
        if step == STEPS // 2:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
                accelerator, model, muon, schedule = start(half, scaled)
                accelerator.load_state(folder)

    with torch.no_grad():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float()
    skipped, scale = accelerator.scaler.skipped, accelerator.scaler.get_scale()
    print(f"{name:22} accuracy {accuracy.mean():.1%} skipped {skipped} ", end="")
    print(f"scale {scale:,.0f} rate {schedule.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
