"""Recorded managers and loss scales, replayed bit for bit in every mode.

Every row of every file is replayed exactly, or refused when the object is made, or
different for a reason that is written here; `ROWS` says how many of each.
"""

import math

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

from helpers.tensorflow_replay import (  # noqa: E402
    abreast,
    after,
    number,
    recorded,
)
from helpers.tensorflow_rows import (  # noqa: E402
    ROWS,
    check_rows,
    every_mode,
    numbers_of,
    rows_for,
    rows_of,
)
from helpers.traces import DATA  # noqa: E402

import lossscale.tensorflow as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX  # noqa: E402
from lossscale.errors import (  # noqa: E402
    SettingError,
)


def test_every_row_of_every_file_is_accounted_for():
    files = {
        path.name.removesuffix(".jsonl.gz") for path in (DATA / "tensorflow").iterdir()
    }
    assert files == ROWS.keys()
    for file, counts in ROWS.items():
        assert len(rows_of(file)) == sum(counts), file


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
