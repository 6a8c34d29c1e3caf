"""Recorded optimizers, replayed bit for bit in every mode."""

import itertools
import math

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

from helpers.tensorflow_optimizers import OPTIMIZERS  # noqa: E402
from helpers.tensorflow_optimizers import variable as make_variable  # noqa: E402
from helpers.tensorflow_replay import (  # noqa: E402
    abreast,
    after,
    coefficients,
    gradients,
    in_turn,
    recorded,
)
from helpers.tensorflow_rows import EAGER_STEPS, ROWS, check_rows, rows_of  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX, SMALLEST_NORMAL  # noqa: E402


def settings(config):
    """Return the settings of a loss scale under the names of DynamicLossScale."""
    return {
        "initial_loss_scale": config.get(
            "initial_loss_scale", config.get("initial_scale")
        ),
        "increment_period": config.get(
            "increment_period", config.get("dynamic_growth_steps")
        ),
        "multiplier": config.get("multiplier", 2),
    }


def training(row, kind, feed, *, wrapper=ls.LossScaleOptimizer, floor=1.0, **options):
    """Return a step that trains one weight from 0 at rate 1, and how to restart it."""
    config = {
        name: value
        for name, value in row["config"].items()
        if name not in {"learning_rate", "var_init"}
    }
    if "init_loss_scale" in config:
        loss_scale = ls.ExponentialUpdateLossScaleManager(**config, at_floor="clamp")
        scale, counts = (
            loss_scale.loss_scale,
            (loss_scale.good_steps, loss_scale.bad_steps),
        )
    else:
        loss_scale = ls.DynamicLossScale(**settings(config), floor=floor)
        scale, counts = loss_scale.current_loss_scale, (loss_scale.good_steps,)
    weight = make_variable(kind, 0.0)
    optimizer = wrapper(OPTIMIZERS[kind](1.0), loss_scale, **options)
    given = {}
    if kind == "v1":
        given["global_step"] = tf.Variable(0, dtype=tf.int64, trainable=False)

    def counter():
        return given["global_step"] if given else optimizer.iterations

    def step(value):
        operation = feed(optimizer, weight, value, given)
        return after(operation, lambda: (scale, *counts, weight, counter()))

    def restart(row):
        first = row["config"].get("init_loss_scale")
        scale.assign(first or settings(row["config"])["initial_loss_scale"])
        for variable in (*counts, counter()):
            variable.assign(0)
        weight.assign(0.0)

    return step, restart


def apply(optimizer, weight, gradient, given):
    return optimizer.apply_gradients([(gradient, weight)], **given)


def minimize(optimizer, weight, coefficient, given):
    """The recorded closed loop: a float16 loss that overflows by the scale alone."""

    def loss():
        return tf.cast(tf.convert_to_tensor(weight), tf.float16) * coefficient

    return optimizer.minimize(loss, var_list=[weight], **given)


def same_settings(row):
    """Whatever is not the initial scale is part of a trace."""
    return tuple(
        value
        for name, value in row["config"].items()
        if name not in {"initial_loss_scale", "init_loss_scale", "initial_scale"}
    )


def fields_of(rows):
    return ("scale", "good", *(["bad"] if rows[0]["bad"] else []), "var", "step")


MIXED = {"wrapper": ls.MixedPrecisionLossScaleOptimizer}
COUNTED = {"count_skipped_steps": True}
UNCOUNTED_FILES = ("opt_keras.tf2.0.4.eager",)
COUNTED_FILES = "opt_keras.tf2.3.4.eager", "opt_keras.tf2.21.0.eager"
CLOSED_KERAS = "closed_keras.tf2.3.4.eager", "closed_keras.tf2.21.0.eager"
OPEN = [
    # Files of the same inputs are replayed once, and compared with each.
    (("opt_contrib.tf1.15.5.eager",), "v1", {}),
    (("opt_mp_v1.tf1.15.5.eager", "opt_mp_v1.tf2.3.4.eager"), "v1", MIXED),
    (UNCOUNTED_FILES, "tf_keras", {}),
    (UNCOUNTED_FILES, "keras 3", {}),
    (COUNTED_FILES, "tf_keras", COUNTED),
    (COUNTED_FILES, "keras 3", COUNTED),
]
CLOSED = [
    (("closed_contrib.tf1.15.5.eager",), "v1", {}),
    (("closed_mp_v1.tf2.3.4.eager",), "v1", MIXED),
    (CLOSED_KERAS, "tf_keras", COUNTED),
    (CLOSED_KERAS, "keras 3", COUNTED),
]


