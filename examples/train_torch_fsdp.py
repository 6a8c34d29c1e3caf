# SPDX-License-Identifier: Apache-2.0
"""Train in float16 on several ranks: FSDP2, a fused AdamW, clipping.

    pip install 'lossscale[numpy,torch]'
    torchrun --standalone --nproc-per-node 2 examples/train_torch_fsdp.py

Eight layers on the digits of `lossscale demo`; every rank keeps a shard of each weight.
At step 200 one rank alone gets an infinite gradient, and all ranks skip the step.
Half-way the run is continued by new objects, from the state that each rank has saved.
"""

import copy
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS = 300
BATCH_SIZE = 64
LAYER_SIZES = [64] * 8 + [10]
OVERFLOW_AT = 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())


def make_run(mesh):
    """Return a model, an optimizer and a scaler at the first step."""
    torch.manual_seed(0)  # the same start on every rank
    layers = []
    for inputs, outputs in pairwise(LAYER_SIZES):
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        torch.nn.init.normal_(linear.weight, std=0.02)
        layers += [linear, torch.nn.GELU("tanh")]
    model = torch.nn.Sequential(*layers[:-1]).to(DEVICE)

    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for linear in model[::2]:
        fully_shard(linear, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)

    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0, fused=True)
    # No process groups are passed: DTensors name the ranks that hold the other shards.
    scaler = GradScaler(DEVICE, growth_interval=20, module=model)
    return model, optimizer, scaler


def save_and_load(run, mesh):
    """Return new objects with the state of a run, as after a restart."""
    saved = copy.deepcopy([part.state_dict() for part in run])
    new = make_run(mesh)
    for part, state in zip(new, saved, strict=True):
        part.load_state_dict(state)
    return new


def compute_accuracy(model):
    """Return the accuracy on the test set."""
    with torch.no_grad():
        guesses = model(DIGITS.test_images).argmax(1)
    return (guesses == DIGITS.test_labels).float().mean()


def main():
    """Train, and print the result of this rank."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (ranks,))
    model, optimizer, scaler = make_run(mesh)
    generator = torch.Generator().manual_seed(rank)  # every rank has its own batches
    for step in range(STEPS):
        rows = torch.randint(
            len(DIGITS.train_labels), (BATCH_SIZE,), generator=generator
        )
        logits = model(DIGITS.train_images[rows])
        loss = torch.nn.functional.cross_entropy(
            logits.float(), DIGITS.train_labels[rows]
        )
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == OVERFLOW_AT and rank == ranks - 1:
            model[0].weight.grad.to_local().fill_(torch.inf)
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)  # by the norm over all ranks
        scaler.step(optimizer)  # on all ranks or on none
        scaler.update()
        if step == OVERFLOW_AT:
            report = scaler.last_step
            print(f"rank {rank}: {report.reason} {report.nonfinite_names}")
        if step == STEPS // 2:
            model, optimizer, scaler = save_and_load((model, optimizer, scaler), mesh)

    accuracy, skipped = compute_accuracy(model), scaler.skipped_steps
    scale = scaler.get_scale()
    print(f"rank {rank}: accuracy {accuracy:.1%} skipped {skipped} {scale=}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
