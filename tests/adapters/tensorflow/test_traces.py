"""The recorded originals, replayed bit for bit on TensorFlow in every mode.

Every row of every file is replayed exactly, or refused when the object is made, or
different for a reason that is written here; `ROWS` says how many of each.
"""

import itertools
import math
from collections import Counter
from functools import cache

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_optimizers import OPTIMIZERS  # noqa: E402
from helpers.tensorflow_optimizers import variable as make_variable  # noqa: E402
from helpers.tensorflow_replay import (  # noqa: E402
    abreast,
    after,
    coefficients,
    gradients,
    in_turn,
    number,
    recorded,
)
from helpers.traces import DATA, read  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX, SMALLEST_NORMAL  # noqa: E402
from lossscale.errors import (  # noqa: E402
    LossScaleError,
    SettingError,
)

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


def test_every_row_of_every_file_is_accounted_for():
    files = {
        path.name.removesuffix(".jsonl.gz") for path in (DATA / "tensorflow").iterdir()
    }
    assert files == ROWS.keys()
    for file, counts in ROWS.items():
        assert len(rows_of(file)) == sum(counts), file


# Managers and loss scales


def usable_scale(value):
    """Ours refuses a scale that is zero, negative, NaN or beyond float32."""
    return 0 < number(value) <= FLOAT32_MAX


def usable(config):
    """Whether settings are among those that the reference pages allow."""
    scale = config.get("init_loss_scale", config.get("initial_loss_scale"))
    return (
        usable_scale(scale)
        and config.get("incr_ratio", 2) > 1
        and config.get("decr_ratio", 0.5) < 1
        and config.get("multiplier", 2) > 1
    )


def split(file):
    """Return the rows that ours takes, and those that it refuses."""
    rows = rows_of(file)
    taken = [row for row in rows if usable(row["config"])]
    return taken, [row for row in rows if not usable(row["config"])]


def manager_of(row, **options):
    return ls.ExponentialUpdateLossScaleManager(
        **numbers_of(row["config"]), at_floor="clamp", **options
    )


def exponential(row):
    manager = manager_of(row)

    def step(gradient):
        operation = manager.update_loss_scale(tf.math.is_finite(gradient))
        return after(
            operation,
            lambda: (manager.get_loss_scale(), manager.good_steps, manager.bad_steps),
        )

    return step


def dynamic(row):
    loss_scale = ls.DynamicLossScale(**numbers_of(row["config"]))

    def step(gradient):
        operation, should_apply = loss_scale.update([gradient, None])
        return after(
            operation, lambda: (loss_scale(), loss_scale.good_steps, should_apply)
        )

    return step


EXPONENTIAL = "contrib_exponential.tf1.15.5.eager", "unit_exponential.tf1.15.5.eager"
DYNAMIC = "dynamic.tf1.15.5.eager", "unit_dynamic.tf1.15.5.eager"
OTHER_DYNAMIC = {
    "dynamic.tf2.3.4.eager": "dynamic.tf1.15.5.eager",
    "dynamic.tf1.15.5.graph": "dynamic.tf1.15.5.eager",
    "dynamic.tf2.3.4.function": "dynamic.tf1.15.5.eager",
    "unit_dynamic.tf2.3.4.function": "unit_dynamic.tf1.15.5.eager",
}
"""The same inputs recorded elsewhere."""


@pytest.mark.parametrize(
    ("file", "build"),
    [(file, exponential) for file in EXPONENTIAL]
    + [(file, dynamic) for file in (*DYNAMIC, *OTHER_DYNAMIC)],
)
def test_settings_that_could_not_work_are_refused_when_the_object_is_made(file, build):
    _, refused = split(file)
    for row in refused:
        with pytest.raises(SettingError, match="must be"):
            build(row)
    assert ROWS[file][1] == len(refused)


@every_mode
@pytest.mark.parametrize(
    ("file", "build", "fields"),
    [(file, exponential, ("scale", "good", "bad")) for file in EXPONENTIAL]
    + [(file, dynamic, ("scale", "good", "should_apply")) for file in DYNAMIC],
)
def test_a_class_replays_the_eager_original_in_every_mode(mode, file, build, fields):
    taken, _ = split(file)
    rows, limit = rows_for(mode, taken)
    check_rows(mode, rows, abreast(mode, rows, build, limit=limit), fields)
    assert ROWS[file][0] == len(taken)


