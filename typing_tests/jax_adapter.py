"""Types of the JAX and optax adapters; checked by mypy, never run.

Not named `jax.py`: a type checker would take that for the framework itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import lossscale.jax as ls
import lossscale.optax as lso
from lossscale import Dynamic, Explanation, Fixed, Policy, ScaleState, Signal
from lossscale.jax.compat import flax as compat_flax
from lossscale.jax.compat import jmp as compat_jmp

policy: Policy = Dynamic()
params: Any = {"w": jnp.ones(2)}
mesh: Any = jax.devices()


def compute_loss(params: Any, x: Any) -> Any:
    return jnp.sum(params["w"] * x)


def never_pass(path: tuple[Any, ...], leaf: Any) -> bool:
    return False


def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda old, grad: old - grad, params, grads)


state: ScaleState = ls.init(policy)
state = ls.init(policy, ScaleState(8.0, 0, 0), device=mesh[0])
scaled: Any = ls.scale(jnp.float16(1.0), state)
grads, signal = ls.unscale(
    params,
    state,
    measure=["norm"],
    axis_name=("data", "model"),
    passthrough=never_pass,
    loss=1.0,
)
first_signal: Signal = signal
state = ls.update(policy, state, signal)
selected: Any = ls.select(signal.finite, grads, params)
selected = ls.apply_if_finite(signal.finite, descend, params, grads)
is_passthrough: bool = ls.is_overwrite_with_gradient((), 1.0)

step = ls.value_and_grad(compute_loss, policy)
result: ls.ValueAndGrad = step(state, params, jnp.ones(2))
value, grads, signal, state = result
next_state: ScaleState = result.state
ls.value_and_grad(
    compute_loss, Fixed(8.0), argnums=(0, 1), has_aux=True, axis_name="data"
)
ls.value_and_grad(
    compute_loss, policy, measure=["nan"], passthrough=ls.is_overwrite_with_gradient
)
retry_result: ls.RetryResult = ls.with_retries(step, retries=2)(
    state, params, jnp.ones(2)
)
attempts: jax.Array = retry_result.retries
accumulation: ls.AccumulationResult = ls.accumulate_gradients(
    compute_loss,
    policy,
    on_overflow="skip",
    batch_argnums=(1,),
    argnums=0,
    has_aux=False,
)(state, params, jnp.ones((3, 2)))
used: jax.Array = accumulation.used
seen: Explanation = ls.explain(compute_loss, state, params, jnp.ones(2), argnums=0)
ls.explain(compute_loss, "8", params)  # type: ignore[arg-type]
flags: ls.LeafFlags = ls.leaf_flags(grads, axis_name="data")
names: dict[str, str] = ls.nonfinite_leaves(grads, flags)
alarm = ls.CollapseAlarm(limit=10, on_collapse="raise")
alarm(signal, state.scale)
skipped: int = alarm.consecutive_skips

static: compat_jmp.LossScale = compat_jmp.StaticLossScale(8.0)
dynamic: compat_jmp.DynamicLossScale = compat_jmp.DynamicLossScale(
    8.0, period=100, factor=2, min_loss_scale=1.0
)
dynamic = dynamic.adjust(compat_jmp.all_finite(grads))
grads = compat_jmp.NoOpLossScale().unscale(dynamic.unscale(grads))
grads = compat_jmp.select_tree(signal.finite, grads, grads)
flax_scale: compat_flax.DynamicScale = compat_flax.DynamicScale(
    scale=8.0, growth_interval=100
)
flax_result: compat_flax.DynamicScaleResult = flax_scale.value_and_grad(compute_loss)(
    params, 1.0
)
flax_scale = flax_result.dynamic_scale.replace(fin_steps=0)

optimizer: Any = lso.loss_scaled(optax.adam(1e-3))
optimizer = lso.loss_scaled(optax.adam(1e-3), policy, axis_name="data", skip="cond")
opt_state: Any = optimizer.init(params)
states: list[lso.LossScaledState] = lso.find_states(opt_state)
scale_state: ScaleState = states[0].scale_state
scale_state = lso.get_scale_state(opt_state)
opt_state = lso.with_scale_state(opt_state, scale_state)
scaled = lso.scale_loss(1.0, opt_state) + lso.get_scale(opt_state)
opt_state = lso.MultiSteps(optimizer, 2).init(params)

ls.value_and_grad(compute_loss)  # type: ignore[call-arg]
ls.value_and_grad(compute_loss, 8.0)  # type: ignore[arg-type]
ls.accumulate_gradients(compute_loss, policy, on_overflow="keep")  # type: ignore[arg-type]
ls.with_retries(step, retries=0.5)  # type: ignore[arg-type]
ls.CollapseAlarm(on_collapse="print")  # type: ignore[arg-type]
ls.init(Fixed)  # type: ignore[arg-type]
lso.loss_scaled(optax.adam(1e-3), 8.0)  # type: ignore[arg-type]
lso.loss_scaled(optax.adam(1e-3), skip="never")  # type: ignore[arg-type]
result.missing  # type: ignore[attr-defined]