def part_for(kind):
    """Every row is replayed around tf_keras, every third around Keras 3 as well."""
    return slice(None, None, 3 if kind == "keras 3" else 1)


def moved(row):
    """Whether the weight moved in each step; its gradient is 1 or not finite."""
    weights = [0.0, *row["var"]]
    return [old != new for old, new in itertools.pairwise(weights)]


@pytest.mark.parametrize(("files", "kind", "options"), OPEN)
def test_an_optimizer_replays_the_original_in_a_function(files, kind, options):
    found = in_turn(
        rows_of(files[0])[part_for(kind)],
        lambda row: training(row, kind, apply, **options),
        key=same_settings,
        compiled=True,
    )
    for file in files:
        rows = rows_of(file)
        check_rows("function", rows[part_for(kind)], found, fields_of(rows))
        assert all(row["should_apply"] == moved(row) for row in rows)
        assert ROWS[file][0] == len(rows)


@pytest.mark.parametrize(("files", "kind", "options"), CLOSED)
def test_a_closed_loop_replays_the_original_in_a_function(files, kind, options):
    """The scale itself makes float16 overflow, so each step hangs on all before it.

    The originals multiplied a float16 loss in float16. Ours does so in float32, but
    the gradient goes back through the cast and overflows at the same scales.
    """
    found = in_turn(
        rows_of(files[0])[part_for(kind)],
        lambda row: training(row, kind, minimize, **options),
        coefficients,
        key=same_settings,
        compiled=True,
    )
    for file in files:
        rows = rows_of(file)
        check_rows("function", rows[part_for(kind)], found, fields_of(rows))
        assert ROWS[file][0] == len(rows)


LEGACY = [
    (UNCOUNTED_FILES, "tf_keras legacy", {}),
    (COUNTED_FILES, "tf_keras legacy", COUNTED),
    (CLOSED_KERAS, "tf_keras legacy", COUNTED),
]
OTHER_MODES = [
    *[("eager", *combination) for combination in OPEN + CLOSED + LEGACY],
    *[
        ("graph", files, kind, options)
        for files, kind, options in OPEN + CLOSED + LEGACY
        # The newer ones of Keras leave their order to tf.function.
        if kind in {"v1", "tf_keras legacy"}
    ],
    *[("xla", *combination) for combination in OPEN[1:4:2] + CLOSED[1:3]],
]


@pytest.mark.parametrize(("mode", "files", "kind", "options"), OTHER_MODES)
def test_an_optimizer_replays_a_sample_in_other_modes(mode, files, kind, options):
    rows = rows_of(files[0])[7::25]
    closed = files[0].startswith("closed")
    found = abreast(
        mode,
        rows,
        lambda row: training(row, kind, minimize if closed else apply, **options)[0],
        coefficients if closed else gradients,
        EAGER_STEPS if mode == "eager" else None,
    )
    check_rows(mode, rows, found, fields_of(rows))


def test_keras_3_is_followed_as_far_as_its_scale_is_a_normal_number():
    """It has neither floor nor ceiling; a floor of almost nothing comes near to that.

    Where its scale falls to 0, which then turns weights into NaN, or grows to
    infinity, ours stays at the last number that works.
    """
    file = "opt_keras3.keras3.15.1.eager"
    rows = rows_of(file)
    found = in_turn(
        rows,
        lambda row: training(row, "keras 3", apply, floor=SMALLEST_NORMAL),
        key=same_settings,
        compiled=True,
    )
    different = 0
    for row in rows:
        expected, have = recorded(row, *fields_of(rows)), found[row["name"]]
        normal = [SMALLEST_NORMAL <= scale <= FLOAT32_MAX for scale, *_ in expected]
        steps = normal.index(False) if False in normal else len(normal)
        assert expected[:steps] == have[:steps]
        assert all(math.isfinite(weight) for _, _, weight, _ in have)
        different += steps < len(normal)
    assert ROWS[file] == (len(rows) - different, 0, different)
