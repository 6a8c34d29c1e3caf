# SPDX-License-Identifier: Apache-2.0
"""Record golden traces by running the original third-party loss scalers.

Seeded random settings and overflow patterns; one JSON object a line for each.

Install (one virtual environment a library; Python 3.11, no GPU needed):
    deepspeed, deepspeed_consecutive:
        pip install torch==2.13.0 numpy setuptools wheel ninja py-cpuinfo
        DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed torch==2.13.0
    megatron:
        pip install torch==2.13.0 numpy packaging && pip install --no-deps megatron-core
    paddle: pip install paddlepaddle setuptools "numpy<2.4"
    mindspore, mindspore_manager: pip install mindspore "numpy<2"
    apex: pip install torch==2.13.0, and apex/amp/scaler.py of github.com/NVIDIA/apex at
        commit 03b0eeb on the path, in packages apex and apex.amp that are else empty
Run: python record_originals.py NAME OUTDIR  (writes OUTDIR/NAME.jsonl.gz)

To run without a GPU: Megatron-Core's tensors for 'cuda' are made on the CPU; Paddle's
constructor is made to see a GPU (it switches itself off otherwise), and the
found-inf flag that its step() leaves is set by hand. The arithmetic is all theirs.
Strict JSON has no infinity: a sequence ends before the first scale that is not finite.
"""

import gzip
import io
import json
import math
import os
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any, NamedTuple
from unittest import mock

SEED = 20240917
CHOICES: dict[str, tuple[float, ...]] = {
    "init": (1.0, 2.0, 8.0, 1024.0, 32768.0, 65536.0, 2.0**24, 3.0, 100.0),
    "interval": (1, 2, 3, 4, 5, 7, 10, 20),
    "patience": (1, 2, 3, 4),
    "floor": (0.25, 1.0, 8.0),
    "growth": (2.0, 4.0, 3.0, 1.5),
    "backoff": (0.5, 0.25, 0.8, 0.75),
    "whole": (2, 4, 3),
    "factor": (2, 4, 3, 1.5),
}
PACKAGES = {"megatron": "megatron-core", "paddle": "paddlepaddle"}
VERSIONS = {"apex": "commit 03b0eeb"}
RATES = (0.0, 0.05, 0.2, 0.5, 0.9, 1.0)
Config = dict[str, Any]


def deepspeed_group() -> AbstractContextManager[Any]:
    """Start a group of one, once: the scaler asks for its rank."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
    deepspeed = import_module("deepspeed")
    if not deepspeed.comm.is_initialized():
        with mock.patch.dict(os.environ, alone):
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        deepspeed.utils.logger.setLevel("ERROR")
    return nullcontext()


def torch_on_cpu() -> AbstractContextManager[Any]:
    """While it is open, torch.tensor ignores the device it is asked for."""
    make = import_module("torch").tensor
    return mock.patch("torch.tensor", lambda *a, device, **k: make(*a, **k))  # noqa: ARG005, PLW0108


def paddle_on_gpu() -> AbstractContextManager[Any]:
    """While it is open, Paddle's scaler believes that it is on a GPU."""
    tracer = Bag(_expected_place=Bag(is_gpu_place=lambda: True))
    target = "paddle.amp.grad_scaler._dygraph_tracer"
    return mock.patch(target, return_value=tracer)


def paddle_step(scaler: Any, finite: bool) -> None:
    """Set the flag that step() would leave, and update; keep its prints away."""
    scaler._cache_found_inf = not finite
    with redirect_stdout(io.StringIO()):
        scaler.update()


def apex_step(scaler: Any, finite: bool) -> None:
    """Hand it one parameter with one gradient, as its optimizers do."""
    tensor = import_module("torch").tensor([1.0 if finite else math.inf])
    scaler.unscale_and_update([{"params": [Bag(grad=tensor)]}], 1.0)


class System(NamedTuple):
    """An original: where it is, how it is built, stepped and read."""

    path: str
    takes: str  # names in CHOICES = the constructor's
    step: Callable[[Any, bool], Any]  # given whether the gradients were finite
    reads: str  # the scale, then counters
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    usual: tuple[float, ...] = ()  # the library's own values, where takes needs any
    attributes: bool = False  # settings are attributes, not constructor arguments


