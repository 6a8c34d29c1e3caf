"""Training steps in JAX and optax with the loss scales of lossscale, flax and jmp.

Faults are written into the scaled gradients, in the backward pass. A missing gradient
is zero: JAX returns zeros for a parameter that the loss does not read.
"""

import json

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import lossscale.jax as ls
import lossscale.optax as lso
from lossscale import Dynamic, from_portable, to_portable

RATE = 1e-3
INTERVAL = 3
"""So short that the scale reaches both of its bounds despite all the overflows."""
POLICY = Dynamic(growth_interval=INTERVAL)
SHAPES = {"a": (5,), "b": (3, 4), "c": (1,)}


def clip(inner):
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "momentum, float16": lambda: optax.sgd(
        RATE, momentum=0.9, accumulator_dtype=jnp.float16
    ),
    "adam": lambda: optax.adam(RATE),
    "adam, float16 moments": lambda: optax.adam(RATE, mu_dtype=jnp.float16),
    "adam, float16 parameters": lambda: optax.adam(RATE),
    "adam, clipped by norm": lambda: clip(optax.adam(RATE)),
    "adam, clipped by value": lambda: optax.chain(optax.clip(1.0), optax.adam(RATE)),
    "adam, clipped, float16 moments": lambda: clip(
        optax.adam(RATE, mu_dtype=jnp.float16)
    ),
    "adam, MultiSteps": lambda: optax.MultiSteps(
        optax.adam(RATE), 3
    ).gradient_transformation(),
    "adamw": lambda: optax.adamw(RATE),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "adagrad": lambda: optax.adagrad(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE, momentum=0.5),
    "adadelta": lambda: optax.adadelta(RATE),
    "nadam": lambda: optax.nadam(RATE),
    "radam": lambda: optax.radam(RATE),
    "adamax": lambda: optax.adamax(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(RATE),
    "lamb": lambda: optax.lamb(RATE),
    "adabelief": lambda: optax.adabelief(RATE),
    "novograd": lambda: optax.novograd(RATE),
    "adan": lambda: optax.adan(RATE),
}
METHODS = ("loss_scaled", "value_and_grad")
CONFIGURATIONS = (
    *(
        f"{name}: {method}"
        for name in OPTIMIZERS
        for method in METHODS
        # Without loss_scaled, gradients or moments would have to be cast.
        if (name, method) != ("adam, float16 parameters", "value_and_grad")
    ),
    "sgd: loss_scaled, cond",
    "adamw: loss_scaled, cond",
    "adamw: value_and_grad, cond",
    "adam: MultiSteps around loss_scaled",
)


@jax.custom_vjp
def inject_faults(params, masks, values):
    """Return the parameters; their gradients are replaced where a mask is set."""
    del masks, values
    return params


def _replace_grads(faults, grads):
    masks, values = faults
    replaced = jax.tree.map(
        lambda mask, number, grad: jnp.where(mask, number.astype(grad.dtype), grad),
        masks,
        values,
        grads,
    )
    return replaced, None, None


inject_faults.defvjp(lambda params, *faults: (params, faults), _replace_grads)


def compute_loss(params, slopes, masks, values):
    """Return a loss whose gradients are the slopes, except for the faults."""
    params = inject_faults(params, masks, values)
    upcast = _upcast(params)
    return sum(jnp.sum(upcast[name] * slopes[name]) for name in SHAPES)


class LossScaled:
    """`loss_scaled` around the optimizer.

    Every method has a step and reads from its state: whether the step was applied (1 or
    0, -1 if it only added a micro-batch), the optimizer's part, and the scale. `reload`
    returns the state after saving and loading.
    """

    name = "lossscale"
    bounds = POLICY.min_scale, POLICY.max_scale

    def __init__(self, inner, skip="select", multi_steps=False):
        self._optimizer = lso.loss_scaled(inner, POLICY, skip=skip)
        if multi_steps:
            self._optimizer = lso.MultiSteps(self._optimizer, 3)

    def init(self, params):
        return self._optimizer.init(params)

    def step(self, params, state, *batch):
        grads = jax.grad(lambda p: lso.scale_loss(compute_loss(p, *batch), state))(
            params
        )
        updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def read_applied(self, state):
        (scaled_state,) = lso.find_states(state)
        if isinstance(state, lso.LossScaledState):
            return scaled_state.last_finite
        return jnp.where(state.mini_step == 0, scaled_state.last_finite, -1)

    def read_optimizer_state(self, state):
        # The outer state has the scaled sums of micro-batches, including the infinity
        # for which their step will be skipped.
        (scaled_state,) = lso.find_states(state)
        return scaled_state.inner_state

    def read_scale(self, state):
        return lso.get_scale(state)

    def reload(self, state):
        return lso.with_scale_state(
            state, _convert_to_portable_and_back(lso.get_scale_state(state))
        )


