"""Lightning Fabric with `lossscale.torch.GradScaler` in its MixedPrecision plugin.

The oracle is the same loop with torch's scaler. An overflow is a step whose loss is
infinite, and with it the gradient of the bias alone.
"""

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.plugins import FSDPPrecision, MixedPrecision

from lossscale.torch import GradScaler

THEIRS = torch.amp.GradScaler
SETTINGS = {"init_scale": 1024.0, "growth_interval": 2}
SCALES = [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]

both = pytest.mark.parametrize("kind", [THEIRS, GradScaler], ids=["torch", "ours"])
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


class Run:
    """One linear layer in Fabric, and what was seen after every step."""

    def __init__(self, kind=GradScaler, *, fused=False, optimizer=torch.optim.SGD):
        self.scaler = kind("cpu", **SETTINGS)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=self.scaler)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 1)
        self.raw = optimizer(layer.parameters(), lr=0.1, fused=fused)
        self.layer, self.optimizer = self.fabric.setup(layer, self.raw)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.raw, 0.5)
        random = torch.Generator().manual_seed(1)
        self.rows = torch.randn(6, 4, 4, generator=random)
        self.targets = torch.randn(6, 4, 1, generator=random)
        self.scales, self.weights, self.reports = [], [], []

    def backward(self, index, bad=()):
        found = self.layer(self.rows[index])
        loss = torch.nn.functional.mse_loss(found, self.targets[index])
        if index in bad:
            loss = loss + torch.inf * self.layer.bias.sum()
        self.fabric.backward(loss)

    def train(self, indices=range(6), bad=(), before=lambda run: None):
        """Take steps; `before` comes between the backward pass and the step."""
        for index in indices:
            self.optimizer.zero_grad()
            self.backward(index, bad)
            before(self)
            self.step()
        return self

    def step(self):
        self.optimizer.step()
        self.scales.append(self.scaler.get_scale())
        self.weights.append(self.layer.weight.detach().clone())
        self.reports.append(getattr(self.scaler, "last_step", None))


def check_same(expected, run):
    """Raise unless both went the same way, to the bit."""
    assert expected.scales == run.scales
    torch.testing.assert_close(run.weights, expected.weights, rtol=0, atol=0)


# -- steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@fused_or_not
def test_training_is_that_with_torchs_scaler_bit_for_bit(optimizer, fused):
    settings = {"fused": fused, "optimizer": optimizer}
    run = Run(**settings).train(bad=(1,))
    check_same(Run(THEIRS, **settings).train(bad=(1,)), run)
    assert SCALES == run.scales


@fused_or_not
def test_an_infinite_loss_is_skipped_and_the_report_says_why(fused):
    run = Run(fused=fused).train(bad=(1,))
    assert torch.equal(run.weights[0], run.weights[1])
    assert not torch.equal(run.weights[1], run.weights[2])
    report = run.reports[1]
    assert (False, "loss", 1024.0) == (report.applied, report.reason, report.scale)
    assert 1 == len(report.nonfinite_names)
    assert (6, 1) == (run.scaler.total_steps, run.scaler.skipped_steps)


def test_names_may_come_from_the_module_that_fabric_has_set_up():
    run = Run()
    plugin = run.fabric.strategy.precision
    plugin.scaler = run.scaler = GradScaler("cpu", **SETTINGS, module=run.layer.module)
    run.train(bad=(1,))
    assert ("bias",) == run.reports[1].nonfinite_names


@fused_or_not
def test_the_schedule_is_held(fused):
    run = Run(fused=fused)
    rates = []
    for index in range(4):
        run.train([index], bad=(0, 2))
        run.scaler.step_scheduler(run.schedule)
        rates += run.schedule.get_last_lr()
    assert [0.1, 0.05, 0.05, 0.025] == rates


def test_a_scheduler_may_be_that_of_the_wrapped_optimizer():
    run = Run()
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    rates = []
    for index in range(4):
        run.train([index], bad=(1,))
        run.scaler.step_scheduler(schedule)
        rates += schedule.get_last_lr()
    assert [0.05, 0.05, 0.025, 0.0125] == rates


# -- clipping --------------------------------------------------------------------------


def clipped_by_fabric(run):
    run.fabric.clip_gradients(
        run.layer, run.optimizer, max_norm=0.1, error_if_nonfinite=False
    )


def clipped_by_the_scaler(run):
    run.scaler.clip_grad_norm_(run.optimizer.optimizer, 0.1)


def test_fabric_clips_as_with_torchs_scaler():
    expected = Run(THEIRS).train(bad=(1,), before=clipped_by_fabric)
    check_same(expected, Run().train(bad=(1,), before=clipped_by_fabric))


@both
def test_fabric_raises_on_an_overflow_unless_it_is_asked_otherwise(kind):
    def clip(run):
        run.fabric.clip_gradients(run.layer, run.optimizer, max_norm=0.1)

    with pytest.raises(RuntimeError, match="non-finite"):
        Run(kind).train(bad=(1,), before=clip)


@both
def test_fabric_does_not_clip_with_a_fused_optimizer(kind):
    with pytest.raises(NotImplementedError, match="clipping is not implemented"):
        Run(kind, fused=True).train(before=clipped_by_fabric)


