# SPDX-License-Identifier: Apache-2.0
"""float16 on several ranks: FSDP2, a fused AdamW, clipping, a bad gradient on one rank.

    pip install 'lossscale[numpy,torch]'
    torchrun --standalone --nproc-per-node 2 examples/train_torch_fsdp.py

Eight layers on the digits of `lossscale demo`; every rank keeps a part of each weight.
At step 200 one rank alone finds an infinite gradient, and all of them skip. Half-way
new objects take the run up, from what each rank has kept of its state.
"""

import copy
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS, BATCH, SIZES = 300, 64, [64] * 8 + [10]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())


def start(mesh):
    """Return what a run is made of, at its first step."""
    torch.manual_seed(0)  # the same start on every rank
    layers = []
    for width, height in pairwise(SIZES):
        layers += [torch.nn.GELU("tanh"), torch.nn.Linear(width, height, bias=False)]
        torch.nn.init.normal_(layers[-1].weight, std=0.02)
    model = torch.nn.Sequential(*layers[1:]).to(DEVICE)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    # Nothing is declared: the weights know which ranks have the rest of them.
    return model, adam, GradScaler(DEVICE, growth_interval=20, module=model)


def main():
    """Train, and print what came out."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, adam, scaler = start(mesh := init_device_mesh(DEVICE, (ranks,)))
    random = torch.Generator().manual_seed(rank)  # every rank has its own batches
    for step in range(STEPS):
        chosen = torch.randint(len(DIGITS.train_labels), (BATCH,), generator=random)
        logits, labels = model(DIGITS.train_images[chosen]), DIGITS.train_labels[chosen]
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        adam.zero_grad()
        scaler.scale(loss).backward()
        if step == 200 and rank == ranks - 1:
            model[0].weight.grad.to_local().fill_(torch.inf)
        scaler.clip_grad_norm_(adam, max_norm=1.0)  # by the norm of the whole model
        scaler.step(adam)  # on all ranks or on none
        scaler.update()
        if step == 200:
            print(f"rank {rank}: {scaler.last_step.reason} {scaler.last_step.culprits}")
        if step == STEPS // 2:
            saved = copy.deepcopy([x.state_dict() for x in (model, adam, scaler)])
            model, adam, scaler = parts = start(mesh)
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
    with torch.no_grad():
        right = model(DIGITS.test_images).argmax(1) == DIGITS.test_labels
    accuracy, scale = right.float().mean(), scaler.get_scale()
    print(f"rank {rank}: accuracy {accuracy:.1%} skipped {scaler.skipped} {scale=}")
    dist.destroy_process_group()


main()
