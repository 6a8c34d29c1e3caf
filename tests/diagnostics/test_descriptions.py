"""What a framework says of a run when it takes its first step."""

import json

import pytest

from lossscale import Dynamic
from lossscale.diagnostics import Recorder, build_report, explain_run, read_run
from lossscale.diagnostics.records.description import merge_description
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.diagnostics.records.run_file import rollup_path
from lossscale.diagnostics.report.tensors import dtype_of

POLICY = Dynamic(growth_interval=7)
KNOWN = {
    "policy": POLICY,
    "device": "H200",
    "names": ["a", "b"],
    "dtypes": {"a": "float16", "b": "float32"},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def header_of(path):
    header = read_run(path).header
    policy = header["policy"] and header["policy"]["growth_interval"]
    return policy, header["device"], header["names"], header["dtypes"]


def record(path, known=KNOWN, **settings):
    with Recorder(path, writers=(), **settings) as recorder:
        recorder.describe(**known)
        recorder.record(scale=8.0, applied=False, nonfinite={"a": "inf"})


def test_what_the_header_leaves_open_is_filled_in(path):
    record(path)
    assert (7, "H200", ["a", "b"], ["float16", "float32"]) == header_of(path)
    assert json.loads(path.read_text().splitlines()[0])["policy"] is None
    (step,) = read_run(path).records()
    assert "b" == step.nearest_finite


def test_it_is_read_from_the_roll_up_and_without_it(path):
    record(path)
    with_rollup = header_of(path)
    rollup_path(path).unlink()
    assert with_rollup == header_of(path)
    with Recorder(path, writers=()):  # writes the roll-up again
        pass
    assert with_rollup == header_of(path)
    assert ["a", "b"] == read_run(path).names


def test_what_was_given_stays(path):
    given = {"policy": Dynamic(growth_interval=9), "device": "mine", "names": ["b"]}
    record(path, **given)
    # The formats are those of the run's names: b, then a.
    assert (9, "mine", ["b"], ["float32", "float16"]) == header_of(path)


def test_a_resumed_run_that_is_described_again_is_the_same(path):
    record(path)
    record(path)
    assert (7, "H200", ["a", "b"], ["float16", "float32"]) == header_of(path)
    assert 1 == path.read_text().count('"described"')
    assert ["b", "b"] == [step.nearest_finite for step in read_run(path).records()]


def test_a_run_that_is_watched_is_described(path):
    with Recorder(path, writers=(), flush_seconds=0) as recorder:
        follower = RunFollower(path)
        recorder.describe(**KNOWN)
        recorder.flush()
        follower.update()
    assert 7 == follower.header["policy"]["growth_interval"]


def test_the_alarms_follow_the_policy(path):
    """At a floor of 64 the third overflow in a row is an alarm."""
    raised = []
    with Recorder(path, writers=(), on_alarm=raised.append) as recorder:
        recorder.describe(policy=Dynamic(init_scale=64.0, min_scale=64.0))
        for _ in range(4):
            recorder.record(scale=64.0, applied=False)
    assert ["floor"] == [alarm.kind for alarm in raised]


def test_reports_and_explanations_read_the_description(path):
    record(path)
    (run,) = json.loads(build_report([path], format="json"))["runs"]
    assert ("H200", 7) == (run["device"], run["policy"]["growth_interval"])
    assert "b" == explain_run(path).nearest_finite


def test_without_a_description_the_device_is_the_processor(path):
    with Recorder(path, writers=()):
        pass
    header = read_run(path).header
    assert (None, header["processor"]) == (header["device"], read_run(path).device)


def test_a_tensor_is_limited_by_the_format_that_its_gradient_went_through(path):
    record(path)
    run = read_run(path)
    assert ["float16", "float32"] == [dtype_of(run, i) for i in range(2)]


def test_float32_weights_under_autocast_are_limited_by_the_runs_format(path):
    record(path, KNOWN | {"dtypes": {"a": "float32", "b": "float32"}})
    run = read_run(path)
    assert ["float16", "float16"] == [dtype_of(run, i) for i in range(2)]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"policy": 3, "device": {}, "dtypes": [{}], "ordered": "2"},
        {"dtypes": ["float16", "int4"], "ordered": -1},
    ],
)
def test_a_malformed_description_is_left_out(value):
    header = {"policy": None, "device": None, "dtypes": None, "names": []}
    before = dict(header)
    merge_description(header, value, ["a"])
    assert before == header