@fused_or_not
def test_the_scaler_clips_with_any_optimizer(fused):
    expected = Run(THEIRS).train(bad=(1,), before=clipped_by_fabric)
    run = Run(fused=fused).train(bad=(1,), before=clipped_by_the_scaler)
    # One factor for scale and clipping, where the others multiply twice.
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-6, atol=1e-7)
    assert SCALES == run.scales
    assert [True] * 5 == [r.clip < 1 for r in run.reports if r.applied]


def test_to_torchs_scaler_the_wrapped_optimizer_is_another_one():
    start = Run(THEIRS).layer.weight.detach()
    right = Run(THEIRS).train([0], before=lambda run: run.scaler.unscale_(run.raw))
    run = Run(THEIRS).train([0], before=lambda run: run.scaler.unscale_(run.optimizer))
    expected = (right.weights[0] - start) / 1024  # divided twice, without a warning
    torch.testing.assert_close(run.weights[0] - start, expected, rtol=0, atol=1e-7)


CALLS = {
    "unscale_": lambda run, optimizer: run.scaler.unscale_(optimizer),
    "clip_grad_norm_": lambda run, optimizer: run.scaler.clip_grad_norm_(
        optimizer, 0.1
    ),
    "accumulate": lambda run, optimizer: run.scaler.accumulate(optimizer),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_scaler_takes_the_wrapped_optimizer_for_the_one_in_it(call):
    expected = Run().train([0], before=lambda run: call(run, run.raw))
    run = Run().train([0], before=lambda run: call(run, run.optimizer))
    check_same(expected, run)


# -- accumulation ----------------------------------------------------------------------


@both
def test_one_bad_micro_batch_spoils_the_step(kind):
    run = Run(kind)
    start = run.layer.weight.detach().clone()
    for index in range(2):
        run.backward(index, bad=(1,))
    run.step()
    assert torch.equal(start, run.weights[0])
    assert [512.0] == run.scales


@fused_or_not
def test_accumulate_leaves_the_bad_micro_batch_out(fused):
    run = Run(fused=fused)
    for index in range(2):
        run.backward(index, bad=(1,))
        run.scaler.accumulate(run.optimizer.optimizer)
    run.step()
    # The good one counts twice: in the place of the one that is missing.
    alone = Run(THEIRS)
    alone.raw.param_groups[0]["lr"] = 0.2
    alone.train([0])
    torch.testing.assert_close(run.weights, alone.weights, rtol=1e-6, atol=1e-7)
    assert ([512.0], 0) == (run.scales, run.scaler.skipped_steps)


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [(GradScaler, GradScaler), (THEIRS, GradScaler)]
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, first, second):
    adam = {"optimizer": torch.optim.AdamW}
    whole = Run(**adam).train(bad=(1,))
    half = Run(first, **adam).train(range(3), bad=(1,))
    parts = {"model": half.layer, "optimizer": half.optimizer, "scaler": half.scaler}
    half.fabric.save(tmp_path / "half.ckpt", parts)

    run = Run(second, **adam)
    run.scaler.load_state_dict(GradScaler("cpu", init_scale=8.0).state_dict())
    parts = {"model": run.layer, "optimizer": run.optimizer, "scaler": run.scaler}
    run.fabric.load(tmp_path / "half.ckpt", parts, weights_only=True)
    run.train(range(3, 6), bad=(1,))

    assert whole.scales == half.scales + run.scales
    assert torch.equal(whole.weights[-1], run.weights[-1])
    if first is GradScaler:
        assert whole.scaler.state_dict() == run.scaler.state_dict()
        assert (6, 1) == (run.scaler.total_steps, run.scaler.skipped_steps)


def test_fabric_saves_no_scaler_by_itself(tmp_path):
    run = Run().train(bad=(1,))
    parts = {"model": run.layer, "optimizer": run.optimizer}
    run.fabric.save(tmp_path / "half.ckpt", parts)
    assert {"model", "optimizer"} == set(run.fabric.load(tmp_path / "half.ckpt"))


# -- what Fabric does not take ---------------------------------------------------------


def test_bfloat16_takes_no_scaler():
    with pytest.raises(ValueError, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler=GradScaler("cpu"))


@both
def test_the_plugin_for_fsdp_refuses_a_scaler_whatever_the_precision(kind):
    with pytest.raises(ValueError, match=r"16-mixed.* does not use a scaler"):
        FSDPPrecision("16-mixed", scaler=kind("cpu"))


class PastTheCheck(FSDPPrecision):
    """Has the precision before the check asks for it, which is what the check means."""

    precision = "16-mixed"


@both
def test_the_plugin_for_fsdp_drops_a_scaler_behind_its_check(kind):
    assert PastTheCheck("16-mixed", scaler=kind("cpu")).scaler is None


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_the_plugin_for_fsdp_uses_a_scaler_that_is_assigned():
    # One process without FSDP: the plugin's own part. What ranks have to share is not
    # checked here.
    plugin = FSDPPrecision("16-mixed")
    plugin.scaler = GradScaler("cpu", **SETTINGS)
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        plugin.backward(weight * factor, None)
        plugin.optimizer_step(optimizer)
    assert 0.5 == weight.item()
    assert (2, 1) == (
        plugin.state_dict()["total_steps"],
        plugin.state_dict()["skipped_steps"],
    )
