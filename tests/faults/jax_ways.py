"""Ways through a step of JAX and optax with a loss scale: ours, flax's and jmp's.

Faults are written into the scaled gradients, in the backward pass. A missing gradient
is one of zeros: JAX has none for a parameter that the loss does not read.
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
"""Growth so often that, with all the overflows, the scale visits both of its ends."""
POLICY = Dynamic(growth_interval=INTERVAL)
SHAPES = {"a": (5,), "b": (3, 4), "c": (1,)}


def clipped(inner):
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
    "adam, clipped by norm": lambda: clipped(optax.adam(RATE)),
    "adam, clipped by value": lambda: optax.chain(optax.clip(1.0), optax.adam(RATE)),
    "adam, clipped, float16 moments": lambda: clipped(
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
WAYS = ("loss_scaled", "value_and_grad")
CONFIGURATIONS = (
    *(
        f"{name}: {way}"
        for name in OPTIMIZERS
        for way in WAYS
        # By hand, gradients or moments would have to be cast.
        if (name, way) != ("adam, float16 parameters", "value_and_grad")
    ),
    "sgd: loss_scaled, cond",
    "adamw: loss_scaled, cond",
    "adamw: value_and_grad, cond",
    "adam: MultiSteps around loss_scaled",
)


@jax.custom_vjp
def poison(params, masks, values):
    """Return parameters whose gradients have other numbers where a mask is set."""
    del masks, values
    return params


def _backward(faults, grads):
    masks, values = faults
    replaced = jax.tree.map(
        lambda mask, number, grad: jnp.where(mask, number.astype(grad.dtype), grad),
        masks,
        values,
        grads,
    )
    return replaced, None, None


poison.defvjp(lambda params, *faults: (params, faults), _backward)


def loss_of(params, slopes, masks, values):
    """Return a loss whose gradients are the slopes, but for the faults."""
    params = poison(params, masks, values)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return sum(jnp.sum(wide[name] * slopes[name]) for name in SHAPES)


class LossScaled:
    """`loss_scaled` around the optimizer.

    Every way has a step and, of the state that it returns: whether the step was applied
    (1 or 0, -1 if it only added up a micro-batch), the optimizer's part, the scale, and
    the same state as it is after saving and loading.
    """

    name = "lossscale"
    bounds = POLICY.min_scale, POLICY.max_scale

    def __init__(self, inner, skip="select", around=False):
        self._optimizer = lso.loss_scaled(inner, POLICY, skip=skip)
        if around:
            self._optimizer = lso.MultiSteps(self._optimizer, 3)

    def init(self, params):
        return self._optimizer.init(params)

    def step(self, params, state, *batch):
        grads = jax.grad(lambda p: lso.scale_loss(loss_of(p, *batch), state))(params)
        updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def applied(self, state):
        (found,) = lso.find_states(state)
        if isinstance(state, lso.LossScaledState):
            return found.last_finite
        return jnp.where(state.mini_step == 0, found.last_finite, -1)

    def optimizer_state(self, state):
        # Outside of it there are sums of micro-batches, which have the scale, and the
        # infinity by which their step will be skipped.
        (found,) = lso.find_states(state)
        return found.inner_state

    def scale(self, state):
        return lso.get_scale(state)

    def reload(self, state):
        return lso.with_scale_state(state, _ported(lso.scale_state(state)))


def _ported(state):
    """Return a state of a scale that went through its portable form."""
    text = json.dumps(to_portable(POLICY, state))
    return ls.init(*from_portable(json.loads(text)))


class ValueAndGrad:
    """`value_and_grad`, and `select` or `apply_if_finite`."""

    name = "lossscale"
    bounds = POLICY.min_scale, POLICY.max_scale

    def __init__(self, inner, branches=False):
        self._optimizer = inner
        self._branches = branches

    def init(self, params):
        return ls.init(POLICY), self._optimizer.init(params), jnp.asarray(True)

    def step(self, params, state, *batch):
        scaling, inner, _ = state
        found = ls.value_and_grad(loss_of, POLICY)(scaling, params, *batch)

        def optimize(old, grads):
            params, inner = old
            updates, inner = self._optimizer.update(grads, inner, params)
            return optax.apply_updates(params, updates), inner

        old, finite = (params, inner), found.signal.finite
        if self._branches:
            params, inner = ls.apply_if_finite(finite, optimize, old, found.grads)
        else:
            params, inner = ls.select(finite, optimize(old, found.grads), old)
        return params, (found.state, inner, finite)

    def applied(self, state):
        return state[2]

    def optimizer_state(self, state):
        return state[1]

    def scale(self, state):
        return state[0].scale

    def reload(self, state):
        return _ported(state[0]), *state[1:]


def _widened(params):
    """Return parameters in float32, as the gradients are that flax and jmp return."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


