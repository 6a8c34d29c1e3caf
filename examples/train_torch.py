# SPDX-License-Identifier: Apache-2.0
"""float16 in PyTorch: without a loss scale nothing moves, with one it learns.

    pip install 'lossscale[numpy,torch]'
    python examples/train_torch.py

The story of `lossscale demo`: eight bias-free layers with weights N(0, 0.02²), trained
by Muon on 1,437 handwritten digits. Their gradients are below float16's smallest
number. A dynamic loss scale lifts them above it. Half-way each run is saved and taken
up by new objects, and the run with a scale has to get over one infinite loss.
"""

import io
from itertools import pairwise

import torch

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS, BATCH, SIZES = 300, 64, [64] * 8 + [10]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())


def start(scaled):
    """Return what a run is made of, at its first step."""
    torch.manual_seed(0)  # the same start in every run
    layers = []
    for width, height in pairwise(SIZES):
        layers += [torch.nn.GELU("tanh"), torch.nn.Linear(width, height, bias=False)]
        torch.nn.init.normal_(layers[-1].weight, std=0.02)
    model = torch.nn.Sequential(*layers[1:]).to(DEVICE)
    muon = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(muon, 1.0, 0.0, total_iters=STEPS)
    return model, muon, schedule, GradScaler(DEVICE, growth_interval=20, enabled=scaled)


def train(name, half, scaled):
    """Train once; print test accuracy, skipped steps and the last scale."""
    model, muon, schedule, scaler = start(scaled)
    random = torch.Generator().manual_seed(0)  # the same batches in every run
    for step in range(STEPS):
        chosen = torch.randint(len(DIGITS.train_labels), (BATCH,), generator=random)
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            logits = model(DIGITS.train_images[chosen]).float()
        loss = torch.nn.functional.cross_entropy(logits, DIGITS.train_labels[chosen])
        muon.zero_grad()
        scaler.scale(torch.inf * loss if scaled and step == 200 else loss).backward()
        scaler.clip_grad_norm_(muon, max_norm=1.0)  # unscales, checks and clips
        scaler.step(muon)  # skipped if a gradient was not finite
        scaler.update()
        scaler.step_scheduler(schedule)  # for the steps that were taken
        if scaled and step == 200:
            seen = scaler.last_step
            print(f"step {step} skipped: {seen.reason}, {len(seen.culprits)} layers")
        if step == STEPS // 2:
            file, parts = io.BytesIO(), (model, muon, schedule, scaler)
            torch.save([part.state_dict() for part in parts], file)
            saved = torch.load(io.BytesIO(file.getvalue()))
            model, muon, schedule, scaler = parts = start(scaled)
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)

    with torch.no_grad(), torch.autocast(DEVICE, torch.float16, enabled=half):
        guesses = model(DIGITS.test_images).argmax(1)
    accuracy = (guesses == DIGITS.test_labels).float().mean()
    skipped, scale = scaler.skipped, scaler.get_scale()
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