def _convert_to_portable_and_back(state):
    """Return a scale state after conversion to JSON and back."""
    text = json.dumps(to_portable(POLICY, state))
    return ls.init(*from_portable(json.loads(text)))


class ValueAndGrad:
    """`value_and_grad`, and `select` or `apply_if_finite`."""

    name = "lossscale"
    bounds = POLICY.min_scale, POLICY.max_scale

    def __init__(self, inner, uses_cond=False):
        self._optimizer = inner
        self._uses_cond = uses_cond

    def init(self, params):
        return ls.init(POLICY), self._optimizer.init(params), jnp.asarray(True)

    def step(self, params, state, *batch):
        scale_state, inner, _ = state
        result = ls.value_and_grad(compute_loss, POLICY)(scale_state, params, *batch)

        def optimize(old, grads):
            params, inner = old
            updates, inner = self._optimizer.update(grads, inner, params)
            return optax.apply_updates(params, updates), inner

        old, finite = (params, inner), result.signal.finite
        if self._uses_cond:
            params, inner = ls.apply_if_finite(finite, optimize, old, result.grads)
        else:
            params, inner = ls.select(finite, optimize(old, result.grads), old)
        return params, (result.state, inner, finite)

    def read_applied(self, state):
        return state[2]

    def read_optimizer_state(self, state):
        return state[1]

    def read_scale(self, state):
        return state[0].scale

    def reload(self, state):
        return _convert_to_portable_and_back(state[0]), *state[1:]


def _upcast(params):
    """Return parameters in float32, the dtype of the gradients of flax and jmp."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


class Flax(ValueAndGrad):
    """flax's `DynamicScale`, used as its docstring shows."""

    name = "flax DynamicScale"
    bounds = POLICY.min_scale, float(np.finfo(np.float32).max)

    def init(self, params):
        scaler = DynamicScale(
            growth_interval=INTERVAL - 1,
            scale=jnp.float32(POLICY.init_scale),
            fin_steps=jnp.int32(0),
        )
        return scaler, self._optimizer.init(_upcast(params)), jnp.asarray(True)

    def step(self, params, state, *batch):
        scaler, inner, _ = state
        scaler, finite, _, grads = scaler.value_and_grad(compute_loss)(params, *batch)
        updates, new = self._optimizer.update(grads, inner, params)
        updated = optax.apply_updates(params, updates), new
        params, inner = jax.tree.map(
            lambda new_leaf, old_leaf: jnp.where(finite, new_leaf, old_leaf),
            updated,
            (params, inner),
        )
        return params, (scaler, inner, finite)

    def reload(self, state):
        return state


class Jmp(Flax):
    """jmp's `DynamicLossScale`, `all_finite` and `select_tree`."""

    name = "jmp DynamicLossScale"

    def init(self, params):
        numbers = jnp.float32(POLICY.init_scale), jnp.int32(0)
        return numbers, self._optimizer.init(_upcast(params)), jnp.asarray(True)

    def step(self, params, state, *batch):
        numbers, inner, _ = state
        scaler = jmp.DynamicLossScale(*numbers, period=INTERVAL)
        grads = jax.grad(lambda p: scaler.scale(compute_loss(p, *batch)))(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        params, inner = self._apply(finite, grads, params, inner)
        scaler = scaler.adjust(finite)
        return params, ((scaler.loss_scale, scaler.counter), inner, finite)

    def _apply(self, finite, grads, params, inner):
        updates, new = self._optimizer.update(grads, inner, params)
        updated = optax.apply_updates(params, updates), new
        return jmp.select_tree(finite, updated, (params, inner))

    def read_scale(self, state):
        return state[0][0]


class JmpAndApplyIfFinite(Jmp):
    """jmp's scale with `optax.apply_if_finite`: optax has no loss scale."""

    name = "jmp and optax.apply_if_finite"

    def __init__(self, inner):
        super().__init__(optax.apply_if_finite(inner, max_consecutive_errors=10))

    def _apply(self, finite, grads, params, inner):
        updates, inner = self._optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def read_optimizer_state(self, state):
        return state[1].inner_state


def make(configuration: str, *, own: bool):
    """Return the method of a configuration, or its original with `own`."""
    name, method = configuration.split(": ")
    inner = OPTIMIZERS[name]()
    if own and method.endswith("cond"):
        return JmpAndApplyIfFinite(inner)
    if own:
        return Jmp(inner) if method.startswith("value") else Flax(inner)
    if method.startswith("value"):
        return ValueAndGrad(inner, uses_cond=method.endswith("cond"))
    skip = "cond" if method.endswith("cond") else "select"
    return LossScaled(inner, skip, multi_steps=method.startswith("MultiSteps"))
