"""Whole steps of `GradScaler` by the interpreted kernels, and the same without them."""

import math
import os

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "TRITON_INTERPRET=1 is not set: the interpreter is chosen when triton loads",
        allow_module_level=True,
    )
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import lossscale.torch as ls  # noqa: E402
from kernels import gpu_cases  # noqa: E402
from lossscale import Dynamic, presets  # noqa: E402
from lossscale.core.policies import Switches  # noqa: E402
from lossscale.torch.inspection import kernel_backend  # noqa: E402
from lossscale.torch.inspection.kernels import launch, scale_update  # noqa: E402
from lossscale.torch.inspection.summary import LOSS  # noqa: E402

STEPS = 9
BAD = {2: math.inf, 5: math.nan, 6: -math.inf}
"""Steps at which a gradient is not finite."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    gpu_cases.small_chunks(monkeypatch, 16, 2, 4)
    gpu_cases.exact_bfloat16(monkeypatch)


class Run:
    """A few steps of a small model; what they left behind."""

    def __init__(self, optimizers, *, before_step=None, together=False, **settings):
        torch.manual_seed(0)
        self.weights = [
            torch.nn.Parameter(torch.randn(shape) / 2)
            for shape in ((7, 9), (9,), (5, 7), (1,))
        ]
        self.scaler = ls.GradScaler(
            "cpu", names=[(str(at), w) for at, w in enumerate(self.weights)], **settings
        )
        self.optimizers = optimizers(self.weights)
        self.flags, self.norms, self.reports, self.states = [], [], [], []
        for step in range(STEPS):
            self._step(step, before_step, together)

    def _step(self, step, before_step, together):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        first, second, third, last = self.weights
        data = torch.randn(4, 9)
        hidden = torch.tanh((data + second) @ first.t()) @ third.t()
        loss = (hidden * last).square().mean()
        self.scaler.scale(loss).backward()
        if step in BAD:
            third.grad[-1, -1] = BAD[step]
        with np.errstate(all="ignore"):  # the interpreter computes in NumPy
            for optimizer in self.optimizers:
                if before_step is not None:
                    norm = before_step(self.scaler, optimizer)
                    self.norms.append(math.nan if norm is None else norm.item())
            if together:
                self.scaler.step_all(*self.optimizers)
            else:
                for optimizer in self.optimizers:
                    self.scaler.step(optimizer)
            self.scaler.update()
        last = self.scaler.last_step
        self.reports.append((last.applied, last.reason, last.scale, last.nonfinite))
        self.flags.append([last.applied_by(one) for one in self.optimizers])
        numbers = [cell.item() for cell in self.scaler.state]
        counts = (
            self.scaler.total_steps,
            self.scaler.skipped_steps,
            self.scaler.consecutive_skips,
        )
        self.states.append((numbers, counts))


def both(monkeypatch, optimizers, **settings):
    """Return the run with the kernels and the one without."""
    launched = []
    measure = launch.GroupKernels.measure

    def counted(*arguments, **keywords):
        launched.append(1)
        return measure(*arguments, **keywords)

    monkeypatch.setattr(launch.GroupKernels, "measure", counted)
    with_kernels = Run(optimizers, **settings)
    assert launched
    before = len(launched)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_backend, "is_interpreted", lambda: False)
        without = Run(optimizers, **settings)
    assert before == len(launched)
    return with_kernels, without


def check_equal(one, other, *, within=0.0):
    """Raise unless two runs are the same; weights and norms may differ by a little."""
    assert other.states == one.states
    assert other.flags == one.flags
    assert other.reports == one.reports
    if within:
        near = {"rtol": within, "atol": within, "equal_nan": True}
        assert len(other.norms) == len(one.norms)
        for left, right in zip(other.norms, one.norms, strict=True):
            # Where it is not finite either word will do.
            assert math.isfinite(left) == math.isfinite(right)
            if math.isfinite(left):
                assert pytest.approx(left, rel=within) == right
    else:
        near = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(one.weights, other.weights, **near)
    for weight in one.weights:
        assert torch.isfinite(weight).all()


def sgd(weights):
    return [torch.optim.SGD(weights, lr=0.1, momentum=0.9)]


def fused_sgd(weights):
    return [torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)]


def fused_adam(weights):
    return [torch.optim.Adam(weights, lr=0.01, fused=True)]


def adam(weights):
    return [torch.optim.AdamW(weights, lr=0.01)]


def several(weights):
    return [
        torch.optim.SGD(weights[:2], lr=0.1),
        torch.optim.Adam(weights[2:3], lr=0.01, fused=True),
        torch.optim.AdamW(weights[3:], lr=0.01),
    ]


OPTIMIZERS = [sgd, fused_sgd, fused_adam, adam, several]


def clip(norm_type):
    return lambda scaler, optimizer: scaler.clip_grad_norm_(
        optimizer, 0.05, norm_type=norm_type
    )


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_steps_are_the_same_to_the_bit_with_the_kernels(monkeypatch, optimizers):
    # One scale is no power of two, and grows and backs off by odd factors.
    one, other = both(
        monkeypatch,
        optimizers,
        init_scale=1000.0,
        growth_factor=1.7,
        backoff_factor=0.8,
        growth_interval=2,
    )
    check_equal(one, other)
    assert [step not in BAD for step in range(STEPS)] == [r[0] for r in one.reports]
    assert ("nan", {"2": "nan"}) == (one.reports[5][1], one.reports[5][3])


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipped_steps_are_the_same(monkeypatch, optimizers, norm_type):
    one, other = both(
        monkeypatch,
        optimizers,
        before_step=clip(norm_type),
        init_scale=1000.0,
        growth_interval=2,
    )
    check_equal(one, other, within=1e-6)
    assert any(norm > 0.05 for norm in one.norms)


@pytest.mark.parametrize("optimizers", [sgd, fused_adam, several])
def test_steps_after_unscaling_are_the_same_to_the_bit(monkeypatch, optimizers):
    one, other = both(
        monkeypatch,
        optimizers,
        before_step=lambda scaler, optimizer: scaler.unscale_(optimizer),
        init_scale=1000.0,
        growth_interval=2,
    )
    check_equal(one, other)


def test_several_optimizers_step_together_or_not_at_all(monkeypatch):
    one, other = both(monkeypatch, several, together=True, growth_interval=2)
    check_equal(one, other)
    for step, flags in enumerate(one.flags):
        assert [step not in BAD] * 3 == flags


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(growth_factor=3.0, backoff_divisor=3.0, growth_interval=2),
        Dynamic(hysteresis=2, growth_interval=2, init_scale=64.0, max_scale=200.0),
        presets.get("deepspeed", growth_interval=2, init_scale=8.0),
        presets.get("tensorflow_contrib", growth_interval=1),
    ],
    ids=str,
)
def test_a_policy_moves_the_scale_the_same_way(monkeypatch, policy):
    one, other = both(monkeypatch, sgd, policy=policy)
    check_equal(one, other)
    assert 1 < len({state[0][0] for state in one.states})


def test_micro_batches_are_accumulated_the_same_way(monkeypatch):
    one, other = both(
        monkeypatch,
        sgd,
        before_step=lambda scaler, optimizer: scaler.accumulate(optimizer),
        init_scale=1000.0,
        growth_interval=2,
    )
    one.reports, other.reports = [], []  # who was not finite: the test below
    check_equal(one, other)


def skipped(*gradients, accumulate=False):
    """Return who was not finite in a step with such gradients, named by letters."""
    weights = [torch.nn.Parameter(torch.ones_like(one)) for one in gradients]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = ls.GradScaler("cpu", names=zip("abcdefg", weights, strict=False))
    scaler.scale(weights[0].sum()).backward()
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    with np.errstate(all="ignore"):
        if accumulate:
            scaler.accumulate(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.last_step.nonfinite


@pytest.mark.parametrize(
    "kernels",
    [
        True,
        False,
    ],
)
def test_who_spoilt_a_micro_batch_is_named(monkeypatch, kernels):
    if not kernels:
        monkeypatch.setattr(kernel_backend, "is_interpreted", lambda: False)
    bad = torch.full((2,), math.nan)
    assert {"b": "nan"} == skipped(torch.ones(2), bad, accumulate=True)


def test_the_tensor_that_is_not_finite_is_named_next_to_a_gradient_with_gaps():
    gap, bad = torch.ones(4)[::2], torch.full((2,), math.inf)
    assert {"c": "inf"} == skipped(torch.ones(2), gap, bad)


def test_a_measured_norm_is_that_of_the_unscaled_gradients(monkeypatch):
    one, other = both(monkeypatch, fused_adam, measure_norm=True, init_scale=1000.0)
    check_equal(one, other)
    norms = [run.scaler.last_step.norm for run in (one, other)]
    assert pytest.approx(norms[1], rel=1e-6) == norms[0]


def test_a_bad_loss_holds_the_scale_the_same_way(monkeypatch):
    def run():
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        policy = Dynamic(hold_on_nonfinite_loss=True, growth_interval=2)
        scaler = ls.GradScaler("cpu", policy=policy)
        seen = []
        for factor in (1.0, math.inf, 1.0, 1e38, math.nan, 1.0):
            optimizer.zero_grad()
            with np.errstate(all="ignore"):
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            cells = [cell.item() for cell in scaler.state]
            seen.append((cells, scaler.last_step.reason, weight.tolist()))
        return seen

    one = run()
    monkeypatch.setattr(kernel_backend, "is_interpreted", lambda: False)
    assert run() == one
    assert [None, "loss", None, "inf", "loss", None] == [step[1] for step in one]
    assert [65536.0, 65536.0, 131072.0, 65536.0, 65536.0, 65536.0] == [
        step[0][0] for step in one
    ]


def test_float16_and_bfloat16_gradients_are_unscaled_the_same_way(monkeypatch):
    def run():
        torch.manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(40).to(dtype)) for dtype in gpu_cases.DTYPES
        ]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        scaler = ls.GradScaler("cpu", init_scale=3.0, allow_fp16=True)
        for _ in range(3):
            optimizer.zero_grad()
            with np.errstate(all="ignore"):
                loss = sum(weight.float().square().sum() for weight in weights)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return weights

    one = run()
    monkeypatch.setattr(kernel_backend, "is_interpreted", lambda: False)
    torch.testing.assert_close(run(), one, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("length", [10, 1024, 1025, 2100])
def test_the_update_copies_the_whole_summary_with_its_note_about_the_loss(length):
    summary = torch.arange(float(length))
    copy = torch.full((length + 1,), -7.0)
    number, counts = torch.zeros(()), torch.zeros(3, dtype=torch.int32)
    scale_update.update_scale[(1,)](
        *(number, counts, counts, counts, summary, number),
        *(torch.tensor(math.inf), summary, copy, length),
        *(torch.zeros(4, dtype=torch.float64), 1, 0, 1),
        skipped_at=0,
        too_large_at=0,
        multiplies_in_float64=False,
        may_be_held_by_loss=False,
        notes_loss=True,
        copies=True,
        moves=False,
        **dict.fromkeys(Switches._fields, False),
    )
    assert 1.0 == summary[LOSS]
    assert torch.equal(summary, copy[:-1])
    assert -7.0 == copy[-1]
