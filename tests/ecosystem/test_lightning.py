"""Lightning's Trainer with `lossscale.torch.GradScaler` in its MixedPrecision plugin.

The oracle is the same Trainer with torch's scaler. A bad batch is one whose loss is
infinite, and with it the gradient of the bias alone.
"""

import math
import warnings

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from conformance import DATA_POLICIES
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lossscale.torch import GradScaler, optim

THEIRS = torch.amp.GradScaler
SETTINGS = {"init_scale": 1024.0, "growth_interval": 2}
BATCHES = 6

both = pytest.mark.parametrize("kind", [THEIRS, GradScaler], ids=["torch", "ours"])
every_data_policy = pytest.mark.parametrize(
    "policy", DATA_POLICIES, ids=lambda policy: type(policy).__name__
)
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]


class Model(LightningModule):
    """One linear layer; notes what it sees after every batch."""

    def __init__(self, *, bad=(), missing=(), fused=False, kind=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.bad, self.missing = bad, missing
        self.make = lambda: kind(self.parameters(), lr=0.1, fused=fused)
        self.scales, self.weights, self.rates, self.reports = [], [], [], []

    @property
    def scaler(self):
        return self.trainer.precision_plugin.scaler

    def loss_of(self, batch, index):
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(rows).float(), targets)
        return loss + torch.inf * self.layer.bias.sum() if index in self.bad else loss

    def training_step(self, batch, index):
        return None if index in self.missing else self.loss_of(batch, index)

    def configure_optimizers(self):
        return self.make()

    def on_train_batch_end(self, *_):
        self.scales.append(self.scaler.get_scale())
        self.weights.append(self.layer.weight.detach().clone())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.reports.append(getattr(self.scaler, "last_step", None))

    def train_dataloader(self):
        random = torch.Generator().manual_seed(1)
        rows = torch.randn(4 * BATCHES, 4, generator=random)
        targets = torch.randn(4 * BATCHES, 1, generator=random)
        return DataLoader(TensorDataset(rows, targets), batch_size=4)


class Manual(Model):
    """The same, by manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch, index))
        optimizer.step()


class Scheduled(Model):
    """The same, with a rate that is halved step by step, or as the options say."""

    options = {"interval": "step"}  # noqa: RUF012

    def configure_optimizers(self):
        optimizer = self.make()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, **self.options}]


class Held(Scheduled):
    """The recipe: the scaler steps the schedule."""

    def lr_scheduler_step(self, scheduler, metric):
        self.scaler.step_scheduler(scheduler)


def trainer_of(scaler, **settings):
    """Return a quiet trainer of one epoch that uses a scaler."""
    settings = {"max_epochs": 1, **settings}
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        **settings,
    )


def fitted(model, kind=GradScaler, **settings):
    """Return a model after its training, with its trainer."""
    trainer_of(kind("cpu", **SETTINGS), **settings).fit(model)
    return model


def check_same(expected, model):
    """Raise unless both went the same way, to the bit."""
    assert expected.scales == model.scales
    assert expected.rates == model.rates
    assert expected.trainer.global_step == model.trainer.global_step
    for one, other in zip(expected.weights, model.weights, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


# -- steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("style", [Model, Manual])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@fused_or_not
def test_training_is_that_with_torchs_scaler_bit_for_bit(style, optimizer, fused):
    settings = {"bad": (1,), "fused": fused, "kind": optimizer}
    expected = fitted(style(**settings), THEIRS)
    model = fitted(style(**settings))
    check_same(expected, model)
    assert [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0] == model.scales


@pytest.mark.parametrize("style", [Model, Manual])
@fused_or_not
def test_an_infinite_loss_is_skipped_and_the_report_says_why(style, fused):
    model = style(bad=(1,), fused=fused)
    scaler = GradScaler("cpu", **SETTINGS, module=model)
    trainer_of(scaler).fit(model)
    assert torch.equal(model.weights[0], model.weights[1])
    assert not torch.equal(model.weights[1], model.weights[2])
    (state, *_) = model.trainer.optimizers[0].state.values()
    assert BATCHES - 1 == state["step"].item()
    report = model.reports[1]
    assert (False, "loss", 1024.0) == (report.applied, report.reason, report.scale)
    assert ("layer.bias",) == report.nonfinite_names
    assert [True, False, True, True, True, True] == [r.applied for r in model.reports]
    assert (BATCHES, 1) == (scaler.total_steps, scaler.skipped_steps)


@both
def test_global_step_and_max_steps_count_skipped_steps(kind):
    model = fitted(Model(bad=(1,)), kind, max_steps=3)
    assert 3 == model.trainer.global_step
    (state, *_) = model.trainer.optimizers[0].state.values()
    assert 2 == state["step"].item()
    if kind is GradScaler:
        assert (3, 1) == (model.scaler.total_steps, model.scaler.skipped_steps)


def test_a_batch_without_a_loss_is_a_step_to_lightning_and_none_to_the_scaler():
    model = fitted(Model(missing=(2,)))
    check_same(fitted(Model(missing=(2,)), THEIRS), model)
    assert BATCHES == model.trainer.global_step
    assert (BATCHES - 1, 0) == (model.scaler.total_steps, model.scaler.skipped_steps)


# -- clipping --------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clip_val_clips_as_with_torchs_scaler(algorithm):
    clipping = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    expected = fitted(Model(bad=(1,), kind=torch.optim.SGD), THEIRS, **clipping)
    model = fitted(Model(bad=(1,), kind=torch.optim.SGD), **clipping)
    check_same(expected, model)
    unclipped = fitted(Model(bad=(1,), kind=torch.optim.SGD))
    assert not torch.equal(unclipped.weights[-1], model.weights[-1])


@both
def test_lightning_refuses_to_clip_with_a_fused_optimizer(kind):
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(Model(fused=True), kind, gradient_clip_val=0.1)


class Clipped(Model):
    """The recipe: the scaler clips."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.scaler.clip_grad_norm_(optimizer, gradient_clip_val)


