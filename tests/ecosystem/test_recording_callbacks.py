"""Recorder and writers inside Lightning, transformers and Accelerate, in training."""

import csv

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossscale.diagnostics import Recorder, StepRecord, read_run  # noqa: E402
from lossscale.errors import SettingTypeError  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402

INF = float("inf")
STEPS = 6
BAD = (2, 3)
SCALES = [1024.0, 1024.0, 1024.0, 512.0, 256.0, 256.0]
APPLIED = [True, True, False, False, True, True]


def records_of(path):
    return list(read_run(path).records())


def scaler_of(model=None):
    return GradScaler("cpu", init_scale=1024.0, module=model)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def lightning():
    pytest.importorskip("lightning", reason="lightning is not installed")
    import lightning.pytorch

    return lightning.pytorch


def lightning_model(lightning):
    class Model(lightning.LightningModule):
        """One linear layer; some losses are infinite."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.layer(batch[0]).float().square().mean()
            return loss + INF * self.layer.bias.sum() if index in BAD else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            rows = torch.randn(2 * STEPS, 4, generator=torch.Generator().manual_seed(1))
            data = torch.utils.data.TensorDataset(rows)
            return torch.utils.data.DataLoader(data, batch_size=2)

    return Model()


def lightning_trainer(lightning, scaler, folder, callback):
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import MixedPrecision

    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[callback],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning_records_and_logs_every_step(lightning, path, tmp_path):
    from lossscale.diagnostics.loggers import LightningCallback

    model = lightning_model(lightning)
    with Recorder(path) as recorder:
        callback = LightningCallback(recorder, every=2)
        scaler = scaler_of(model)
        lightning_trainer(lightning, scaler, tmp_path, callback).fit(model)
    found = records_of(path)
    assert SCALES == [record.scale for record in found]
    assert APPLIED == [record.applied for record in found]
    assert "layer.bias" in dict(found[2].nonfinite)
    (file,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    with file.open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["lossscale/scale"]]
    totals = {row["step"]: row["lossscale/skipped_total"] for row in rows}
    assert {"2": "0.0", "4": "2.0", "6": "2.0"} == totals


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning_records_loss_rate_names_and_statistics(lightning, path, tmp_path):
    from lossscale.diagnostics.loggers import LightningCallback

    model = lightning_model(lightning)
    losses, rates = [], []
    train_one = model.training_step

    def training_step(batch, batch_idx):
        loss = train_one(batch, batch_idx)
        losses.append(float(loss.detach()))
        rates.append(model.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    model.training_step = training_step
    model.configure_optimizers = configure_optimizers
    with Recorder(path, statistics_every=2, alarms=None) as recorder:
        callback = LightningCallback(recorder, every=2)
        lightning_trainer(lightning, scaler_of(), tmp_path, callback).fit(model)
    run, found = read_run(path), records_of(path)
    recorded = [record.loss for record in found]
    assert losses == pytest.approx(recorded, rel=1e-5, nan_ok=True)
    assert rates == pytest.approx([record.lr for record in found], rel=1e-5)
    assert ["layer.weight", "layer.bias"] == run.header["names"]
    assert "layer.bias" in dict(found[2].nonfinite)
    assert 2000 == run.header["policy"]["growth_interval"]
    samples = list(run.statistics(run.start, run.end - run.start))
    assert [1, 3, 5] == [sample.step for sample in samples]
    assert {"layer.weight", "layer.bias"} == {row[0] for row in samples[0].tensors}


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning_with_another_scaler_is_one_error(lightning, tmp_path):
    from lossscale.diagnostics.loggers import LightningCallback

    model = lightning_model(lightning)
    theirs = torch.amp.GradScaler("cpu")
    trainer = lightning_trainer(lightning, theirs, tmp_path, LightningCallback())
    with pytest.raises(SettingTypeError, match="scaler=GradScaler"):
        trainer.fit(model)


@pytest.fixture
def transformers():
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    state = pytest.importorskip(
        "accelerate.state", reason="accelerate is not installed"
    )
    yield found
    # Accelerate shares its state between all accelerators of a process.
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def trainer_of(transformers, scaler, folder, callback):
    class Scaled(transformers.Trainer):
        """A Trainer with a scaler of its own, and a bad loss at some steps."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = scaler

        def compute_loss(self, *arguments, **keywords):
            loss = super().compute_loss(*arguments, **keywords)
            return loss * INF if self.state.global_step in BAD else loss

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1}
    config = transformers.GPT2Config(**sizes, n_head=2, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fp16=True,
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )
    return Scaled(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_transformers_records_steps_with_loss_and_rate(transformers, path, tmp_path):
    from lossscale.diagnostics.loggers import TransformersCallback

    with Recorder(path, statistics_every=3) as recorder:
        callback = TransformersCallback(recorder)
        trainer = trainer_of(transformers, scaler_of(), tmp_path, callback)
        trainer.train()
    found = records_of(path)
    assert SCALES == [record.scale for record in found]
    assert APPLIED == [record.applied for record in found]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    # After an infinite loss the Trainer's running mean is NaN: nothing is known.
    losses = [entry["loss"] for entry in logged]
    assert losses[:3] == pytest.approx([r.loss for r in found[:3]], rel=1e-4)
    assert [None] * 3 == [record.loss for record in found[3:]]
    assert [entry["learning_rate"] for entry in logged] == pytest.approx(
        [record.lr for record in found], rel=1e-4
    )
    run = read_run(path)
    names = [name for name, _ in trainer.model.named_parameters()]
    assert names == run.header["names"]
    samples = list(run.statistics(run.start, run.end - run.start))
    assert [1, 4] == [sample.step for sample in samples]
    assert set(names) == {row[0] for row in samples[0].tensors}
    assert set(dict(found[2].nonfinite)) <= set(names)


def test_accelerate_writes_to_every_tracker(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.tracking import GeneralTracker

    from lossscale.diagnostics.loggers import AccelerateWriter

    class Lines(GeneralTracker):
        """A tracker of one's own, as Accelerate's guide shows."""

        name, requires_logging_directory = "lines", False

        def __init__(self):
            super().__init__()
            self.logged = []

        @property
        def tracker(self):
            return self.logged

        def log(self, values, step=None, **_):
            self.logged.append((step, values["lossscale/skipped_total"]))

    tracker = Lines()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("test")
    writer = AccelerateWriter(accelerator, every=3)
    for step, applied in enumerate(APPLIED, start=1):
        writer.write_step(
            StepRecord(step, applied=applied, cause=None if applied else "inf")
        )
    assert [(3, 1.0), (6, 2.0)] == tracker.logged
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
