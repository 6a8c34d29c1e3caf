# SPDX-License-Identifier: Apache-2.0
"""What does a selection cost where AdamW's state is donated, and why, on a CPU?

The optimizer alone, on six leaves of 131,072 numbers, in four ways:

    no selection    the new values as they are
    select          `jnp.where` by the flag, of parameters and state
    ordered         the same, but the state's flag is made to depend on the selected
                    parameters, so that XLA knows which is written last
    condition       `lax.cond` around the optimizer

Processor time as a ratio to no selection in the same turn, the median of the turns, and
the copies of whole leaves in the compiled program, outside of the condition's branches.

    python benchmarks/jax_donated.py FOLDER     writes FOLDER/jax_donated.cpu.csv
"""

import csv
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from machine import describe

LEAVES, SHAPE = 6, (256, 512)
TURNS, STEPS = 100, 3
OPTIMIZER = optax.adamw(1e-3)


def update(parameters, state, grads):
    updates, state = OPTIMIZER.update(grads, state, parameters)
    return optax.apply_updates(parameters, updates), state


def select(flag, new, old):
    return jax.tree.map(lambda one, other: jnp.where(flag, one, other), new, old)


def is_finite(grads):
    flags = [jnp.all(jnp.isfinite(grad)) for grad in grads]
    return jnp.sum(jnp.stack(flags), dtype=jnp.int32) == len(flags)


def select_all(parameters, state, grads):
    new = update(parameters, state, grads)
    return select(is_finite(grads), new, (parameters, state))


def select_in_order(parameters, state, grads):
    new_parameters, new_state = update(parameters, state, grads)
    flag = is_finite(grads)
    parameters = select(flag, new_parameters, parameters)
    for leaf in parameters:
        # Always true, which XLA does not know.
        bits = jax.lax.bitcast_convert_type(leaf[0, 0], jnp.int32)
        flag = flag & ((bits | 1) != 0)
    return parameters, select(flag, new_state, state)


def branch(parameters, state, grads):
    return jax.lax.cond(
        is_finite(grads),
        update,
        lambda parameters, state, _: (parameters, state),
        parameters,
        state,
        grads,
    )


WAYS = {
    "no selection": update,
    "select": select_all,
    "ordered": select_in_order,
    "condition": branch,
}


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    grads = [jnp.full(SHAPE, 1e-3) for _ in range(LEAVES)]
    steps, states, copies = {}, {}, {}
    for name, way in WAYS.items():
        parameters = [jnp.ones(SHAPE) for _ in range(LEAVES)]
        first = (parameters, OPTIMIZER.init(parameters))
        states[name] = jax.tree.map(jnp.array, first)  # no buffer twice
        steps[name] = jax.jit(way, donate_argnums=(0, 1))
        text = steps[name].lower(*states[name], grads).compile().as_text()
        lines = text[text.index("\nENTRY") :].splitlines()
        leaf = f"f32[{SHAPE[0]},{SHAPE[1]}]"
        copies[name] = sum(" copy(" in line and leaf in line for line in lines)
    times = {name: [] for name in WAYS}
    for turn in range(TURNS):
        for name in list(WAYS) if turn % 2 else reversed(WAYS):
            begin = time.process_time()
            for _ in range(STEPS):
                states[name] = steps[name](*states[name], grads)
            jax.block_until_ready(states[name])
            times[name].append(time.process_time() - begin)
    machine = describe("jax", "jaxlib", "optax")
    with (folder / "jax_donated.cpu.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "ratio", "ratio_20", "ratio_80", "copies", *machine])
        for name in WAYS:
            pairs = zip(times[name], times["no selection"], strict=True)
            ratios = [own / reference for own, reference in pairs]
            low, *_, high = statistics.quantiles(ratios, n=5)
            numbers = (statistics.median(ratios), low, high)
            row = [name, *(f"{number:.3f}" for number in numbers), copies[name]]
            writer.writerow([*row, *machine.values()])
            print(*row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
