"""`lossscale.testing.torch.inject`: what it writes, when, and what it refuses."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    ContextError,
    GradientError,
    SettingError,
    SettingTypeError,
)
from lossscale.testing.torch import inject  # noqa: E402


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def differentiate(model):
    """Return every gradient of a fresh backward pass, and the loss."""
    model.zero_grad()
    loss = model(torch.ones(1, 3)).sum()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, loss


@pytest.mark.parametrize("kind", ["inf", "-inf", "nan", "huge", 7.5])
def test_one_number_of_one_gradient_is_written_at_its_steps(model, kind):
    clean, _ = differentiate(model)
    number = torch.finfo(torch.float32).max if kind == "huge" else float(kind)
    expected = {name: grad.clone() for name, grad in clean.items()}
    expected["0.weight"].view(-1)[5] = number
    with inject(model, "0.weight", kind, steps=[2, 4], element=5) as injection:
        seen = [differentiate(model)[0] for _ in range(5)]
    for step, grads in enumerate(seen, 1):
        for name, grad in grads.items():
            wanted = expected if step in (2, 4) else clean
            torch.testing.assert_close(
                grad, wanted[name], rtol=0, atol=0, equal_nan=True
            )
    assert (2, 4) == injection.written
    assert 5 == injection.taken
    # The hook is gone with the context.
    assert torch.equal(clean["0.weight"], differentiate(model)[0]["0.weight"])


def test_huge_is_the_largest_number_of_the_gradient_s_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = torch.nn.Linear(2, 1).to(dtype)
        with inject(model, "bias", "huge", steps=1):
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        assert torch.finfo(dtype).max == model.bias.grad.item()


def test_a_module_s_output_is_written_and_its_gradient_passes(model):
    clean, loss = differentiate(model)
    with inject(model, "0", "inf", steps=1, where="output", element=2):
        grads, broken = differentiate(model)
    assert math.isfinite(loss.item())
    assert not math.isfinite(broken.item())
    assert torch.equal(clean["0.weight"], grads["0.weight"])
    assert [False, False, True, False] == (~grads["1.weight"].isfinite())[0].tolist()


def test_the_first_float_of_a_structure_is_written():
    module = torch.nn.LSTM(2, 3)
    with inject(module, "", "nan", steps=1, where="output", element=None):
        output, (hidden, _) = module(torch.ones(1, 1, 2))
    assert output.isnan().all()
    assert hidden.isfinite().all()


def test_an_optimizer_s_parameters_have_its_names(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inject(optimizer, "param_groups[0]['params'][3]", "nan", steps=1):
        grads, _ = differentiate(model)
    assert ["1.bias"] == [n for n, grad in grads.items() if grad.isnan().any()]
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with inject(named, "0.bias", "inf", steps=1):
        grads, _ = differentiate(model)
    assert ["0.bias"] == [n for n, grad in grads.items() if grad.isinf().any()]


def test_a_sparse_gradient_stays_sparse():
    table = torch.nn.Embedding(5, 2, sparse=True)
    with inject(table, "weight", "inf", steps=1, element=3):
        table(torch.tensor([1, 4])).sum().backward()
    assert table.weight.grad.is_sparse
    dense = table.weight.grad.to_dense()
    assert [(4, 1)] == [tuple(place) for place in dense.isinf().nonzero().tolist()]


def test_our_scaler_skips_the_step_and_names_the_tensor(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ls.GradScaler("cpu", module=model)
    said = []
    with inject(model, "1.weight", "inf", steps=2):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            said.append((scaler.last_step.applied, scaler.last_step.nonfinite_names))
    assert [(True, []), (False, ["1.weight"]), (True, [])] == [
        (applied, list(names)) for applied, names in said
    ]


def test_a_fault_that_was_never_written_is_an_error(model):
    with (
        pytest.raises(ContextError, match=r"at steps \[3\], and there were 1"),
        inject(model, "0.bias", "inf", steps=[1, 3]),
    ):
        differentiate(model)


def test_an_error_in_the_context_is_not_hidden(model):
    with pytest.raises(KeyError), inject(model, "0.bias", "inf", steps=9):
        raise KeyError
    assert differentiate(model)[0]["0.bias"].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"name": "0.wieght"}, SettingError, "Did you mean '0.weight'"),
        ({"name": 3}, SettingTypeError, "must be a string"),
        ({"where": "output", "name": "2"}, SettingError, "among the modules"),
        ({"where": "input"}, SettingError, "'gradient' or 'output'"),
        ({"value": "Inf"}, SettingError, "Did you mean 'inf'"),
        ({"value": 1e39}, SettingError, "largest number is 3.40282e"),
        ({"value": None}, SettingTypeError, "NoneType"),
        ({"steps": 0}, SettingError, "first step is 1"),
        ({"steps": []}, SettingError, "first step is 1"),
        ({"steps": "3"}, SettingTypeError, "first step is 1"),
        ({"steps": [1.5]}, SettingTypeError, "first step is 1"),
        ({"element": 12}, SettingError, "has 12 numbers"),
        ({"element": -1}, SettingError, "from 0"),
        ({"element": True}, SettingTypeError, "from 0"),
        ({"target": [1]}, SettingTypeError, "torch.nn.Module or"),
    ],
)
def test_what_cannot_be_injected_is_one_error_before_anything_is_hooked(
    model, change, error, words
):
    settings = {"target": model, "name": "0.weight", "value": "inf", "steps": 1}
    given = settings | change
    with pytest.raises(error, match=words):
        inject(given.pop("target"), given.pop("name"), given.pop("value"), **given)
    assert differentiate(model)[0]["0.weight"].isfinite().all()


def test_what_is_found_out_in_a_step_is_one_error(model):
    with (
        pytest.raises(SettingError, match="has 4 numbers"),
        inject(model, "0", "inf", steps=1, where="output", element=4),
    ):
        differentiate(model)

    class Silent(torch.nn.Module):
        def forward(self, x):
            return int(x)

    module = Silent()
    with (
        pytest.raises(GradientError, match="no floating-point tensor"),
        inject(module, "", "inf", steps=1, where="output"),
    ):
        module(1)
    integers = torch.nn.Module()
    integers.index = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), False)
    with pytest.raises(SettingTypeError, match="int64"):
        inject(integers, "index", "inf", steps=1)


def test_a_context_is_not_entered_twice(model):
    injection = inject(model, "0.bias", "inf", steps=1)
    with injection:
        with pytest.raises(ContextError, match="already"):
            injection.__enter__()
        differentiate(model)