@pytest.mark.parametrize("file", OTHER_DYNAMIC)
def test_other_recordings_are_the_same_but_for_the_division_of_graphs(file):
    """What the modes of ours are compared with above is what was recorded here."""
    first = {row["name"]: row for row in split(OTHER_DYNAMIC[file])[0]}
    taken, _ = split(file)
    assert first.keys() == {row["name"] for row in taken}
    different = []
    for row in taken:
        eager = first[row["name"]]
        for field in ("config", "finite", "good", "should_apply"):
            assert eager[field] == row[field]
        if eager["scale"] != row["scale"]:
            different.append(row)
            assert not math.log2(row["config"]["multiplier"]).is_integer()
            assert eager["scale"] == pytest.approx(row["scale"], rel=4e-6)
    assert ROWS[file][::2] == (len(taken) - len(different), len(different))


def fixed_manager(row):
    manager = ls.FixedLossScaleManager(row["config"]["value"])

    def step(gradient):
        operation = manager.update_loss_scale(tf.math.is_finite(gradient))
        return after(operation, lambda: (manager.get_loss_scale(),))

    return step


def fixed(row):
    loss_scale = ls.FixedLossScale(row["config"]["value"])

    def step(gradient):
        operation, should_apply = loss_scale.update([gradient])
        return after(operation, lambda: (loss_scale(), should_apply))

    return step


@every_mode
@pytest.mark.parametrize(
    ("file", "build", "fields"),
    [
        ("contrib_fixed.tf1.15.5.eager", fixed_manager, ("scale",)),
        ("fixed.tf1.15.5.eager", fixed, ("scale", "should_apply")),
        ("fixed.tf2.3.4.eager", fixed, ("scale", "should_apply")),
    ],
)
def test_fixed_scales_replay_the_original_in_every_mode(mode, file, build, fields):
    rows, _ = rows_for(mode, rows_of(file))
    check_rows(mode, rows, abreast(mode, rows, build), fields)
    assert ROWS[file][0] == len(rows_of(file))


def test_the_documented_manager_differs_only_where_the_floor_is_touched():
    """It does not apply an update that would end below 1; the original went to 1."""

    def held(row):
        manager = ls.ExponentialUpdateLossScaleManager(**row["config"])

        def step(gradient):
            manager.update_loss_scale(tf.math.is_finite(gradient))
            return (manager.get_loss_scale(),)

        return step

    taken, _ = split(EXPONENTIAL[0])
    rows = [row for row in taken if row["config"]["init_loss_scale"] >= 1][::6]
    found = abreast("function", rows, held)
    different = 0
    for row in rows:
        expected = recorded(row, "scale")
        pairs = list(zip(expected, found[row["name"]], strict=True))
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if first is not None:
            different += 1
            ((recorded_scale,), (held_scale,)) = first
            assert 1.0 == recorded_scale < held_scale
    assert (47, 15) == (len(rows), different)


# Replicas


@cache
def mirrored(count):
    # TensorFlow numbers the collectives of each strategy from the start, so that two
    # strategies of one process meet each other's; reducing on one device avoids it.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(count)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def replicated_gradients(row):
    flags = np.array(row["finite_per_replica"])
    return np.where(flags, 1.0, np.inf).astype(np.float32)


def replicated(row):
    strategy = mirrored(len(row["finite_per_replica"][0]))
    with strategy.scope():
        loss_scale = ls.DynamicLossScale(**row["config"])

    def own(values):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.gather(values, replica)

    def step(values):
        with strategy.scope():
            given = strategy.run(own, args=(values,))
            _, should_apply = loss_scale.update([given, None])
            scales = strategy.experimental_local_results(loss_scale.current_loss_scale)
            goods = strategy.experimental_local_results(loss_scale.good_steps)
            return tuple(map(tf.convert_to_tensor, (should_apply, *scales, *goods)))

    def restart(row):
        loss_scale.current_loss_scale.assign(row["config"]["initial_loss_scale"])
        loss_scale.good_steps.assign(0)

    return step, restart


