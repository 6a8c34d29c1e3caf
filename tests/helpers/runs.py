"""Recorded runs whose every number is known, for the tests of what reads them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lossscale import Dynamic
from lossscale.diagnostics import Recorder, measure_tensors

NAMES = [f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "mlp")]


@dataclass
class Known:
    """What was recorded."""

    path: Any
    steps: np.ndarray
    scale: np.ndarray
    loss: np.ndarray
    norm: np.ndarray
    amax: np.ndarray
    clip: np.ndarray
    applied: np.ndarray
    causes: list
    gradients: dict
    """The stored gradients of the steps that have statistics, by step."""


def record_run(path, steps=600, *, seed=0, names=NAMES, every=50, **settings):
    """Record a run with overflows, a spike of one step, clipping and statistics."""
    rng = np.random.default_rng(seed)
    known = Known(
        path=path,
        steps=np.arange(1, steps + 1),
        scale=np.zeros(steps),
        loss=np.round(2.0 * np.exp(-np.arange(steps) / steps) + rng.random(steps), 4),
        norm=np.round(rng.random(steps) + 0.5, 4),
        amax=np.round(rng.random(steps) / 100 + 1e-3, 6),
        clip=np.where(rng.random(steps) < 0.3, 0.5, 1.0),
        applied=rng.random(steps) > 0.02,
        causes=[],
        gradients={},
    )
    known.loss[steps // 3] = 9.25
    scale = 65536.0
    options = {
        "names": names,
        "policy": Dynamic(),
        "statistics_every": every,
        "writers": (),
    }
    with Recorder(path, **(options | settings)) as recorder:
        for i in range(steps):
            known.scale[i] = scale
            cause = None if known.applied[i] else ("inf", "nan", "loss")[i % 3]
            known.causes.append(cause)
            recorder.record(
                scale=scale,
                applied=bool(known.applied[i]),
                cause=cause,
                norm=float(known.norm[i]),
                clip=float(known.clip[i]),
                amax=float(known.amax[i]),
                loss=float(known.loss[i]),
                lr=1e-3,
                nonfinite={} if cause is None else {names[i % len(names)]: "inf"},
            )
            if recorder.wants_statistics(i + 1):
                gradients = {
                    name: (
                        rng.standard_normal(200) * 2.0 ** rng.integers(-24, 8)
                    ).astype(np.float16)
                    for name in names
                }
                known.gradients[i + 1] = gradients
                recorder.record_statistics(measure_tensors(gradients), scale=scale)
            scale *= 0.5 if cause else 2.0 if (i + 1) % 100 == 0 else 1.0
    return known
