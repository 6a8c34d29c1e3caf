# SPDX-License-Identifier: Apache-2.0
"""A run that torch's scaler began, goes on with ours, and goes back if need be.

    pip install 'lossscale[torch]'
    python examples/recipes/resume_from_torch.py

Three legs of 30 steps, with a checkpoint after each: the first with torch's scaler, the
second with ours, the third with torch's again. The scale doubles after 20 finite steps
and the legs end in between, so the count of finite steps has to come along with the
scale. In the end every weight is what it is without any change of class.
"""

import io

import torch

from lossscale.torch import GradScaler

LEG = 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def start(kind):
    """Return what a run is made of; a checkpoint brings the rest."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # 2**24 is too high for float16: the first steps are skipped.
    return model, optimizer, kind(DEVICE, init_scale=2.0**24, growth_interval=20)


def leg(kind, number, checkpoint=None):
    """Go on from a checkpoint for 30 steps; return the next one and the parts."""
    parts = model, optimizer, scaler = start(kind)
    if checkpoint is not None:
        saved = torch.load(io.BytesIO(checkpoint))
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
    random = torch.Generator().manual_seed(number)
    for _ in range(LEG):
        rows = torch.randn(64, 8, generator=random).to(DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            found = model(rows).float()
        loss = torch.nn.functional.mse_loss(found, rows.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue(), parts


def run(kinds):
    """Run the legs, each with its scaler; return the weights and what was saved."""
    checkpoint, seen = None, []
    for number, kind in enumerate(kinds):
        checkpoint, (model, _, scaler) = leg(kind, number, checkpoint)
        saved = scaler.state_dict()
        seen.append((saved["scale"], saved["_growth_tracker"], scaler))
    return [one.detach().clone() for one in model.parameters()], seen


if __name__ == "__main__":
    theirs = torch.amp.GradScaler
    expected, without = run([theirs, theirs, theirs])
    found, seen = run([theirs, GradScaler, theirs])
    for (scale, tracker, scaler), (right, count, _) in zip(seen, without, strict=True):
        name = "ours" if isinstance(scaler, GradScaler) else "torch's"
        same = (scale, tracker) == (right, count)
        print(f"{name:8} scale {scale:g}, {tracker} finite steps, as without: {same}")
    total, skipped = seen[1][2].total_steps, seen[1][2].skipped_steps
    print(f"ours counted {total} steps of its own, {skipped} skipped")
    same = all(map(torch.equal, expected, found))
    print(f"weights the same to the bit: {same}")
