# SPDX-License-Identifier: Apache-2.0
"""Train float16 weights with float32 masters in PyTorch, without autocast.

    pip install 'lossscale[numpy,torch]'
    python examples/train_torch_masters.py

The same network and the same 1,437 handwritten digits twice: in float32, and with
float16 weights and gradients and float32 masters. At step 200 the second run gets an
infinite loss, which is skipped. Half-way each run is saved and loaded into new objects.
"""

import io

import torch

from lossscale.demo import load_digits
from lossscale.torch import GradScaler, optim, to_float16

STEPS = 300
BATCH_SIZE = 64
OVERFLOW_AT = 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())


def make_run(half):
    """Return a model, its optimizer and its scaler, always from the same weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.LayerNorm(256),
        torch.nn.GELU("tanh"),
        torch.nn.Linear(256, 10),
    ).to(DEVICE)
    if half:
        to_float16(model)  # except for the normalisation layer
    optimizer = optim.AdamW(model.parameters(), lr=2e-3, master_weights=True)
    scaler = GradScaler(DEVICE, init_scale=2.0**10, growth_interval=50, enabled=half)
    return model, optimizer, scaler


def save_and_load(run, half):
    """Return new objects with the state of a run, as after a restart."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in run], file)
    file.seek(0)
    new = make_run(half)
    for part, state in zip(new, torch.load(file), strict=True):
        part.load_state_dict(state)
    return new


def train(name, half):
    """Train once; print test accuracy, skipped steps and the last scale."""
    run = model, optimizer, scaler = make_run(half)
    generator = torch.Generator().manual_seed(0)  # the same batches in every run
    for step in range(STEPS):
        count = len(DIGITS.train_labels)
        rows = torch.randint(count, (BATCH_SIZE,), generator=generator)
        logits = model(DIGITS.train_images[rows])
        loss = torch.nn.functional.cross_entropy(logits, DIGITS.train_labels[rows])
        overflows = half and step == OVERFLOW_AT
        optimizer.zero_grad()
        scaler.scale(torch.inf * loss if overflows else loss).backward()
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            print(f"step {step} skipped: {scaler.last_step.reason}")
        if step == STEPS // 2:
            run = model, optimizer, scaler = save_and_load(run, half)
    is_right = model(DIGITS.test_images).argmax(1) == DIGITS.test_labels
    accuracy = is_right.float().mean()
    skipped, scale = scaler.skipped_steps, scaler.get_scale()
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    train("float32", half=False)
    train("float16, masters", half=True)
