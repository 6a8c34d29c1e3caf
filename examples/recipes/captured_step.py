# SPDX-License-Identifier: Apache-2.0
"""A whole training step in a CUDA graph: forward, backward, clipping, step and update.

    pip install 'lossscale[torch,triton]'
    python examples/recipes/captured_step.py

float16 weights with float32 masters, a learning rate that changes at every step, and
one infinite loss, which the graph skips by itself. Without a GPU the same steps are
taken without a graph.
"""

import torch

from lossscale.torch import GradScaler, optim, to_float16

STEPS, WARM_UP, BAD = 10, 3, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def capture(step):
    """Return a step's replay, after a few steps that make what a graph must find."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing is computed yet
        step()
    return graph.replay


def train(*, in_graph):
    """Train; print what became of the infinite loss; return the float32 weights."""
    torch.manual_seed(0)  # the same start in every run
    layers = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    to_float16(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, master_weights=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = GradScaler(DEVICE, init_scale=2.0**10)
    # A replay reads what is in these tensors at the time.
    rows, factor = torch.ones(64, 16, device=DEVICE), torch.ones((), device=DEVICE)

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(rows).float(), rows[:, :4])
        scaler.scale(loss * factor).backward()
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()

    take_step = capture(step) if in_graph else step
    for _ in range(0 if in_graph else WARM_UP):
        step()
    for number in range(STEPS):
        rows.copy_(torch.randn(64, 16, generator=torch.Generator().manual_seed(number)))
        factor.fill_(torch.inf if number == BAD else 1.0)
        before = [one.clone() for one in optimizer.master_parameters()]
        optimizer.copy_settings()  # the new rate: a replay runs no Python
        take_step()
        schedule.step()
        if all(map(torch.equal, before, optimizer.master_parameters())):
            print(f"step {number} of {STEPS} was skipped, scale {scaler.get_scale():g}")
    print(f"skipped {scaler.skipped_steps}, rate {schedule.get_last_lr()[0]:.5f}")
    return [one.detach().clone() for one in optimizer.master_parameters()]


if __name__ == "__main__":
    plain = train(in_graph=False)
    if DEVICE == "cuda":
        print("the same in a CUDA graph:")
        pairs = zip(plain, train(in_graph=True), strict=True)
        apart = max((one - other).abs().max().item() for one, other in pairs)
        print(f"largest difference of a weight: {apart:.1e}")
    else:
        print("there is no GPU: no step was captured in a graph")
