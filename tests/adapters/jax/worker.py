"""One of several processes that train together; prints its steps as one JSON line.

python worker.py RANK WORLD PORT LIMIT
"""

import json
import sys
from functools import partial
from inspect import signature

import jax

rank, world, port, limit = (int(word) for word in sys.argv[1:])
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_checks", True)
# JAX times out after 100 to 300 seconds; the names of its limits depend on its version.
parameters = signature(jax.distributed.initialize).parameters
limits = {name: limit for name in parameters if "timeout" in name}
jax.distributed.initialize(f"localhost:{port}", world, rank, **limits)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import lossscale.jax as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402

POLICY = Dynamic(init_scale=2.0**10)
NONFINITE = {1: (0, np.inf), 2: (world - 1, np.nan)}
"""By step: the process whose gradients are not finite, and their value."""

mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
sharded = NamedSharding(mesh, P("all"))
replicated = NamedSharding(mesh, P())


def make_batch(step):
    """Return a global array, of which every process makes its own rows."""
    local_rows = np.full((jax.local_device_count(), 4), rank + 1.0, np.float32)
    if step in NONFINITE and NONFINITE[step][0] == rank:
        local_rows[0, 1] = NONFINITE[step][1]
    return jax.make_array_from_process_local_data(sharded, local_rows)


def loss(weight, x):
    return jnp.mean(weight * x)


@jax.jit
def global_step(state, weight, x):
    """Train on global arrays, without axis_name."""
    _, grads, signal, state = ls.value_and_grad(loss, POLICY)(state, weight, x)
    return state, ls.select(signal.finite, weight - grads, weight), signal.finite


@jax.jit
@partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("all")), out_specs=(P(), P(), P())
)
def mapped_step(state, weight, x):
    """Train on the rows of each device, with axis_name."""
    varying = jax.lax.pcast(weight, "all", to="varying")
    step = ls.value_and_grad(loss, POLICY, axis_name="all")
    _, grads, signal, state = step(state, varying, x)
    grads = jax.lax.pmean(grads, "all")
    return state, ls.select(signal.finite, weight - grads, weight), signal.finite


def run(step):
    state = ls.init(POLICY, device=replicated)
    weight = jax.device_put(np.zeros(4, np.float32), replicated)
    steps = []
    for number in range(4):
        state, weight, finite = step(state, weight, make_batch(number))
        steps.append([bool(finite), float(state.scale), np.asarray(weight).tolist()])
    return steps


report = {
    "processes": jax.process_count(),
    "devices": jax.device_count(),
    "global": run(global_step),
    "mapped": run(mapped_step),
}
sys.stdout.write(json.dumps(report) + "\n")
jax.distributed.shutdown()
