"""Replays recorded traces on `lossscale.tensorflow`, in any mode of TensorFlow.

Tracing a function, or building a graph, costs more than running it, so there are two
ways to share one among rows. `abreast` runs rows of any settings side by side, in one
function of a vector. `in_turn` runs rows of the same settings one after the other,
and sets all variables back in between.
"""

from functools import partial

import numpy as np
import tensorflow as tf

from helpers.tensorflow_modes import MODES

WIDTH = 16
"""How many rows run side by side; more take longer again to optimize than to run."""

BAD_VALUES = (np.nan, np.inf, -np.inf)


def gradients(row):
    """Return a gradient for each step: 1 on good ones, as when it was recorded."""
    if "bad_value" in row:
        bad = [float(row["bad_value"])] * len(row["finite"])
    else:
        bad = [BAD_VALUES[step % 3] for step in range(len(row["finite"]))]
    return np.where(row["finite"], 1.0, bad).astype(np.float32)


def coefficients(row):
    """Return the coefficients of a closed loop."""
    return np.array(row["loss_coefficient_f16"], np.float16)


def after(operation, read):
    """Return what `read()` returns once an operation is done, if there is one."""
    with tf.control_dependencies([] if operation is None else [operation]):
        return tuple(tf.convert_to_tensor(value) for value in read())


def abreast(mode, rows, build, inputs=gradients, limit=None):
    """Return the results of every step of every row, by the row's name.

    Args:
        mode: One of `MODES`.
        rows: Recorded rows.
        build: Takes a row and returns a step: a function of one scalar tensor that
            returns a tuple of scalar tensors.
        inputs: Takes a row and returns an array with an input for each step.
        limit: How many steps to take at most.
    """
    found = {}
    width = 1 if mode == "eager" else WIDTH  # nothing to share there
    ordered = sorted(rows, key=lambda row: len(row["finite"]))
    for start in range(0, len(ordered), width):
        group = ordered[start : start + width]
        given = [inputs(row)[:limit] for row in group]
        table = np.ones((len(given[-1]), len(group)), given[-1].dtype)
        for lane, column in enumerate(given):
            table[: len(column), lane] = column
        build_group = partial(_side_by_side, group, build)
        with MODES[mode](build_group, table[0]) as run:
            results = [run(line) for line in table]
        columns = [np.stack(column) for column in zip(*results, strict=True)]
        for lane, row in enumerate(group):
            steps = len(given[lane])
            values = [column[:steps, lane].tolist() for column in columns]
            found[row["name"]] = list(zip(*values, strict=True))
    return found


def in_turn(rows, build, inputs=gradients, *, key, compiled):
    """Return the results of every step of every row, by the row's name.

    Args:
        rows: Recorded rows.
        build: Takes a row and returns a step and `restart(row)`, which sets its
            variables to the start of another row of the same key.
        inputs: Takes a row and returns an array with an input for each step.
        key: Takes a row and returns what rows must have in common to share a step.
        compiled: Whether the step is run as a `tf.function`.
    """
    found, made = {}, {}
    for row in rows:
        if key(row) not in made:
            step, restart = build(row)
            # Not AutoGraph's business, and half the time of a trace.
            step = tf.function(step, autograph=False) if compiled else step
            made[key(row)] = step, restart
        step, restart = made[key(row)]
        restart(row)
        results = [step(tf.constant(value)) for value in inputs(row)]
        found[row["name"]] = [
            tuple(np.asarray(value).item() for value in result) for result in results
        ]
    return found


def recorded(row, *fields):
    """Return what was recorded of each step, as tuples of these fields."""
    columns = [[number(value) for value in row[field]] for field in fields]
    return list(zip(*columns, strict=True))


def number(value):
    """Return a recorded number; infinities and NaN are strings."""
    return float(value) if isinstance(value, str) else value


def _side_by_side(group, build):
    steps = [build(row) for row in group]

    def joint(given):
        lanes = zip(steps, tf.unstack(given), strict=True)
        results = [step(value) for step, value in lanes]
        return tuple(tf.stack(column) for column in zip(*results, strict=True))

    return joint
