"""How the torch adapter looks to a type checker; checked by mypy, never run.

Not `torch.py`: a checker would take that for the framework itself.
"""

from typing import Any

import torch

import lossscale.torch as ls
import lossscale.torch.classic as torch_classic
from lossscale import (
    Dynamic,
    Explanation,
    Finding,
    Fixed,
    Policy,
    ScaleState,
    Signal,
    presets,
)
from lossscale.core import classic

model: Any = torch.nn.Linear(2, 1)
inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
reports: list[ls.StepReport] = []

scaler: ls.GradScaler = ls.GradScaler()
scaler = ls.GradScaler("cuda", 2.0**10, 2.0, 0.5, 100, True)
scaler = ls.GradScaler("cpu", init_scale="auto")
scaler = ls.GradScaler("cpu", policy=Dynamic(hysteresis=2), on_step=reports.append)
scaler = ls.GradScaler("cpu", policy=presets.get("torch"), module=model)
scaler = ls.GradScaler("cpu", names={"weight": model.weight}, measure_norm=True)
scaler = ls.GradScaler(
    "cpu",
    names=[("weight", model.weight)],
    on_no_gradients="ignore",
    allow_fp16=True,
    max_consecutive_skips=None,
    on_collapse="raise",
)
loss: Any = scaler.scale(model(torch.ones(2)).sum())
gradients: tuple[Any, ...] = scaler.grad(loss, [model.weight], create_graph=True)
scaler.unscale_(inner)
norm: Any = scaler.clip_grad_norm_(inner, 1.0, norm_type=float("inf"))
scaler.accumulate(inner)
result: Any = scaler.step(inner, closure=lambda: loss)
results: list[Any] = scaler.step_all(inner, inner)
scaler.update()
scaler.update(8.0)
scaler.step_scheduler(torch.optim.lr_scheduler.ExponentialLR(inner, 0.9), wait=True)
scaler.flush()
gate: Any = scaler.step_applied()
own: Policy = scaler.policy
now: ScaleState = scaler.state
counted: int = scaler.total_steps + scaler.skipped_steps + scaler.consecutive_skips
saved: dict[str, Any] = scaler.state_dict()
scaler.load_state_dict(saved)

report: ls.StepReport | None = scaler.last_step
if report is not None:
    applied: bool = report.applied
    reason: str | None = report.reason
    measured: float | None = report.norm
    names: tuple[str, ...] = report.nonfinite_names
    by_one: bool | None = report.applied_by(inner)
    report.missing  # type: ignore[attr-defined]

policy: Policy = Dynamic()
state: ScaleState = ls.init(policy)
state = ls.init(policy, ScaleState(8.0, 0, 0), device="cpu")
scaled: Any = ls.scale(torch.ones(()), state)
unscaled, signal = ls.unscale({"w": scaled, "b": None}, state, measure=["norm"])
seen: Signal = signal
state = ls.update(policy, state, signal)
chosen: Any = ls.select(signal.finite, unscaled, unscaled)

manager: torch_classic.LossScaleManager = (
    torch_classic.ExponentialUpdateLossScaleManager(8.0, 2, floor=0.5, at_floor="clamp")
)
fixed_manager: torch_classic.LossScaleManager = torch_classic.FixedLossScaleManager(8.0)
manager.update_loss_scale(True)
fixed: torch_classic.LossScale = torch_classic.FixedLossScale(8)
dynamic: torch_classic.DynamicLossScale = torch_classic.DynamicLossScale(
    8.0, increment_period=100
)
operation, should_apply = dynamic.update([torch.ones(()), None])
numbers: dict[str, float] = dynamic.state_dict()
dynamic.load_state_dict(numbers)
found: classic.LossScale | None = torch_classic.get("dynamic")

optimizer = torch_classic.LossScaleOptimizer(inner, dynamic, skip_nonfinite=True)
for identifier in (manager, fixed, 8, 8.0, "dynamic"):
    torch_classic.LossScaleOptimizer(inner, loss_scale_manager=identifier)
optimizer.zero_grad()
optimizer.backward(loss, retain_graph=True)
optimizer.step()
pairs: list[tuple[Any, Any]] = optimizer.compute_gradients(loss)
optimizer.apply_gradients(pairs)
optimizer.minimize(lambda: loss)
optimizer.load_state_dict(optimizer.state_dict())
groups: list[dict[str, Any]] = optimizer.param_groups

sharded: ls.GradScaler = ls.ShardedGradScaler("cpu", 8.0, 0.5, 2.0, 100, True, None)
ls.GradScaler("cpu", process_groups=[], meshes=None, shard_groups=None)

tries: list[int] = list(scaler.attempts())

ls.GradScaler("cpu", policy=8.0)  # type: ignore[arg-type]
ls.GradScaler("cpu", 8.0, 2.0, 0.5, 100, True, Dynamic())  # type: ignore[call-arg]
ls.GradScaler("cpu", init_scale="8")  # type: ignore[arg-type]
ls.GradScaler("cpu", module=model, on_collapse="explain")
explained: Explanation = scaler.explain(lambda: loss)
explained = scaler.explain(lambda: None, module=model)
first: Finding | None = explained.first
helps: bool | None = explained.lower_scale_helps
worth_a_try: bool = explained.may_depend_on_scale
if first is not None:
    number: int | None = first.loss
    lost: float | None = first.lost_epsilon
helping: float | None = explained.helping_scale
words: str = str(explained) + explained.advice
data: dict[str, Any] = explained.to_dict()
last: Explanation | None = scaler.last_explanation
scaler.explain(8.0)  # type: ignore[arg-type]
scaler.explain(lambda: None, module="model")  # type: ignore[arg-type]
scaler.step_scheduler()  # type: ignore[call-arg]
ls.GradScaler("cpu", on_collapse="stop")  # type: ignore[arg-type]
ls.GradScaler("cpu", on_no_gradients="ignore it")  # type: ignore[arg-type]
scaled_losses: list[Any] = scaler.scale([loss, loss])
torch_classic.LossScaleOptimizer(inner)  # type: ignore[call-arg]
torch_classic.LossScaleOptimizer(inner, None)  # type: ignore[arg-type]
wrong: ScaleState = ls.init(Fixed)  # type: ignore[arg-type]
