"""How the public surface looks to a type checker; checked by mypy, never run."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import lossscale
import lossscale.numpy as ls
from lossscale import Dynamic, Fixed, Policy, ScaleState, Signal, presets
from lossscale.diagnostics import Recording, Simulation, read_recording, simulate

fixed: Fixed = Fixed(1024.0)
dynamic: Dynamic = Dynamic(growth_interval=100, at_min="hold", growth_delay="first")
preset: Dynamic = presets.get("torch", init_scale=8.0)
policies: list[Policy] = [fixed, dynamic, preset]

searching: lossscale.AutoStart = lossscale.AutoStart(dynamic, jump=8)
reading: list[Policy] = [
    searching,
    lossscale.Headroom(dynamic, margin=2, window=100),
    lossscale.LogMax(patience=5),
    lossscale.Histogram(period=1),
    lossscale.Saturation(edge=448.0),
    lossscale.OverflowRate(tolerance=0.1),
    lossscale.WindowFollowsScale(dynamic),
    lossscale.RisingFloor(floors=((100, 8.0),)),
]

state: ScaleState = ls.init(dynamic)
gradients, signal = ls.unscale({"w": np.ones(3)}, state, measure=("norm",))
seen: Signal = signal
state = ls.update(dynamic, state, signal)
edge: lossscale.AboveEdge = lossscale.AboveEdge(8188.0, inclusive=True)
ls.unscale({"w": np.ones(3)}, state, measure=("amax", edge))
ls.unscale({"w": np.ones(3)}, state, measure=lossscale.Histogram().wants)
ls.unscale({"w": np.ones(3)}, state, measure=("amax", 8188.0))  # type: ignore[arg-type]

portable: dict[str, Any] = lossscale.to_portable(dynamic, state)
policy, restored = lossscale.from_portable(portable)
state = ls.init(policy, restored)

results: list[Simulation] = simulate(policies, np.ones(3, np.bool_))
recording: Recording = read_recording(["true", "false"], "steps.jsonl")
results = simulate(
    policies, recording.finite, magnitudes=recording.magnitudes("float16")
)
growths: int = results[0].growths


@dataclass(frozen=True)
class Own:
    """A policy of one's own needs no base class."""

    def init(self) -> ScaleState:
        return ScaleState(1.0, 0, 0)

    def step(
        self, state: ScaleState, signal: Signal, *, where: lossscale.core.state.Where
    ) -> ScaleState:
        return state


own: Policy = Own()

manager: ls.LossScaleManager = ls.ExponentialUpdateLossScaleManager(8.0, 2)
loss_scale: ls.LossScale | None = ls.get("dynamic")

lossscale.AutoStart(8.0)  # type: ignore[arg-type]
lossscale.Headroom(dynamic, 2)  # type: ignore[call-arg]
Dynamic(at_min="floor")  # type: ignore[arg-type]
Dynamic(8.0)  # type: ignore[call-arg]
wrong: Policy = object()  # type: ignore[assignment]
dynamic.init_scale = 3.0  # type: ignore[misc]
