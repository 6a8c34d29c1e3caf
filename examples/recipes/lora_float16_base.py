# SPDX-License-Identifier: Apache-2.0
"""LoRA on a frozen float16 model: keep the adapter in float32.

    pip install 'lossscale[torch]' peft
    python examples/recipes/lora_float16_base.py

A small network is trained in float32, stored in float16 and frozen; peft puts a LoRA
adapter on it, which learns a task that is a little different. There are two ways:

1. peft makes the adapter float32, which is its default. Its gradients
   are float32, and the scaler divides them without a loss.
2. The adapter is float16 like the base. torch's scaler refuses its gradients, ours
   takes them with `allow_fp16=True`. They are float16 again after the division, where
   small ones are rounded, or gone.
"""

import peft
import torch

from lossscale.torch import GradScaler

STEPS, WIDTH = 100, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
LOSS = torch.nn.functional.mse_loss


def pretrained():
    """Return a network that has learnt the first task, in float16."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        LOSS(model(ROWS), 0.1 * ROWS[:, :8].sum(1, keepdim=True)).backward()
        optimizer.step()
    return model.half()


def tune(scaler, *, wide):
    """Train an adapter on the second task, and print how that went."""
    base = pretrained()
    lora = peft.LoraConfig(r=4, target_modules=["0", "2"])
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=wide)
    adapter = [one for one in model.parameters() if one.requires_grad]
    # Adam's own eps of 1e-8 is 0 in float16, where it would divide 0 by 0.
    optimizer = torch.optim.Adam(adapter, lr=0.01, eps=1e-4)
    losses, rounded, entries = [], 0, 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            found = model(ROWS).float()
        loss = LOSS(found, 0.1 * ROWS[:, 4:12].sum(1, keepdim=True))
        losses.append(loss.item())
        scaler.scale(loss).backward()
        for one in adapter:
            exact = one.grad.double() / scaler.get_scale()
            rounded += (exact.to(one.dtype) != exact).sum().item()
            entries += exact.numel()
        if isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    kinds = f"base {base[0].base_layer.weight.dtype}, adapter {adapter[0].dtype}"
    print(f"{kinds}: loss {losses[0]:.5f} -> {losses[-1]:.5f}, ", end="")
    print(f"{rounded / entries:.0%} of the gradients rounded")


if __name__ == "__main__":
    tune(GradScaler(DEVICE, init_scale=2.0**12), wide=True)
    try:
        tune(torch.amp.GradScaler(DEVICE, init_scale=2.0**12), wide=False)
    except ValueError as error:
        print(f"torch's scaler, float16 adapter: {error}")
    tune(GradScaler(DEVICE, init_scale=2.0**12, allow_fp16=True), wide=False)
