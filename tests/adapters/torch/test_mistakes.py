"""What a user types by mistake: one error that says what to type instead."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch as ls  # noqa: E402
from lossscale import Dynamic  # noqa: E402
from lossscale.diagnostics import Recorder  # noqa: E402
from lossscale.errors import LossScaleError, StateError  # noqa: E402


def make_model():
    return torch.nn.Linear(2, 1)


def make_optimizer():
    return torch.optim.SGD(make_model().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: ls.GradScaler(1024.0), r"GradScaler\(init_scale=1024.0\)"),
        (lambda: ls.GradScaler("gpu"), "such as 'cuda' or 'cpu', got 'gpu'"),
        (lambda: ls.GradScaler(make_model()), r"GradScaler\(module=model\)"),
        (lambda: ls.GradScaler(None), "Got None"),
        (lambda: ls.GradScaler("cpu", Dynamic()), r"Write policy=Dynamic\("),
        (lambda: ls.GradScaler("cpu", policy=Dynamic), r"Write Dynamic\(\)"),
        (lambda: ls.GradScaler("cpu", policy="torch"), r"presets.get\('torch'\)"),
        (lambda: ls.GradScaler("cpu", on_step=Recorder), r"on_step=Recorder\("),
    ],
)
def test_a_scaler_that_cannot_be_made_says_what_to_write(make, advice):
    with pytest.raises(LossScaleError, match=advice):
        make()


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", torch.device("cpu")])
def test_every_kind_of_device_is_accepted(device):
    assert not ls.GradScaler(device, enabled=False).is_enabled()


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda s: s.step_all([make_optimizer()]), r"scaler.step_all\(\*optimizers\)"),
        (lambda s: s.step_scheduler(make_optimizer()), "got a SGD"),
        (lambda s: s.step_scheduler(None), "got a NoneType"),
        (lambda s: s.grad(torch.ones(()), make_model()), r"model.parameters\(\)"),
        (lambda s: s.load_state_dict({"scale": 8.0}), "has no 'growth_factor'"),
        (lambda s: s.load_state_dict(5), "The state dict is 5"),
    ],
)
def test_a_call_with_something_else_says_what_to_write(call, advice):
    scaler = ls.GradScaler("cpu", init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises((LossScaleError, KeyError), match=advice) as caught:
        call(scaler)
    assert "\n" not in str(caught.value)
    assert before == scaler.state_dict()


@pytest.mark.parametrize("convert", [ls.to_float16, ls.to_float32])
@pytest.mark.parametrize("model", ["model", 3, make_model().parameters()])
def test_only_a_module_is_converted(convert, model):
    with pytest.raises(LossScaleError, match=r"takes a torch.nn.Module"):
        convert(model)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ls.init(8.0),
        lambda: ls.init(Dynamic),
        lambda: ls.update(ls.init(Dynamic()), Dynamic(), None),
    ],
)
def test_what_is_no_policy_is_refused(call):
    with pytest.raises(LossScaleError, match=r"policy must be a policy"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda state: ls.scale(state, torch.ones(())),
        lambda state: ls.scale(torch.ones(()), 8.0),
        lambda state: ls.unscale(state, torch.ones(())),
        lambda state: ls.update(Dynamic(), torch.ones(()), None),
    ],
)
def test_arguments_in_the_wrong_order_are_refused(call):
    with pytest.raises(StateError, match=r"expected the ScaleState"):
        call(ls.init(Dynamic()))