def replicated_key(row):
    config = row["config"]
    count = len(row["finite_per_replica"][0])
    return count, config["increment_period"], config["multiplier"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_one_bad_replica_is_bad_for_all_as_recorded(compiled):
    files = "dynamic_replicated.tf1.15.5.eager", "dynamic_replicated.tf2.3.4.eager"
    part = slice(None) if compiled else slice(None, None, 3)
    found = in_turn(
        rows_of(files[0])[part],
        replicated,
        replicated_gradients,
        key=replicated_key,
        compiled=compiled,
    )
    for file in files:
        for row in rows_of(file)[part]:
            count = len(row["finite_per_replica"][0])
            expected = [
                (applied, *[scale] * count, *[good] * count)
                for applied, scale, good in recorded(
                    row, "should_apply", "scale", "good"
                )
            ]
            assert expected == found[row["name"]], row["name"]
        assert ROWS[file][0] == len(rows_of(file))


# Optimizers


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


# Arguments and inputs one by one


def value_of(tagged):
    """Return the Python value that a type-tagged input represents."""
    ((kind, value),) = tagged.items()
    if kind.startswith("np."):
        return getattr(np, kind[3:])(value)
    makers = {"int": int, "bool": bool, "str": str, "none": lambda _: None}
    return makers.get(kind, float)(value)


def gradients_of(tagged):
    """Return a structure of gradients; its tensors belong to the current graph."""
    if "tensor" in tagged:
        values = np.asarray(tagged["tensor"], dtype=object)
        numbers = np.vectorize(float, otypes=[float])(values) if values.size else values
        return tf.constant(numbers.astype(tagged["dtype"]))
    if "indexed_slices" in tagged:
        parts = tagged["indexed_slices"]
        shape = parts["dense_shape"]
        return tf.IndexedSlices(
            tf.constant([float(value) for value in parts["values"]]),
            tf.constant(parts["indices"]),
            None if shape is None else tf.constant(shape),
        )
    for name, kind in (("list", list), ("tuple", tuple)):
        if name in tagged:
            return kind(gradients_of(item) for item in tagged[name])
    if "dict" in tagged:
        return {key: gradients_of(item) for key, item in tagged["dict"].items()}
    return value_of(tagged)


MANAGER = "ExponentialUpdateLossScaleManager(init_loss_scale, 2)"
FLAG = "ExponentialUpdateLossScaleManager.update_loss_scale(raw python value)"
DYNAMIC_UPDATE = "DynamicLossScale(8, 1, 2).update(grads)"
MAKERS = {
    "FixedLossScaleManager(loss_scale)": ls.FixedLossScaleManager,
    MANAGER: lambda value: ls.ExponentialUpdateLossScaleManager(value, 2),
    "FixedLossScale(loss_scale_value)": ls.FixedLossScale,
    "DynamicLossScale(initial_loss_scale, 2, 2)": (
        lambda value: ls.DynamicLossScale(value, 2, 2)
    ),
    "DynamicLossScale(8, increment_period, 2)": (
        lambda value: ls.DynamicLossScale(8, value, 2)
    ),
    "DynamicLossScale(8, 2, multiplier)": (
        lambda value: ls.DynamicLossScale(8, 2, value)
    ),
    "get(identifier)": ls.get,
}


class Here:
    """Reads values eagerly, or in a graph of TensorFlow 1 by its session."""

    def __init__(self, session=None):
        self._session = session
        self._begun = False

    def __call__(self, tensor):
        if self._session is None:
            return np.asarray(tensor).item()
        self.begin()
        return self._session.run(tensor).item()

    def begin(self):
        """Initialize the variables, once."""
        if not self._begun:
            self._session.run(tf.compat.v1.global_variables_initializer())
            self._begun = True

    def do(self, operation):
        """Run an update, which has happened already if there is no operation."""
        assert (operation is None) == (self._session is None)
        if operation is not None:
            self.begin()
            self._session.run(operation)


def made(case, here):
    """Return what ours makes of a constructor's case, in the fields recorded."""
    result = MAKERS[case["kind"]](value_of(case["input"]))
    readers = {
        "scale": lambda: here(getattr(result, "get_loss_scale", result)()),
        "config": result.get_config if hasattr(result, "get_config") else None,
        "repr": lambda: None if result is None else repr(result),
        "type": lambda: type(result).__name__,
        "increment_period": lambda: result.increment_period,
        "multiplier": lambda: result.multiplier,
    }
    # A constructor is asked for whatever was recorded of it, an error for nothing.
    return {field: readers[field]() for field in case["result"] if field in readers}


def flagged(case, here):
    """Return what ours makes of a flag."""
    manager = ls.ExponentialUpdateLossScaleManager(8, 2, 1, 2, 0.5)
    here.do(manager.update_loss_scale(value_of(case["input"])))
    return {"good": here(manager.good_steps), "scale": here(manager.get_loss_scale())}


def updated(case, here):
    """Return what ours makes of a structure of gradients."""
    if case["kind"].startswith("Fixed"):
        operation, should_apply = ls.FixedLossScale(8).update(
            gradients_of(case["input"])
        )
        here.do(operation)
        assert should_apply is True
        return {"should_apply": True}
    loss_scale = ls.DynamicLossScale(8, 1, 2)
    operation, should_apply = loss_scale.update(gradients_of(case["input"]))
    applied = bool(here(should_apply))
    here.do(operation)
    return {"should_apply": applied, "scale_after": here(loss_scale())}


def outcome(case, here):
    """Return what ours does with a case, in the words of the recording."""
    act = updated
    if case["kind"] in MAKERS:
        act = made
    elif case["kind"] == FLAG:
        act = flagged
    try:
        return act(case, here)
    except LossScaleError as error:
        return {"raises": "TypeError" if isinstance(error, TypeError) else "ValueError"}


def outcome_in_graph(case):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return outcome(case, Here(session))


def plain(result):
    """Return a recorded result with its numbers as numbers."""
    if isinstance(result, dict):
        return {
            key: value.rpartition(".")[2] if key == "raises" else plain(value)
            for key, value in result.items()
        }
    return number(result) if result in ("NaN", "Infinity", "-Infinity") else result


def cannot_work(case):
    """Whether a setting is one that the originals let through to break later."""
    value = float(value_of(case["input"]))
    lowest = 1.0 if case["kind"].endswith("multiplier)") else 0.0
    return not lowest < value <= FLOAT32_MAX


ERROR_TYPE = "wrong in both, and ours says so by a ValueError or TypeError"
FLAG_TYPE = "a flag is one boolean or number in every mode; None and text are none"
NO_SHAPE = "a sparse gradient is checked by its values and needs no dense shape"
DIFFERENCES = {
    "cases.tf1.15.5.eager": {ERROR_TYPE: 2, FLAG_TYPE: 2, NO_SHAPE: 2},
    "cases.tf1.15.5.graph": {ERROR_TYPE: 1, FLAG_TYPE: 5, NO_SHAPE: 2},
    "cases.tf2.3.4.eager": {ERROR_TYPE: 2},
    "cases.tf2.21.0.eager": {ERROR_TYPE: 2},
}


def difference(case, ours):
    """Return what the difference is; one that is not listed is an error."""
    was_error, is_error = "raises" in case["result"], "raises" in ours
    value = None if case["kind"] == DYNAMIC_UPDATE else value_of(case["input"])
    if case["kind"] == FLAG and is_error == (value is None or isinstance(value, str)):
        return FLAG_TYPE
    if was_error and is_error:
        return ERROR_TYPE
    if case["kind"] == DYNAMIC_UPDATE and was_error:
        (slices,) = case["input"]["list"]
        assert slices["indexed_slices"]["dense_shape"] is None
        finite = [1.0] == slices["indexed_slices"]["values"]
        assert {
            "should_apply": finite,
            "scale_after": 16.0 if finite else 4.0,
        } == ours
        return NO_SHAPE
    message = f"{case} but ours: {ours}"
    raise AssertionError(message)


@pytest.mark.parametrize("file", DIFFERENCES)
def test_single_inputs_are_taken_as_by_the_original(file):
    same, refused, different = 0, 0, Counter()
    for case in rows_of(file):
        ours = outcome_in_graph(case)
        # In eager mode too, whichever was recorded.
        assert ours == outcome(case, Here())
        if ours == plain(case["result"]):
            same += 1
        elif (
            "raises" in ours
            and case["kind"] in MAKERS
            and ("raises" not in case["result"])
        ):
            assert cannot_work(case)
            refused += 1
        else:
            different[difference(case, ours)] += 1
    assert DIFFERENCES[file] == different
    assert ROWS[file] == (same, refused, different.total())
