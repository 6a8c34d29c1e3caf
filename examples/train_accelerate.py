# SPDX-License-Identifier: Apache-2.0
"""Train in float16 with Accelerate: without a loss scale nothing is learned.

    pip install 'lossscale[numpy,torch]' accelerate
    python examples/train_accelerate.py

The experiment of `examples/train_torch.py`. The scaler is given to the accelerator, and
the loop is Accelerate's own.
"""

import tempfile
from itertools import pairwise

import torch
from accelerate import Accelerator

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS = 300
BATCH_SIZE = 64
LAYER_SIZES = [64] * 8 + [10]
OVERFLOW_AT = 200


def make_run(half, scaled):
    """Return accelerator, model, optimizer and scheduler at the first step."""
    accelerator = Accelerator(mixed_precision="fp16")
    accelerator.native_amp = half  # autocast; on a GPU it is on by default
    device = accelerator.device.type
    accelerator.scaler = GradScaler(device, growth_interval=20, enabled=scaled)

    torch.manual_seed(0)  # the same start in every run
    layers = []
    for inputs, outputs in pairwise(LAYER_SIZES):
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        torch.nn.init.normal_(linear.weight, std=0.02)
        layers += [linear, torch.nn.GELU("tanh")]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(name, half, scaled):
    """Train once; print test accuracy, skipped steps, scale and learning rate."""
    accelerator, model, optimizer, scheduler = make_run(half, scaled)
    digits = load_digits()
    digits = digits._make(torch.as_tensor(x).to(accelerator.device) for x in digits)
    generator = torch.Generator().manual_seed(0)  # the same batches in every run
    for step in range(STEPS):
        rows = torch.randint(
            len(digits.train_labels), (BATCH_SIZE,), generator=generator
        )
        logits = model(digits.train_images[rows])
        loss = torch.nn.functional.cross_entropy(logits, digits.train_labels[rows])
        overflows = scaled and step == OVERFLOW_AT

        optimizer.zero_grad()
        accelerator.backward(torch.inf * loss if overflows else loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # unscales first
        optimizer.step()  # skipped if a gradient is not finite
        scheduler.step()  # only if the step was applied

        if overflows and optimizer.step_was_skipped:
            report = accelerator.scaler.last_step
            layers = len(report.nonfinite_names)
            print(f"step {step} skipped: {report.reason}, {layers} layers")
        if step == STEPS // 2:  # save, and load into new objects
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
                accelerator, model, optimizer, scheduler = make_run(half, scaled)
                accelerator.load_state(folder)

    with torch.no_grad():
        guesses = model(digits.test_images).argmax(1)
    accuracy = (guesses == digits.test_labels).float().mean()
    scaler, rate = accelerator.scaler, scheduler.get_last_lr()[0]
    print(
        f"{name:22} accuracy {accuracy:.1%} skipped {scaler.skipped_steps} "
        f"scale {scaler.get_scale():,.0f} rate {rate:.5f}"
    )


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
