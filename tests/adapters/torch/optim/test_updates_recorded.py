"""Updates of the weights from the scaler's reports to a record and its report."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers import updates  # noqa: E402
from helpers.optimizers import ONE_OF_EACH, make_params, set_grads  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lossscale.diagnostics import Recorder, build_report, read_run  # noqa: E402
from lossscale.torch import GradScaler, optim  # noqa: E402

EACH = pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)


def make(kind=optim.SGD, on_step=None, dtype=torch.float32, **settings):
    """Return a weight, its optimizer and a scaler."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = kind([weight], **({"lr": 0.5} | settings))
    scaler = GradScaler("cpu", init_scale=8.0, on_step=on_step, names=[("w", weight)])
    return weight, optimizer, scaler


def step(scaler, weight, optimizer, gradient=1.0, take=None):
    """Take a step whose unscaled gradient is one number."""
    scaler.scale(torch.ones(()))
    weight.grad = torch.full_like(weight, gradient * scaler.get_scale())
    if take is not None:
        take(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


@EACH
def test_a_scaler_reports_what_the_optimizer_measures(setting):
    updates.check_with_scaler("cpu", setting)


TAKES = {
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "accumulate": lambda scaler, optimizer: scaler.accumulate(optimizer),
}


@pytest.mark.parametrize("name", TAKES)
def test_gradients_that_were_taken_before_the_step_are_measured_as_applied(name):
    asked = updates.Asked(1)
    weight, optimizer, scaler = make(on_step=asked)
    step(scaler, weight, optimizer, take=TAKES[name])
    clipped = 0.5 if name == "clip" else 1.0
    assert [0.5 * clipped] == pytest.approx(asked.found[1].ratio)
    assert [1 - 0.5 * clipped] * 4 == pytest.approx(weight.tolist())


def test_a_closure_that_succeeds_is_measured_and_one_that_overflows_is_not():
    asked = updates.Asked(1, 2)
    weight, optimizer, scaler = make(on_step=asked)
    for gradient in (1.0, torch.inf):

        def closure(gradient=gradient):
            loss = scaler.scale(torch.ones(()))
            weight.grad = torch.full_like(weight, gradient * 8.0)
            return loss

        scaler.step(optimizer, closure=closure)
        scaler.update()
    assert [0.5] == asked.found[1].ratio
    assert asked.found[2] is None
    assert optimizer.take_measurement() is not None  # that of the first step


def test_the_updates_of_two_optimizers_are_in_one_report():
    asked = updates.Asked(1)
    first, one, scaler = make(on_step=asked)
    second = torch.nn.Parameter(torch.ones(2))
    two = optim.AdamW([("v", second)], lr=0.5, weight_decay=0.0)
    for param in (first, second):
        param.grad = torch.full_like(param, 8.0)
    scaler.scale(torch.ones(()))
    for optimizer in (one, two):
        scaler.step(optimizer)
    scaler.update()
    found = asked.found[1]
    assert (["w", "v"], [0.5, 0.5]) == (found.names, pytest.approx(found.ratio))


def test_torchs_own_optimizers_are_not_measured():
    asked = updates.Asked(1)
    weight, optimizer, scaler = make(torch.optim.SGD, asked)
    step(scaler, weight, optimizer)
    assert {1: None} == asked.found


def test_a_step_that_raises_leaves_no_request():
    asked = updates.Asked(1)
    weight, optimizer, scaler = make(on_step=asked)

    def fail(*_arguments):
        message = "no"
        raise ValueError(message)

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        step(scaler, weight, optimizer)
    hook.remove()
    assert optimizer._requested is None
    scaler.step(optimizer)
    scaler.update()
    assert ["w"] == asked.found[1].names


class Counted(TorchDispatchMode):
    """Counts the operators of a piece of code."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_the_steps_between_have_no_operator_more(kind):
    found = []
    for on_step in (None, updates.Asked(1)):
        weight, optimizer, scaler = make(kind, on_step)
        step(scaler, weight, optimizer)
        with Counted() as counted:
            step(scaler, weight, optimizer)
        found.append(counted.names)
    assert found[0] == found[1]


def test_measuring_keeps_neither_weights_nor_optimizer_alive():
    import weakref

    asked = updates.Asked(1)
    weight, optimizer, scaler = make(on_step=asked)
    step(scaler, weight, optimizer)
    measured = optimizer.take_measurement()
    references = [weakref.ref(weight), weakref.ref(optimizer)]
    del weight, optimizer
    assert [None, None] == [reference() for reference in references]
    assert measured.is_ready()


@pytest.mark.parametrize("masters", [False, True])
def test_a_training_in_float16_is_recorded_and_reported(tmp_path, masters):
    """A rate so low that float16 weights cannot hold its updates."""
    path = tmp_path / "run.jsonl"
    torch.manual_seed(0)
    params = dict(zip("ab", make_params(torch.float16, [(8, 8), (8,)]), strict=True))
    optimizer = optim.AdamW(params.values(), lr=1e-6, master_weights=masters)
    with Recorder(path, names=list(params), statistics_every=2) as recorder:
        scaler = GradScaler(
            "cpu", init_scale=8.0, on_step=recorder, names=params.items()
        )
        for number in range(5):
            scaler.scale(torch.ones(()))
            set_grads(params.values(), number, 8.0)
            if number == 2:
                params["a"].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    run = read_run(path)
    samples = list(run.statistics(run.start, run.end - run.start))
    assert [1, 3, 5] == [sample.step for sample in samples]
    assert samples[1].updates is None  # it was skipped
    for row in samples[2].updates:
        assert ("float16", masters) == (row.dtype, row.has_master)
        assert 1e-8 < row.ratio < 1e-5
        assert row.lost > 0.5
    summary = json.loads(build_report([path], format="json"))["runs"][0]
    assert 5 == summary["updates"]["step"]
    advised = [text for text in summary["advice"] if "master_weights=True" in text]
    assert (0 if masters else 1) == len(advised)
    for kind in ("html", "md"):
        assert "Updates of the weights" in build_report([path], format=kind)