DEEPSPEED = System(
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "init=init_scale interval=scale_window floor=min_scale patience=delayed_shift",
    lambda scaler, finite: scaler.update_scale(not finite),
    "cur_scale cur_hysteresis last_overflow_iter",
    deepspeed_group,
    (65536, 1000, 1, 2),
)
MEGATRON = System(
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler",
    "init=initial_scale floor=min_scale growth=growth_factor backoff=backoff_factor "
    "interval=growth_interval patience=hysteresis",
    lambda scaler, finite: scaler.update(not finite),
    "_scale _growth_tracker _hysteresis_tracker",
    torch_on_cpu,
    (2**32, 1.0, 2.0, 0.5, 1000, 2),
)
PADDLE = System(
    "paddle.amp.GradScaler",
    "init=init_loss_scaling growth=incr_ratio backoff=decr_ratio "
    "interval=incr_every_n_steps patience=decr_every_n_nan_or_inf",
    paddle_step,
    "_scale _incr_count _decr_count",
    paddle_on_gpu,
)
MINDSPORE = System(
    "mindspore.amp.DynamicLossScaler",
    "init=scale_value whole=scale_factor interval=scale_window",
    lambda scaler, finite: scaler.adjust(sys.modules["mindspore"].Tensor(finite)),
    "scale_value counter",
    usual=(2**24, 2, 2000),
)
MANAGER = System(
    "mindspore.DynamicLossScaleManager",
    "init=init_loss_scale factor=scale_factor interval=scale_window",
    lambda manager, finite: manager.update_loss_scale(not finite),
    "loss_scale last_overflow_iter bad_step",
)
APEX = System(
    "apex.amp.scaler.LossScaler",
    "init=_loss_scale interval=_scale_seq_len",
    apex_step,
    "_loss_scale _unskipped",
    attributes=True,
)
SYSTEMS = {"deepspeed": DEEPSPEED, "deepspeed_consecutive": DEEPSPEED}
SYSTEMS |= {"megatron": MEGATRON, "paddle": PADDLE}
SYSTEMS |= {"mindspore": MINDSPORE, "mindspore_manager": MANAGER, "apex": APEX}


def random_pattern(rng: random.Random, steps: int) -> list[bool]:
    """Whether each step is finite: a constant overflow rate, or bursts of both."""
    if rng.random() < 0.7:
        rate = rng.choice(RATES)
        return [rng.random() >= rate for _ in range(steps)]
    pattern: list[bool] = []
    while len(pattern) < steps:
        pattern += [True] * rng.randint(1, 25) + [False] * rng.randint(1, 8)
    return pattern[:steps]


def record(system: System, config: Config, pattern: list[bool]) -> str:
    """Run one sequence on the original; return its line."""
    module, _, name = system.path.rpartition(".")
    root = module.partition(".")[0]
    with system.context():
        made = getattr(import_module(module), name)
        scaler = made() if system.attributes else made(**config)
    if system.attributes:
        vars(scaler).update(config)
    scales: list[float] = []
    scale_name, *names = system.reads.split()
    counters: dict[str, list[int]] = {key: [] for key in names}
    for finite in pattern:
        system.step(scaler, finite)
        scale = float(getattr(scaler, scale_name))
        if not math.isfinite(scale):
            break
        scales.append(scale)
        for key, values in counters.items():
            values.append(int(getattr(scaler, key)))
    row = {
        "system": system.path,
        "version": VERSIONS.get(root) or metadata.version(PACKAGES.get(root, root)),
        "config": config,
        "finite": "".join("01"[finite] for finite in pattern[: len(scales)]),
        "scale": scales,
        "counters": counters,
    }
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def main(name: str, outdir: str) -> None:
    """Write OUTDIR/NAME.jsonl.gz: 1000 random sequences, then 20 usual long ones."""
    system = SYSTEMS[name]
    fixed: Config = {"consecutive_hysteresis": name != "deepspeed"}
    fixed = fixed | {"raise_error_at_min_scale": False} if system is DEEPSPEED else {}
    takes = [pair.split("=") for pair in system.takes.split()]
    usual = {pair[1]: value for pair, value in zip(takes, system.usual, strict=False)}
    rng, lines = random.Random(f"{SEED} {name}"), []
    for _ in range(1000):
        drawn = {ours: rng.choice(values) for ours, values in CHOICES.items()}
        drawn["floor"] = min(drawn["floor"], drawn["init"])
        config = {theirs: drawn[ours] for ours, theirs in takes} | fixed
        lines.append(record(system, config, random_pattern(rng, rng.randint(20, 120))))
    for _ in range(20):
        # A few early overflows, so that a growth is still crossed.
        early = {rng.randrange(90) for _ in range(rng.randrange(6))}
        pattern = [number not in early for number in range(2100)]
        lines.append(record(system, usual | fixed, pattern))
    with gzip.GzipFile(Path(outdir) / f"{name}.jsonl.gz", "wb", mtime=0) as out:
        out.write("".join(lines).encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
