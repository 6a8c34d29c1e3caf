"""A `Recorder` as the scaler's `on_step`: what it records, and what it costs."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lossscale.diagnostics import Recorder, build_report, read_run  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402

INF = float("inf")
STEPS = 8
BAD = (3, 6)


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    )


def train(model, scaler, *, steps=STEPS, note=None, bad=BAD):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(steps + 1, 2, 4, generator=torch.Generator().manual_seed(1))
    for step in range(1, steps + 1):
        loss = model(rows[step]).square().mean()
        scaler.scale(loss).backward()
        if step in bad:
            model[1].weight.grad[0, 0] = INF
        scaler.clip_grad_norm_(optimizer, max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if note is not None:
            note(scaler.last_step.index, loss=float(loss.detach()), lr=0.01)
    scaler.flush()


def test_every_step_is_recorded_with_norm_clip_names_and_loss(tmp_path):
    model, path = model_of(), tmp_path / "run.jsonl"
    names = [name for name, _ in model.named_parameters()]
    with Recorder(path, names=names) as recorder:
        scaler = GradScaler(
            "cpu", init_scale=1024.0, module=model, measure_amax=True, on_step=recorder
        )
        train(model, scaler, note=recorder.note)
    found = list(read_run(path).records())
    assert [step not in BAD for step in range(1, STEPS + 1)] == [
        r.applied for r in found
    ]
    assert [1024.0] * 3 + [512.0] * 3 + [256.0] * 2 == [r.scale for r in found]
    assert all(
        r.norm > 0 and 0 < r.clip <= 1 and r.amax > 0 for r in found if r.applied
    )
    assert all(r.loss is not None and r.lr == pytest.approx(0.01) for r in found)
    skipped = found[2]
    assert ("inf", (("1.weight", "inf"),)) == (skipped.cause, skipped.nonfinite)
    assert "1.bias" == skipped.nearest_finite
    words = "At step 3 the backward pass had 1.bias finite, and 1.weight no longer"
    assert words in build_report([path], format="md")


class Counted(TorchDispatchMode):
    """Counts the operators of a piece of code."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators(scaler):
    model = model_of()
    with warnings.catch_warnings(), Counted() as counted:
        warnings.simplefilter("ignore")
        train(model, scaler, steps=4, bad=())
    return counted.names


def test_recording_without_statistics_adds_no_operator_and_no_read(tmp_path):
    plain = operators(GradScaler("cpu"))
    with Recorder(tmp_path / "run.jsonl", statistics_every=0) as recorder:
        recorded = operators(GradScaler("cpu", on_step=recorder))
    assert plain == recorded
    assert 4 == read_run(tmp_path / "run.jsonl").rows


def test_statistics_that_a_report_brings_are_recorded(tmp_path):
    from types import SimpleNamespace

    from lossscale.diagnostics import TensorStatistics

    statistics = TensorStatistics(
        names=["w"],
        sizes=torch.tensor([4]),
        amax=torch.tensor([2.0]),
        zeros=torch.tensor([0.25]),
        subnormals=torch.tensor([0.0]),
        first_exponent=0,
        counts=torch.tensor([[2, 1]]),
    )
    report = SimpleNamespace(
        index=1,
        applied=True,
        scale=8.0,
        norm=None,
        clip=1.0,
        amax=None,
        statistics=statistics,
    )
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        recorder(report)
    run = read_run(path)
    (sample,) = run.statistics(run.start, run.end - run.start)
    assert [["w", 4, 2.0, 0.25, 0.0, 0, [2, 1]]] == sample.tensors
