"""Explanations as data: what follows from what was seen, and the sentences."""

import json
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from lossscale import Explanation, Finding
from lossscale.core.explanation import Trial
from lossscale.core.explanation.causes import find_causes
from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.numbers import format_number
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


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (65536.0, "65,536"),
        (1.0, "1"),
        (0.0625, "0.0625"),
        (2.0**40, "2^40"),
        (2.0**-14, "2^-14"),
        (131008.5, "131,008"),
        (1.5e12, "1.5e+12"),
        (0.0, "0"),
    ],
)
def test_numbers_are_written_as_people_read_them(number, text):
    assert text == format_number(number)


def test_a_number_just_beyond_the_format_is_not_one_times_it():
    text = str(replace(FOUND, magnitude=65536.0))
    assert "65,536, just above the largest float16 number, 65,504" in text
    assert "1.0 times" not in text


def test_a_size_that_is_infinite_is_not_written():
    text = str(replace(FOUND, magnitude=float("inf")))
    assert "beyond the largest number of its format and of float64 (float16)" in text


def test_after_failed_trials_the_gradients_are_the_subject():
    seen = replace(SEEN, trials=(Trial(64.0, False), Trial(2.0**-14, False)))
    assert "Lower scales did not help: 64; 2^-14 were tried." in str(seen)
    assert seen.advice.startswith("The gradients do not fit at any scale")


def test_a_gradient_that_was_changed_afterwards_is_described_with_the_change():
    found = replace(FOUND, origin="changed afterwards", operation="div")
    assert str(found).endswith("by a hook or by the step's own code (div, train.py:12)")


def test_micro_batches_and_losses_are_counted_by_name():
    assert "in micro-batch 2 (counted from 0)" in str(replace(FOUND, micro_batch=2))
    assert "for loss 1 (counted from 0)" in str(replace(FOUND, loss=1))


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"operation": "layer_norm"}, "Set the norm's eps above 0."),
        ({"module_type": "BatchNormalization"}, "Set the norm's eps above 0."),
        ({"operation": "nll_loss_forward"}, "max(count, 1)"),
        ({"lost_epsilon": 1e-8}, "The 1e-8 that is added against this is 0 in float16"),
        ({"lost_epsilon": 0.0}, "The number that is added against this is 0"),
        ({}, "Add a small number to the divisor"),
    ],
)
def test_the_advice_against_a_division_depends_on_the_operation(changes, advice):
    found = replace(FOUND, origin="0 / 0", direction="forward", **changes)
    assert advice in replace(SEEN, loss_finite=False, first=found).advice


def test_without_a_model_the_line_is_named():
    changes = {"role": "intermediate", "tensor": None, "module_type": None}
    found = replace(FOUND, **changes, module=None, has_model=False)
    assert "an intermediate result of the code at train.py:12 in the" in str(found)
    assert str(found).count("train.py:12") == 1
    outside = replace(found, has_model=True)
    assert "code outside the model" in str(outside)


@dataclass(eq=False)
class Result:
    """A result of an operation, as the rule reads it."""

    index: int
    operation: str | None
    origin: str | None
    kind: Kind
    bad_parents: tuple = ()


MASK = Kind(nan=False, plus=False, minus=True)
NAN = Kind(nan=True, plus=False, minus=False)
READERS = {
    # what makes a NaN of -inf: its name, what it did, and whether that was a mask
    "softmax": ("softmax", "row of -inf", True),
    "max and difference": ("sub", "row of -inf", True),
    "sum": ("add", "inf - inf", True),
    "choice": ("where", "inf - inf", True),
    "attention": ("scaled_dot_product_flash_attention", "inf - inf", True),
    "matrix product": ("mm", "inf * 0", False),
    "convolution": ("conv_general_dilated", "inf - inf", False),
    "norm": ("layer_norm", "inf - inf", False),
    "product": ("mul", "inf * 0", False),
    "mean and difference": ("sub", "inf - inf", False),
}


@pytest.mark.parametrize("origin", ["batch", "buffer", "constant"])
@pytest.mark.parametrize("name", READERS)
def test_minus_inf_is_a_mask_if_sums_and_softmaxes_read_it(name, origin):
    operation, what, is_mask = READERS[name]
    given = Result(0, None, origin, MASK)
    cast = Result(1, "to", None, MASK, (given,))
    made = Result(2, operation, what, NAN, (cast,))
    first, first_nan = find_causes([Result(3, "mean", None, NAN, (made,))])
    assert ((made, None) if is_mask else (given, made)) == (first, first_nan)


def test_what_is_not_all_minus_inf_is_no_mask():
    for kind in (NAN, Kind(nan=False, plus=True, minus=True)):
        given = Result(0, None, "batch", kind)
        made = Result(1, "softmax", "inf - inf", NAN, (given,))
        assert given is find_causes([made])[0]


def test_a_mask_is_named_if_there_is_nothing_else():
    given = Result(0, None, "constant", MASK)
    assert (given, None) == find_causes([Result(1, "sum", None, MASK, (given,))])