class ClippedManually(Manual):
    """The recipe for manual optimization."""

    def on_before_optimizer_step(self, optimizer):
        self.scaler.clip_grad_norm_(optimizer, 0.1)


class Measured(Model):
    """Notes the norm of the gradients before they are clipped."""

    def on_train_start(self):
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        flat = [parameter.grad.ravel() for parameter in self.parameters()]
        self.norms.append(torch.cat(flat).norm().item())


@fused_or_not
def test_the_scaler_clips_from_the_hook_with_any_optimizer(fused):
    sgd = torch.optim.SGD
    expected = fitted(Measured(bad=(1,), kind=sgd), THEIRS, gradient_clip_val=0.1)
    clipped = Clipped(bad=(1,), kind=sgd, fused=fused)
    model = fitted(clipped, gradient_clip_val=0.1)
    # A fused optimizer divides once where the others multiply twice.
    torch.testing.assert_close(model.weights, expected.weights, rtol=1e-6, atol=1e-7)
    assert expected.scales == model.scales
    if fused:
        norms = [report.norm for report in model.reports]
        assert [0, 2, 3, 4, 5] == [at for at in range(6) if math.isfinite(norms[at])]
        assert pytest.approx(expected.norms, rel=1e-6) == norms
        assert [True] * 5 == [r.clip < 1 for r in model.reports if r.applied]


@fused_or_not
def test_the_scaler_clips_by_manual_optimization_from_the_hook(fused):
    sgd = torch.optim.SGD
    expected = fitted(Model(bad=(1,), kind=sgd), THEIRS, gradient_clip_val=0.1)
    model = fitted(ClippedManually(bad=(1,), kind=sgd, fused=fused))
    torch.testing.assert_close(model.weights, expected.weights, rtol=1e-6, atol=1e-7)
    assert expected.scales == model.scales


class ClippedInStep(Manual):
    """Clips between the backward pass and the step."""

    chosen = staticmethod(lambda wrapper: wrapper)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch, index))
        self.scaler.clip_grad_norm_(self.chosen(optimizer), 0.1)
        optimizer.step()


@fused_or_not
@pytest.mark.parametrize("wrapped", [False, True], ids=["inner", "wrapper"])
def test_the_scaler_clips_any_optimizer_in_the_step(wrapped, fused):
    sgd = torch.optim.SGD
    expected = fitted(Model(bad=(1,), kind=sgd), THEIRS, gradient_clip_val=0.1)
    model = ClippedInStep(bad=(1,), kind=sgd, fused=fused)
    if not wrapped:
        model.chosen = lambda wrapper: wrapper.optimizer
    fitted(model)
    torch.testing.assert_close(model.weights, expected.weights, rtol=1e-6, atol=1e-7)


