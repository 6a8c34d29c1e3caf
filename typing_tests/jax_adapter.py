"""How the JAX and optax adapters look to a type checker; checked by mypy, never run.

Not `jax.py`: a checker would take that for the framework itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import lossscale.jax as ls
import lossscale.optax as lso
from lossscale import Dynamic, Fixed, Policy, ScaleState, Signal
from lossscale.jax import drop_ins

policy: Policy = Dynamic()
params: Any = {"w": jnp.ones(2)}
mesh: Any = jax.devices()


def loss_of(params: Any, x: Any) -> Any:
    return jnp.sum(params["w"] * x)


def never(path: tuple[Any, ...], leaf: Any) -> bool:
    return False


def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda old, grad: old - grad, params, grads)


state: ScaleState = ls.init(policy)
state = ls.init(policy, ScaleState(8.0, 0, 0), device=mesh[0])
scaled: Any = ls.scale(jnp.float16(1.0), state)
grads, signal = ls.unscale(
    params, state, measure=["norm"], axis_name=("data", "model"), as_is=never, loss=1.0
)
seen: Signal = signal
state = ls.update(policy, state, signal)
chosen: Any = ls.select(signal.finite, grads, params)
chosen = ls.apply_if_finite(signal.finite, descend, params, grads)
passes: bool = ls.overwritten((), 1.0)

step = ls.value_and_grad(loss_of, policy)
found: ls.Differentiated = step(state, params, jnp.ones(2))
value, grads, signal, state = found
after: ScaleState = found.state
ls.value_and_grad(loss_of, Fixed(8.0), argnums=(0, 1), has_aux=True, axis_name="data")
ls.value_and_grad(loss_of, policy, measure=["nan"], as_is=ls.overwritten)
retried: ls.Retried = ls.retrying(step, retries=2)(state, params, jnp.ones(2))
attempts: Any = retried.retries
accumulated: ls.Accumulated = ls.accumulating(
    loss_of, policy, bad="skip", batch_argnums=(1,), argnums=0, has_aux=False
)(state, params, jnp.ones((3, 2)))
used: Any = accumulated.used
flags: ls.LeafFlags = ls.leaf_flags(grads, axis_name="data")
names: dict[str, str] = ls.bad_leaves(grads, flags)
alarm = ls.CollapseAlarm(limit=10, on_collapse="raise")
alarm(signal, state.scale)
skipped: int = alarm.skipped_in_a_row

like_jmp: drop_ins.LossScale = drop_ins.StaticLossScale(8.0)
dynamic: drop_ins.DynamicLossScale = drop_ins.DynamicLossScale(
    8.0, period=100, factor=2, min_loss_scale=1.0
)
dynamic = dynamic.adjust(drop_ins.all_finite(grads))
grads = drop_ins.NoOpLossScale().unscale(dynamic.unscale(grads))
grads = drop_ins.select_tree(signal.finite, grads, grads)
like_flax: drop_ins.DynamicScale = drop_ins.DynamicScale(scale=8.0, growth_interval=100)
result: drop_ins.DynamicScaleResult = like_flax.value_and_grad(loss_of)(params, 1.0)
like_flax = result.dynamic_scale.replace(fin_steps=0)

optimizer: Any = lso.loss_scaled(optax.adam(1e-3))
optimizer = lso.loss_scaled(optax.adam(1e-3), policy, axis_name="data", skip="cond")
opt_state: Any = optimizer.init(params)
states: list[lso.LossScaledState] = lso.find_states(opt_state)
inside: ScaleState = states[0].scale_state
inside = lso.scale_state(opt_state)
opt_state = lso.with_scale_state(opt_state, inside)
scaled = lso.scale_loss(1.0, opt_state) + lso.get_scale(opt_state)
opt_state = lso.MultiSteps(optimizer, 2).init(params)

ls.value_and_grad(loss_of)  # type: ignore[call-arg]
ls.value_and_grad(loss_of, 8.0)  # type: ignore[arg-type]
ls.accumulating(loss_of, policy, bad="keep")  # type: ignore[arg-type]
ls.retrying(step, retries=0.5)  # type: ignore[arg-type]
ls.CollapseAlarm(on_collapse="print")  # type: ignore[arg-type]
ls.init(Fixed)  # type: ignore[arg-type]
lso.loss_scaled(optax.adam(1e-3), 8.0)  # type: ignore[arg-type]
found.missing  # type: ignore[attr-defined]
