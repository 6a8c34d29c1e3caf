# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D101, D102  # the methods are Lightning's
"""Train in float16 with Lightning: without a loss scale nothing is learned.

    pip install 'lossscale[numpy,torch]' lightning
    python examples/train_lightning.py

The experiment of `examples/train_torch.py`, run by Lightning's Trainer.
"""

import logging
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.utils.data import DataLoader, TensorDataset

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS = 300
BATCH_SIZE = 64
LAYER_SIZES = [64] * 8 + [10]
OVERFLOW_AT = 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())
logging.disable(logging.INFO)  # Lightning's notes on every Trainer


class Classifier(LightningModule):
    def __init__(self, scaler):
        super().__init__()
        self.scaler = scaler
        torch.manual_seed(0)  # the same start in every run
        layers = []
        for inputs, outputs in pairwise(LAYER_SIZES):
            linear = torch.nn.Linear(inputs, outputs, bias=False)
            torch.nn.init.normal_(linear.weight, std=0.02)
            layers += [linear, torch.nn.GELU("tanh")]
        self.network = torch.nn.Sequential(*layers[:-1])

    def configure_optimizers(self):
        optimizer = torch.optim.Muon(self.parameters(), lr=0.02, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch, _):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        overflows = self.scaler.is_enabled() and self.global_step == OVERFLOW_AT
        return torch.inf * loss if overflows else loss

    def lr_scheduler_step(self, scheduler, _):
        self.scaler.step_scheduler(scheduler)  # only if the step was applied
        if self.scaler.is_enabled() and self.global_step == OVERFLOW_AT + 1:
            report = self.scaler.last_step
            layers = len(report.nonfinite_names)
            print(f"step {OVERFLOW_AT} skipped: {report.reason}, {layers} layers")


def random_batches(generator):
    """Return a loader of half a run's batches."""
    size = STEPS // 2, BATCH_SIZE
    rows = torch.randint(len(DIGITS.train_labels), size, generator=generator)
    data = TensorDataset(DIGITS.train_images[rows], DIGITS.train_labels[rows])
    return DataLoader(data, batch_size=None)


def train(name, half, scaled):
    """Train once, in two halves; print test accuracy, skipped steps and the scale."""
    generator = torch.Generator().manual_seed(0)  # the same batches in every run
    checkpoint = None
    with TemporaryDirectory() as folder:
        for epoch in (1, 2):  # the second continues from the checkpoint of the first
            scaler = GradScaler(DEVICE, growth_interval=20, enabled=scaled)
            plugin = MixedPrecision("16-mixed", DEVICE, scaler) if half else Precision()
            model = Classifier(scaler)
            trainer = Trainer(
                max_epochs=epoch,
                plugins=[plugin],
                devices=1,
                gradient_clip_val=1.0,
                barebones=True,
            )
            trainer.fit(model, random_batches(generator), ckpt_path=checkpoint)
            checkpoint = Path(folder) / "half.ckpt"
            trainer.save_checkpoint(checkpoint)

    with torch.no_grad(), plugin.forward_context():
        guesses = model.to(DEVICE).network(DIGITS.test_images).argmax(1)
    accuracy = (guesses == DIGITS.test_labels).float().mean()
    skipped, scale = scaler.skipped_steps, scaler.get_scale()
    print(f"{name:22} accuracy {accuracy:.1%} skipped {skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