class ClippedTooEarly(Manual):
    """What Lightning's pages show for manual optimization."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch, index))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


@both
def test_clip_gradients_by_manual_optimization_clips_what_is_still_scaled(kind):
    model = fitted(ClippedTooEarly(kind=torch.optim.SGD), kind, max_steps=1)
    start = Model().layer.weight.detach()
    moved = (model.weights[0] - start).norm().item()
    # The rate is 0.1, and the norm should have been 0.1; it was that over the scale.
    assert 0 < moved <= 0.1 * 0.1 / 1024 * 1.01


@fused_or_not
@pytest.mark.parametrize("missing", [0, 2])
def test_the_hook_clips_where_a_loss_may_be_missing(fused, missing):
    settings = {"missing": (missing,), "kind": torch.optim.SGD}
    expected = fitted(Model(**settings), THEIRS, gradient_clip_val=0.1)
    model = fitted(Clipped(**settings, fused=fused), gradient_clip_val=0.1)
    torch.testing.assert_close(model.weights, expected.weights, rtol=1e-6, atol=1e-7)


# -- accumulation ----------------------------------------------------------------------


@fused_or_not
def test_one_bad_micro_batch_spoils_the_step_as_with_torchs_scaler(fused):
    expected = fitted(Model(bad=(1,), fused=fused), THEIRS, accumulate_grad_batches=3)
    model = fitted(Model(bad=(1,), fused=fused), accumulate_grad_batches=3)
    check_same(expected, model)
    assert 2 == model.trainer.global_step
    assert (2, 1) == (model.scaler.total_steps, model.scaler.skipped_steps)


class WithoutBadOnes(Model):
    """The recipe that leaves bad micro-batches out."""

    def on_after_backward(self):
        self.scaler.accumulate(self.trainer.optimizers[0])


@fused_or_not
def test_accumulate_leaves_the_bad_micro_batch_out(fused):
    model = WithoutBadOnes(bad=(1,), fused=fused, kind=torch.optim.SGD)
    fitted(model, accumulate_grad_batches=2, limit_train_batches=2)
    # One of two is left and counts twice: a half and a double are exact.
    alone = fitted(Model(kind=torch.optim.SGD), THEIRS, limit_train_batches=1)
    assert torch.equal(alone.weights[-1], model.weights[-1])
    assert (1, 0, 512.0) == (
        model.scaler.total_steps,
        model.scaler.skipped_steps,
        model.scales[-1],
    )


# -- schedules -------------------------------------------------------------------------


def test_lightning_steps_the_schedule_on_skipped_steps_and_the_recipe_holds_it():
    halves = [0.1 * 0.5**steps for steps in range(7)]
    theirs = fitted(Scheduled(bad=(1, 3)), THEIRS)
    ours = fitted(Scheduled(bad=(1, 3)))
    check_same(theirs, ours)
    assert halves[1:] == ours.rates
    held = fitted(Held(bad=(1, 3)))
    assert [halves[steps] for steps in (1, 1, 2, 2, 3, 4)] == held.rates
    assert theirs.scales == held.scales


@fused_or_not
def test_the_recipe_holds_the_schedule_with_accumulation(fused):
    held = fitted(Held(bad=(3,), fused=fused), accumulate_grad_batches=2)
    assert [0.1, 0.05, 0.05, 0.05, 0.05, 0.025] == held.rates


def test_the_recipe_holds_the_schedule_where_a_loss_is_missing():
    assert [0.05, 0.025, 0.0125] == fitted(Scheduled(missing=(1,)), max_steps=3).rates
    assert [0.05, 0.05, 0.025] == fitted(Held(missing=(1,)), max_steps=3).rates


class HeldManually(Manual, Scheduled):
    """The recipe for manual optimization."""

    def training_step(self, batch, index):
        super().training_step(batch, index)
        self.scaler.step_scheduler(self.lr_schedulers())


def test_the_scaler_holds_the_schedule_by_manual_optimization():
    held = fitted(HeldManually(bad=(1,)), max_steps=4)
    assert [0.05, 0.05, 0.025, 0.0125] == held.rates


@both
def test_a_first_step_that_is_skipped_brings_the_false_warning(kind):
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        fitted(Scheduled(bad=(0,)), kind, max_steps=2)


def test_the_recipe_brings_no_false_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*before `optimizer.step")
        fitted(Held(bad=(0,)), max_steps=2)


class HeldStepByStep(Scheduled):
    """The recipe together with a schedule by epochs, which stays with Lightning."""

    def configure_optimizers(self):
        optimizer = self.make()
        halves = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        tenths = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.1)
        return [optimizer], [{"scheduler": halves, "interval": "step"}, tenths]

    def lr_scheduler_step(self, scheduler, metric):
        for config in self.trainer.lr_scheduler_configs:
            if config.scheduler is scheduler and config.interval == "step":
                self.scaler.step_scheduler(scheduler)
                return
        super().lr_scheduler_step(scheduler, metric)


def test_a_schedule_by_epochs_stays_with_lightning():
    model = fitted(HeldStepByStep(bad=(1,)), limit_train_batches=3, max_epochs=2)
    steps, epochs = (config.scheduler for config in model.trainer.lr_scheduler_configs)
    assert (4, 2) == (steps.last_epoch, epochs.last_epoch)
    assert pytest.approx([0.05, 0.05, 0.0025]) == model.rates[:3]


class HeldByMetric(Scheduled):
    """The recipe with a metric."""

    def configure_optimizers(self):
        optimizer = self.make()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        )
        config = {"scheduler": plateau, "interval": "step", "monitor": "constant"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def training_step(self, batch, index):
        self.log("constant", 1.0)
        return super().training_step(batch, index)

    def lr_scheduler_step(self, scheduler, metric):
        arguments = () if metric is None else (metric,)
        self.scaler.step_scheduler(scheduler, *arguments)


def test_the_recipe_hands_a_metric_on():
    model = fitted(HeldByMetric(bad=(1,)))
    plateau = model.trainer.lr_scheduler_configs[0].scheduler
    assert BATCHES - 1 == plateau.last_epoch
    (rate,) = plateau.get_last_lr()
    assert pytest.approx(0.1 * 0.5**4) == rate


def test_the_recipe_is_not_for_a_frequency_above_one():
    model = Held()
    model.options = {"interval": "step", "frequency": 2}
    fitted(model)
    # Asked after steps 2, 4 and 6: one, then two for each.
    assert 5 == model.trainer.lr_scheduler_configs[0].scheduler.last_epoch


# -- checkpoints -----------------------------------------------------------------------


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    whole = fitted(Held(bad=(1,)), max_epochs=2)
    half = fitted(Held(bad=(1,)))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    model, scaler = Held(bad=(1,)), GradScaler("cpu")
    trainer_of(scaler, max_epochs=2).fit(model, ckpt_path=tmp_path / "half.ckpt")
    assert whole.scales == half.scales + model.scales
    assert whole.rates == half.rates + model.rates
    assert torch.equal(whole.weights[-1], model.weights[-1])
    assert whole.scaler.state_dict() == scaler.state_dict()
    assert (12, 2) == (scaler.total_steps, scaler.skipped_steps)


@every_data_policy
def test_what_a_policy_remembers_survives_a_resumed_run(policy, tmp_path):
    def scaled():
        return GradScaler("cpu", policy=policy)

    whole, half, model = (Held(bad=(1,)) for _ in range(3))
    trainer_of(scaled(), max_epochs=2).fit(whole)
    trainer_of(scaled()).fit(half)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["MixedPrecision"]
    assert saved == half.scaler.state_dict()
    remembered = dict(zip(policy.init()._fields[3:], policy.init()[3:], strict=True))
    if remembered:
        assert remembered.keys() == saved["memory"].keys()
        assert remembered != saved["memory"]
    trainer_of(scaled(), max_epochs=2).fit(model, ckpt_path=tmp_path / "half.ckpt")
    assert whole.scales == half.scales + model.scales
    assert torch.equal(whole.weights[-1], model.weights[-1])
    assert whole.scaler.state_dict() == model.scaler.state_dict()


def test_a_checkpoint_holds_the_state_of_the_scaler_in_full(tmp_path):
    half = fitted(Model(bad=(1, 5)))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["MixedPrecision"]
    expected = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 0,
        "bad_steps": 0,
        "total_steps": 6,
        "skipped_steps": 2,
        "consecutive_skips": 1,
    }
    assert expected == saved


@pytest.mark.parametrize(
    ("first", "second"), [(THEIRS, GradScaler), (GradScaler, THEIRS)]
)
def test_a_run_goes_on_with_the_other_scaler(tmp_path, first, second):
    whole = fitted(Scheduled(bad=(1,)), THEIRS, max_epochs=2)
    fitted(Scheduled(bad=(1,)), first).trainer.save_checkpoint(tmp_path / "half.ckpt")
    model = Scheduled(bad=(1,))
    trainer = trainer_of(second("cpu"), max_epochs=2)
    trainer.fit(model, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert whole.scales[BATCHES:] == model.scales
    assert torch.equal(whole.weights[-1], model.weights[-1])


# -- what Lightning does not take ------------------------------------------------------


def test_bfloat16_takes_no_scaler():
    with pytest.raises(MisconfigurationException, match="does not use a scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler=GradScaler("cpu"))


class Closures(Model):
    """Asks for an optimizer that calls its closure more than once."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@both
def test_lightning_takes_no_lbfgs_with_a_scaler(kind):
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fitted(Closures(), kind)


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
    # One process without FSDP: the plugin's own part, in float32 (its autocast is that
    # of CUDA). What ranks have to share is not checked here.
    plugin = FSDPPrecision("16-mixed")
    plugin.scaler = GradScaler("cpu", **SETTINGS)
    model = Model(bad=(1,))
    trainer = trainer_of(None)
    trainer.strategy.precision_plugin = plugin
    trainer.fit(model)
    assert [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0] == model.scales
    assert torch.equal(model.weights[0], model.weights[1])
    assert (6, 1) == (
        plugin.state_dict()["total_steps"],
        plugin.state_dict()["skipped_steps"],
    )


# -- our optimizers --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_our_optimizer_trains_as_torchs_does(name):
    expected = fitted(Model(bad=(1,), fused=True, kind=getattr(torch.optim, name)))
    check_same(expected, fitted(Model(bad=(1,), fused=True, kind=getattr(optim, name))))
