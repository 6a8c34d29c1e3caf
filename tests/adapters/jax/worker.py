"""One of several processes that train together; prints what it saw as one JSON line.

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
# JAX gives up after 100 to 300 seconds; which limits there are depends on its version.
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
BAD = {1: (0, np.inf), 2: (world - 1, np.nan)}
"""In which step the gradients of which process are bad."""

mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
sharded = NamedSharding(mesh, P("all"))
everywhere = NamedSharding(mesh, P())


def batch(step):
    """Return a global array of which every process has made its own rows."""
    mine = np.full((jax.local_device_count(), 4), rank + 1.0, np.float32)
    if step in BAD and BAD[step][0] == rank:
        mine[0, 1] = BAD[step][1]
    return jax.make_array_from_process_local_data(sharded, mine)


def loss(weight, x):
    return jnp.mean(weight * x)


@jax.jit
def global_step(state, weight, x):
    """Train on global arrays: no collective of ours."""
    _, grads, signal, state = ls.value_and_grad(loss, POLICY)(state, weight, x)
    return state, ls.select(signal.finite, weight - grads, weight), signal.finite


@jax.jit
@partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("all")), out_specs=(P(), P(), P())
)
def mapped_step(state, weight, x):
    """Train on what each device has; they decide together."""
    own = jax.lax.pcast(weight, "all", to="varying")
    step = ls.value_and_grad(loss, POLICY, axis_name="all")
    _, grads, signal, state = step(state, own, x)
    grads = jax.lax.pmean(grads, "all")
    return state, ls.select(signal.finite, weight - grads, weight), signal.finite


def run(step):
    state = ls.init(POLICY, device=everywhere)
    weight = jax.device_put(np.zeros(4, np.float32), everywhere)
    seen = []
    for number in range(4):
        state, weight, finite = step(state, weight, batch(number))
        seen.append([bool(finite), float(state.scale), np.asarray(weight).tolist()])
    return seen


report = {
    "processes": jax.process_count(),
    "devices": jax.device_count(),
    "global": run(global_step),
    "mapped": run(mapped_step),
}
sys.stdout.write(json.dumps(report) + "\n")
jax.distributed.shutdown()
