"""A scaler describes its run to the recorder that is its `on_step`."""

import pickle

import torch

from lossscale import Dynamic
from lossscale.diagnostics import Recorder, read_run
from lossscale.torch import GradScaler


def train(scaler, model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if index == 1:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.flush()


def layers(dtype=torch.float32):
    layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers).to(dtype)


def test_the_header_has_policy_device_formats_and_names(tmp_path):
    model, path = layers(), tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        scaler = GradScaler(
            "cpu", growth_interval=50, module=model, on_step=recorder, init_scale=8.0
        )
        train(scaler, model)
    run = read_run(path)
    names = [name for name, _ in model.named_parameters()]
    assert names == run.header["names"] == run.names
    assert ["float32"] * 4 == run.header["dtypes"]
    assert run.header["device"].startswith("cpu")
    policy = run.header["policy"]
    found = policy["kind"], policy["growth_interval"], policy["init_scale"]
    assert ("dynamic", 50, 8.0) == found
    assert "0.bias" == list(run.records())[1].nearest_finite


def test_a_frozen_parameter_is_no_tensor_of_the_run(tmp_path):
    model, path = layers(), tmp_path / "run.jsonl"
    model[0].bias.requires_grad_(False)
    with Recorder(path, writers=()) as recorder:
        train(GradScaler("cpu", module=model, on_step=recorder), model)
    run = read_run(path)
    assert ["0.weight", "1.weight", "1.bias"] == run.header["names"]
    assert "1.weight" == list(run.records())[1].nearest_finite


def test_without_names_no_order_is_claimed(tmp_path):
    """The order of an optimizer's groups need not be the model's."""
    model, path = layers(), tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        train(GradScaler("cpu", on_step=recorder), model)
    run = read_run(path)
    assert ([], 4) == (run.header["names"], len(run.header["dtypes"]))
    assert list(run.records())[1].nearest_finite is None


def test_a_policy_of_ones_own_is_described(tmp_path):
    model, path = layers(torch.float64), tmp_path / "run.jsonl"
    policy = Dynamic(init_scale=4.0, growth_interval=3)
    with Recorder(path, writers=()) as recorder:
        scaler = GradScaler("cpu", policy=policy, module=model, on_step=recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(1, 4).double()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    header = read_run(path).header
    assert (3, "float64") == (header["policy"]["growth_interval"], header["dtypes"][0])


class Listener:
    """Counts how often it is described to."""

    def __init__(self):
        self.described = self.reports = 0

    def __call__(self, report):
        self.reports += 1

    def describe(self, **known):
        assert {"policy", "device", "names", "dtypes"} == known.keys()
        assert not self.reports
        self.described += 1


def test_a_run_is_described_once_and_before_its_first_report():
    listener, model = Listener(), layers()
    train(GradScaler("cpu", on_step=listener), model, steps=3)
    assert (1, 3) == (listener.described, listener.reports)


def test_a_scaler_with_a_recorder_can_be_pickled(tmp_path):
    model = layers()
    with Recorder(tmp_path / "run.jsonl", writers=()) as recorder:
        for scaler in (GradScaler("cpu", on_step=recorder),):
            copy = pickle.loads(pickle.dumps(scaler))  # noqa: S301
            train(copy, model)
    assert 0 == read_run(tmp_path / "run.jsonl").rows


def test_a_recorder_can_be_attached_later(tmp_path):
    model, path = layers(), tmp_path / "run.jsonl"
    scaler = GradScaler("cpu", module=model)
    train(scaler, model, steps=1)
    with Recorder(path, writers=(), statistics_every=2) as recorder:
        scaler.attach(recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.last_step.statistics is not None)
    # Steps 2, 3 and 4 of the scaler: the recorder wants every other one, from 1 on.
    assert [False, True, False] == found
    assert 2000 == read_run(path).header["policy"]["growth_interval"]