class OfFlax(ValueAndGrad):
    """flax's `DynamicScale`, used as its docstring shows."""

    name = "flax DynamicScale"
    bounds = POLICY.min_scale, float(np.finfo(np.float32).max)

    def init(self, params):
        scaler = DynamicScale(
            growth_interval=INTERVAL - 1,
            scale=jnp.float32(POLICY.init_scale),
            fin_steps=jnp.int32(0),
        )
        return scaler, self._optimizer.init(_widened(params)), jnp.asarray(True)

    def step(self, params, state, *batch):
        scaler, inner, _ = state
        scaler, finite, _, grads = scaler.value_and_grad(loss_of)(params, *batch)
        updates, new = self._optimizer.update(grads, inner, params)
        moved = optax.apply_updates(params, updates), new
        params, inner = jax.tree.map(
            lambda one, other: jnp.where(finite, one, other), moved, (params, inner)
        )
        return params, (scaler, inner, finite)

    def reload(self, state):
        return state


class OfJmp(OfFlax):
    """jmp's `DynamicLossScale`, `all_finite` and `select_tree`."""

    name = "jmp DynamicLossScale"

    def init(self, params):
        numbers = jnp.float32(POLICY.init_scale), jnp.int32(0)
        return numbers, self._optimizer.init(_widened(params)), jnp.asarray(True)

    def step(self, params, state, *batch):
        numbers, inner, _ = state
        scaler = jmp.DynamicLossScale(*numbers, period=INTERVAL)
        grads = jax.grad(lambda p: scaler.scale(loss_of(p, *batch)))(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        params, inner = self._apply(finite, grads, params, inner)
        scaler = scaler.adjust(finite)
        return params, ((scaler.loss_scale, scaler.counter), inner, finite)

    def _apply(self, finite, grads, params, inner):
        updates, new = self._optimizer.update(grads, inner, params)
        moved = optax.apply_updates(params, updates), new
        return jmp.select_tree(finite, moved, (params, inner))

    def scale(self, state):
        return state[0][0]


class OfOptax(OfJmp):
    """jmp's scale around `optax.apply_if_finite`: optax has no scale of its own."""

    name = "jmp and optax.apply_if_finite"

    def __init__(self, inner):
        super().__init__(optax.apply_if_finite(inner, max_consecutive_errors=10))

    def _apply(self, finite, grads, params, inner):
        updates, inner = self._optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def optimizer_state(self, state):
        return state[1].inner_state


def make(configuration: str, *, own: bool):
    """Return the way through a step that a configuration names."""
    name, way = configuration.split(": ")
    inner = OPTIMIZERS[name]()
    if own and way.endswith("cond"):
        return OfOptax(inner)
    if own:
        return OfJmp(inner) if way.startswith("value") else OfFlax(inner)
    if way.startswith("value"):
        return ValueAndGrad(inner, branches=way.endswith("cond"))
    skip = "cond" if way.endswith("cond") else "select"
    return LossScaled(inner, skip, around=way.startswith("MultiSteps"))
