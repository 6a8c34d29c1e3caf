"""Models converted to float16, with parts that stay in float32."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError, SettingTypeError  # noqa: E402

NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "RMSNorm": lambda: nn.RMSNorm(4),
}


class Model(nn.Module):
    """Named parts, an embedding, a tuple and a keyword argument."""

    def __init__(self, norm):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = norm
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 2)
        self.seen = {}

    def forward(self, tokens, *, offset):
        hidden = self.norm(self.embedding(tokens)) + offset
        self.seen = {"hidden": hidden.dtype, "offset": offset.dtype}
        return self.head(self.body(hidden)), {"hidden": hidden}


def make_model(norm="LayerNorm"):
    torch.manual_seed(0)
    return Model(NORMS[norm]())


INPUTS = torch.tensor([0, 1, 4])
OFFSET = torch.ones(4)


@pytest.mark.parametrize("norm", NORMS)
def test_normalisation_stays_in_float32_and_the_rest_does_not(norm):
    model = make_model(norm)
    report = ls.to_float16(model)
    assert (("embedding", "body.0", "head"), ("norm",)) == report[:2]
    assert {"norm": "normalisation"} == report.reasons
    assert torch.float32 == model.norm.weight.dtype
    assert torch.float16 == model.head.weight.dtype
    logits, more = model(INPUTS, offset=OFFSET)
    assert torch.float16 == model.seen["hidden"] == model.seen["offset"]
    assert torch.float32 == logits.dtype == more["hidden"].dtype
    logits.sum().backward()
    assert all(param.grad.dtype == param.dtype for param in model.parameters())


def test_the_converted_model_computes_what_the_original_does():
    expected, _ = make_model()(INPUTS, offset=OFFSET)
    model = make_model()
    ls.to_float16(model)
    actual, _ = model(INPUTS, offset=OFFSET)
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)


def test_normalisation_is_converted_too_if_that_is_wanted():
    model = make_model()
    report = ls.to_float16(model, keep_float32=["head"], keep_normalisation=False)
    assert ("head",) == report.kept
    assert torch.float16 == model.norm.weight.dtype
    model(INPUTS, offset=OFFSET)


def test_named_parts_and_classes_stay_in_float32():
    model = make_model()
    report = ls.to_float16(model, keep_float32=["body", nn.Embedding])
    assert ("embedding", "norm", "body.0") == report.kept
    assert ("head",) == report.converted
    model(INPUTS, offset=OFFSET)


def test_the_conversion_is_reversed():
    model, original = make_model(), make_model()
    for module in (model, original):
        for param in module.parameters():
            param.data = param.data.half().float()
    ls.to_float16(model)
    ls.to_float32(model)
    assert {torch.float32} == {param.dtype for param in model.parameters()}
    expected, _ = original(INPUTS, offset=OFFSET)
    actual, _ = model(INPUTS, offset=OFFSET)
    assert torch.equal(expected, actual)
    ls.to_float16(model)  # and again


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],  # noqa: S301
    ids=["deepcopy", "pickle"],
)
def test_a_copy_keeps_its_casts(copied):
    model = make_model()
    ls.to_float16(model)
    expected, _ = model(INPUTS, offset=OFFSET)
    other = copied(model)
    actual, _ = other(INPUTS, offset=OFFSET)
    assert torch.equal(expected, actual)
    ls.to_float32(other)
    assert torch.float16 == model.head.weight.dtype


def test_tied_weights_stay_tied():
    model = make_model()
    model.head = nn.Linear(4, 5)
    model.head.weight = model.embedding.weight
    ls.to_float16(model)
    assert model.head.weight is model.embedding.weight
    assert torch.float16 == model.head.weight.dtype


def test_a_weight_that_would_need_both_dtypes_is_refused_and_nothing_changes():
    model = make_model()
    model.head = nn.Linear(4, 5)
    model.head.weight = model.embedding.weight
    with pytest.raises(SettingError, match=r"keep_float32=\['embedding', 'head'\]"):
        ls.to_float16(model, keep_float32=["head"])
    assert {torch.float32} == {param.dtype for param in model.parameters()}


def test_bad_names_are_refused_and_nothing_changes():
    model = make_model()
    with pytest.raises(SettingError, match=r"or buffer\. Did you mean 'head'\?"):
        ls.to_float16(model, keep_float32=["heads"])
    with pytest.raises(SettingTypeError, match="names or classes"):
        ls.to_float16(model, keep_float32=[3])
    assert {torch.float32} == {param.dtype for param in model.parameters()}


def test_a_second_conversion_is_refused():
    model = make_model()
    ls.to_float16(model)
    with pytest.raises(SettingError, match="to_float32"):
        ls.to_float16(model)


def test_gradients_and_buffers_are_converted():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("table", torch.ones(2))
    model(torch.randn(3, 4)).sum().backward()
    ls.to_float16(model)
    assert torch.float16 == model[0].weight.grad.dtype == model[0].table.dtype
    assert torch.float32 == model[1].running_mean.dtype
    assert torch.int64 == model[1].num_batches_tracked.dtype


def test_a_float16_model_gets_float32_normalisation_back():
    model = make_model().half()
    ls.to_float16(model)
    assert torch.float32 == model.norm.weight.dtype
    model(INPUTS, offset=OFFSET)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_that_is_converted_by_hand_afterwards_still_computes(dtype):
    model = make_model()
    ls.to_float16(model)
    expected, _ = model(INPUTS, offset=OFFSET)
    logits, _ = model.to(dtype)(INPUTS, offset=OFFSET)
    assert dtype == model.seen["hidden"]
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logits.float(), expected, rtol=3e-2, atol=3e-2)


def test_float64_is_left_alone_both_ways():
    model = make_model()
    model.table = nn.Parameter(torch.full((2,), 0.1, dtype=torch.float64))
    model.table.grad = torch.ones_like(model.table)
    report = ls.to_float16(model)
    assert "float64 is left alone" == report.reasons["table"]
    ls.to_float32(model)
    assert [0.1, 0.1] == model.table.tolist()
    assert torch.float64 == model.table.dtype == model.table.grad.dtype
    assert torch.float32 == model.head.weight.dtype


def test_a_float64_model_is_refused_and_nothing_changes():
    model = make_model().double()
    with pytest.raises(SettingError, match=r"Call model.float\(\) first"):
        ls.to_float16(model)
    assert {torch.float64} == {param.dtype for param in model.parameters()}


def test_what_is_not_floating_point_or_has_8_bits_is_left_alone():
    others = [torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn]
    model = make_model()
    for dtype in others:
        model.register_buffer(str(dtype)[6:], torch.ones(2).to(dtype))
    ls.to_float16(model)
    assert others == [getattr(model, str(dtype)[6:]).dtype for dtype in others]
    ls.to_float32(model)
    assert others == [getattr(model, str(dtype)[6:]).dtype for dtype in others]
