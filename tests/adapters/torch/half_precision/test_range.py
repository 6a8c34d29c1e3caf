"""Parameters and buffers that float16 cannot hold."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import SettingError  # noqa: E402

LOWEST = torch.finfo(torch.float32).min
X = torch.ones(2, 4)


def make_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight.fill_(1e5)
        model[2].bias[0] = -2e5
    return model


def test_large_weights_are_refused_and_nothing_changes():
    model = make_model()
    with pytest.raises(SettingError) as caught:
        ls.to_float16(model)
    assert "parameter '2.weight' (100000), parameter '2.bias' (-200000)" in str(
        caught.value
    )
    assert {torch.float32} == {param.dtype for param in model.parameters()}
    assert not any(module._forward_hooks for module in model.modules())


def test_the_message_says_what_to_type():
    model = make_model()
    with pytest.raises(SettingError, match=r"with keep_float32=\['2'\]\."):
        ls.to_float16(model)
    ls.to_float16(model, keep_float32=["2"])
    assert {1e5} == set(model[2].weight.flatten().tolist())
    model(X)


@pytest.mark.parametrize(
    ("value", "held"),
    [(65504, True), (65519.996, True), (65520, False), (-65520, False)],
)
def test_what_rounds_to_the_largest_number_is_held(value, held):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    if held:
        ls.to_float16(model)
        assert model.weight.isfinite()
    else:
        with pytest.raises(SettingError, match="keep_float32=\\['weight'\\]"):
            ls.to_float16(model)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_are_no_reason_to_refuse(value):
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.tensor([0.0, value]))
    ls.to_float16(model)
    assert str(torch.tensor([0.0, value]).half()) == str(model.mask)


def test_a_large_number_next_to_an_infinity_is_found():
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.tensor([float("inf"), float("nan"), -1e5]))
    with pytest.raises(SettingError, match=r"buffer 'mask' \(-100000\)"):
        ls.to_float16(model)


class Masked(nn.Module):
    """A layer with parameters, and a mask that its scores are added to."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((2, 2), LOWEST).triu(1))

    def forward(self, x):
        query = self.query(x)
        return (query @ query.T + self.mask).softmax(-1) @ query


def test_a_buffer_of_a_layer_with_parameters_is_refused():
    model = nn.Sequential(Masked(), nn.Linear(4, 4))
    with pytest.raises(SettingError, match=r"'0.mask' .*keep_float32=\['0'\]"):
        ls.to_float16(model)
    assert {torch.float32} == {x.dtype for x in model.state_dict().values()}
    expected = model[0](X)
    ls.to_float16(model, keep_float32=["0"])
    assert torch.equal(expected.half(), model[0](X))
    model(X)


class Positions(nn.Module):
    """A table without parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(70000.0))

    def forward(self, x):
        return x + self.table[-1].sin()


def test_a_table_that_does_not_fit_stays_in_float32_and_is_reported():
    model = nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(4, 4))
    expected = model[1](X)
    report = ls.to_float16(model)
    assert (("0", "2"), ("1",)) == report[:2]
    reason = "float16 cannot hold 69999 of buffer '1.table'"
    assert {"1": reason} == report.reasons
    assert torch.equal(expected.half(), model[1](X))
    model(X)


def test_a_buffer_of_the_model_itself_can_be_kept_by_name():
    model = nn.Linear(4, 4)
    model.register_buffer("steps", torch.tensor(1e6))
    with pytest.raises(SettingError, match=r"keep_float32=\['steps'\]"):
        ls.to_float16(model)
    report = ls.to_float16(model, keep_float32=["steps"])
    assert {"steps": "named in keep_float32"} == report.reasons
    assert 1e6 == model.steps.item()


def test_both_owners_of_a_tied_weight_are_named():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].weight.data[0, 0] = 1e5
    with pytest.raises(SettingError, match=r"keep_float32=\['0', '1'\]"):
        ls.to_float16(model)
    ls.to_float16(model, keep_float32=["0", "1"])


def test_the_layer_of_a_parametrized_weight_is_named():
    model = nn.Sequential(nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    weight = model[0].parametrizations.weight
    weight.original0.data.fill_(1e5)
    with pytest.raises(SettingError, match=r"keep_float32=\['0'\]"):
        ls.to_float16(model)


def test_a_few_examples_and_all_names_are_in_the_message():
    model = nn.Sequential(*[Masked() for _ in range(5)])
    with pytest.raises(SettingError) as caught:
        ls.to_float16(model)
    assert "'2.mask' (-3.4028235e+38) and 2 more" in str(caught.value)
    assert "keep_float32=['0', '1', '2', '3', '4']" in str(caught.value)


def test_parameters_without_numbers_are_not_read():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4))
    ls.to_float16(lazy)
    assert torch.float32 == lazy(X).dtype
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    ls.to_float16(model)
    assert torch.float16 == model.weight.dtype
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.ones(0))
    ls.to_float16(empty)
