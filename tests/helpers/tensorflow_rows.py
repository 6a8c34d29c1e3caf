"""The recorded rows, how many of each file are replayed, and how they are compared."""

from functools import cache

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")


from helpers.tensorflow_replay import (  # noqa: E402
    number,
    recorded,
)
from helpers.traces import read  # noqa: E402

ROWS = {
    # file: rows replayed exactly, refused, different
    "contrib_exponential.tf1.15.5.eager": (319, 10, 0),
    "contrib_fixed.tf1.15.5.eager": (198, 0, 0),
    "unit_exponential.tf1.15.5.eager": (10, 0, 0),
    "dynamic.tf1.15.5.eager": (301, 13, 0),
    "dynamic.tf2.3.4.eager": (301, 13, 0),
    # A graph multiplied by a rounded 1 / multiplier; ours divides in every mode.
    "dynamic.tf1.15.5.graph": (190, 13, 111),
    "dynamic.tf2.3.4.function": (190, 13, 111),
    "unit_dynamic.tf1.15.5.eager": (10, 0, 0),
    "unit_dynamic.tf2.3.4.function": (10, 0, 0),
    "fixed.tf1.15.5.eager": (211, 0, 0),
    "fixed.tf2.3.4.eager": (211, 0, 0),
    "dynamic_replicated.tf1.15.5.eager": (41, 0, 0),
    "dynamic_replicated.tf2.3.4.eager": (41, 0, 0),
    "opt_contrib.tf1.15.5.eager": (220, 0, 0),
    "opt_mp_v1.tf1.15.5.eager": (212, 0, 0),
    "opt_mp_v1.tf2.3.4.eager": (212, 0, 0),
    "opt_keras.tf2.0.4.eager": (228, 0, 0),
    "opt_keras.tf2.3.4.eager": (228, 0, 0),
    "opt_keras.tf2.21.0.eager": (228, 0, 0),
    # Keras 3's scale falls to 0 or grows to infinity; ours stays a normal number.
    "opt_keras3.keras3.15.1.eager": (195, 0, 22),
    "closed_contrib.tf1.15.5.eager": (79, 0, 0),
    "closed_mp_v1.tf2.3.4.eager": (78, 0, 0),
    "closed_keras.tf2.3.4.eager": (98, 0, 0),
    "closed_keras.tf2.21.0.eager": (98, 0, 0),
    # What differs is listed in DIFFERENCES.
    "cases.tf1.15.5.eager": (105, 15, 6),
    "cases.tf1.15.5.graph": (103, 15, 8),
    "cases.tf2.3.4.eager": (86, 9, 2),
    "cases.tf2.21.0.eager": (86, 9, 2),
}

# Every row is replayed to its end in a tf.function, which is the fastest; some rows in
# the other modes too, eagerly the first steps of them.
SAMPLES = {
    "eager": slice(None, None, 6),
    "graph": slice(None, None, 9),
    "xla": slice(None, None, 15),
    "function": slice(None),
}
EAGER_STEPS = 40

every_mode = pytest.mark.parametrize("mode", ["eager", "function", "graph", "xla"])


@cache
def rows_of(file):
    return read(f"tensorflow/{file}")


def rows_for(mode, rows):
    """Return the rows to replay in a mode, and how many steps of each."""
    return rows[SAMPLES[mode]], EAGER_STEPS if mode == "eager" else None


def check_rows(mode, rows, found, fields):
    """Raise unless every row was replayed exactly, and but eagerly to its end."""
    for row in rows:
        expected = recorded(row, *fields)
        have = found[row["name"]]
        if not have or expected[: len(have)] != have:
            message = f"{row['name']} {row['config']} in {mode}: {expected} != {have}"
            raise AssertionError(message)
        if mode != "eager" and len(have) != len(expected):
            message = f"{row['name']}: {len(have)} of {len(expected)} steps replayed"
            raise AssertionError(message)


def numbers_of(config):
    return {name: number(value) for name, value in config.items()}
