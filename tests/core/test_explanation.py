"""Explanations as data: what follows from what was seen, and the sentences."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from lossscale import Explanation, Finding
from lossscale.core.explanation import Trial
from lossscale.core.explanation.origins import GIVEN, ORIGINS, WORDS

FOUND = Finding(
    direction="backward",
    role="parameter gradient",
    origin="overflow",
    tensor="head.weight",
    module="head",
    module_type="Linear",
    operation="mm",
    node="AddmmBackward0",
    dtype="float16",
    magnitude=131008.0,
    largest=65504.0,
    line="train.py:12",
)
SEEN = Explanation(scale=1024.0, finite=False, loss_finite=True, first=FOUND)


def test_every_origin_has_words():
    assert set(ORIGINS) == set(WORDS)
    assert set(ORIGINS) >= GIVEN


def test_the_helping_scale_is_the_largest_one_that_was_finite():
    trials = Trial(64.0, False), Trial(4.0, True), Trial(16.0, True)
    seen = replace(SEEN, trials=trials)
    assert seen.helping_scale == 16.0
    assert seen.lower_scale_helps is True
    assert "finite gradients at a scale of 16, and not at 64:" in str(seen)
    assert seen.advice == "Lower the scale to 16 or below."


def test_without_a_trial_it_is_not_known_whether_a_lower_scale_helps():
    assert SEEN.lower_scale_helps is None
    assert "ower scale" not in str(SEEN)
    assert SEEN.advice == "The scale is probably too high."


def test_no_scale_helps_a_loss_that_is_not_finite():
    first = replace(FOUND, direction="forward", role="output")
    seen = replace(SEEN, loss_finite=False, first=first)
    assert seen.lower_scale_helps is False
    assert "No scale helps: the loss is not finite even unscaled." in str(seen)


def test_trials_decide_about_a_loss_that_is_made_of_gradients():
    seen = replace(SEEN, loss_finite=False)
    assert seen.lower_scale_helps is None
    assert "No scale" not in str(seen)
    assert replace(seen, trials=(Trial(4.0, True),)).lower_scale_helps is True
    assert replace(seen, trials=(Trial(4.0, False),)).lower_scale_helps is False


def test_a_finite_batch_asks_for_nothing():
    seen = Explanation(scale=8.0, finite=True, loss_finite=True)
    assert seen.lower_scale_helps is None
    assert seen.advice == ""


def test_a_finding_says_module_pass_tensor_operation_size_and_line():
    for part in (
        "the gradient of head.weight",
        "(Linear)",
        "backward pass",
        "mm (of AddmmBackward0)",
        "2.0 times the largest float16 number",
        "train.py:12",
    ):
        assert part in str(FOUND)


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_origin_is_a_sentence(origin):
    text = str(replace(SEEN, first=replace(FOUND, origin=origin)))
    assert WORDS[origin] in text
    assert "None" not in text


def test_ranks_are_listed_in_order():
    first = replace(SEEN, rank=1)
    seen = replace(first, others=(replace(SEEN, rank=2), replace(SEEN, rank=0)))
    lines = str(seen).splitlines()
    assert [line.split(":")[0] for line in lines] == ["Rank 0", "Rank 1", "Rank 2"]


def test_the_data_survives_json():
    found = replace(FOUND, magnitude=float("inf"))
    seen = replace(SEEN, first=found, trials=(Trial(64.0, True),))
    data = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert data["first"]["magnitude"] is None
    assert data["first"]["module"] == "head"
    assert data["trials"] == [{"scale": 64.0, "finite": True}]
    assert data["helping_scale"] == 64.0
    assert data["text"] == str(seen)


def test_the_data_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SEEN.scale = 1.0
