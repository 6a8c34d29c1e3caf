# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D101, D102  # the methods are Lightning's
"""float16 in Lightning: without a loss scale nothing moves, with one it learns.

    pip install 'lossscale[numpy,torch]' lightning
    python examples/train_lightning.py

The story of `examples/train_torch.py`, told by Lightning's Trainer.
"""

import logging
from itertools import pairwise
from tempfile import TemporaryDirectory

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.utils.data import DataLoader, TensorDataset

from lossscale.demo import load_digits
from lossscale.torch import GradScaler

STEPS, BATCH, SIZES = 300, 64, [64] * 8 + [10]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = load_digits()._make(torch.as_tensor(x, device=DEVICE) for x in load_digits())
logging.disable(logging.INFO)  # Lightning's notes on every Trainer


class Classifier(LightningModule):
    def __init__(self, scaler):
        super().__init__()
        torch.manual_seed(0)  # the same start in every run
        self.scaler, self.bad, layers = scaler, 200 if scaler.is_enabled() else -1, []
        for wide, high in pairwise(SIZES):
            layers += [torch.nn.GELU("tanh"), torch.nn.Linear(wide, high, bias=False)]
            torch.nn.init.normal_(layers[-1].weight, std=0.02)
        self.network = torch.nn.Sequential(*layers[1:])

    def configure_optimizers(self):
        muon = torch.optim.Muon(self.parameters(), lr=0.02, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LinearLR(muon, 1.0, 0.0, total_iters=STEPS)
        return [muon], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        return torch.inf * loss if self.global_step == self.bad else loss

    def lr_scheduler_step(self, scheduler, _):
        self.scaler.step_scheduler(scheduler)  # for the steps that were taken
        if self.global_step == self.bad + 1 and (seen := self.scaler.last_step):
            print(f"step 200 skipped: {seen.reason}, {len(seen.culprits)} layers")


def train(name, half, scaled):
    random, saved = torch.Generator().manual_seed(0), None  # the same batches each time
    with TemporaryDirectory() as folder:
        for part in (1, 2):  # the second takes up what the first has saved
            scaler = GradScaler(DEVICE, growth_interval=20, enabled=scaled)
            plugin = MixedPrecision("16-mixed", DEVICE, scaler) if half else Precision()
            options = {"devices": 1, "gradient_clip_val": 1.0, "barebones": True}
            trainer = Trainer(max_epochs=part, plugins=[plugin], **options)
            rows = torch.randint(1437, (STEPS // 2, BATCH), generator=random)
            data = TensorDataset(DIGITS.train_images[rows], DIGITS.train_labels[rows])
            loader, model = DataLoader(data, batch_size=None), Classifier(scaler)
            trainer.fit(model, loader, ckpt_path=saved)
            trainer.save_checkpoint(saved := f"{folder}/half.ckpt")
    with torch.no_grad(), plugin.forward_context():
        guesses = model.to(DEVICE).network(DIGITS.test_images).argmax(1)
    right, scale = (guesses == DIGITS.test_labels).float().mean(), scaler.get_scale()
    print(f"{name:22} accuracy {right:.1%} skipped {scaler.skipped} scale {scale:,.0f}")


if __name__ == "__main__":
    train("float32", half=False, scaled=False)
    train("float16, no scaling", half=True, scaled=False)
    train("float16, dynamic scale", half=True, scaled=True)
