"""Accelerate, the Trainer and Lightning with our scaler, on a CUDA device.

    python tests/ecosystem/gpu_cases.py

A script, not a test file: on a CPU these packages leave float16 out. A case prints
"passed" or raises; where its package is missing it says so.
"""

# ruff: noqa: T201  # it prints what it has found

import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

from lossscale.torch import GradScaler

DEVICE = "cuda"
INF = float("inf")
CASES = []


def case(*packages):
    """Register a function as a case that needs some packages."""

    def register(function):
        CASES.append((function, packages))
        return function

    return register


def check(expected, found, what):
    """Raise unless two values are equal."""
    if expected != found:
        message = f"{what}: expected {expected}, got {found}"
        raise AssertionError(message)


def check_finite(model):
    """Raise unless all weights are finite."""
    for name, parameter in model.named_parameters():
        check(True, bool(parameter.isfinite().all()), f"{name} is finite")


def data():
    """Return inputs and targets, the same every time."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return inputs.to(DEVICE), inputs.sum(1, keepdim=True).to(DEVICE)


def small_model():
    """Return a model, the same every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).to(DEVICE)


# -- Accelerate ----------------------------------------------------------------------


def accelerated(scaler, **settings):
    """Return what a run with Accelerate is made of."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    check(True, isinstance(accelerator.scaler, torch.amp.GradScaler), "has torch's")
    accelerator.scaler = scaler
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def take_step(run, factor=1.0, clip=None):
    """Take one step as Accelerate's users write it."""
    accelerator, model, optimizer, schedule = run
    inputs, targets = data()
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(factor * loss)
    if clip is not None:
        clip(run)
    optimizer.step()
    schedule.step()


def clip_by_accelerate(run):
    """Clip as Accelerate does, which unscales the gradients first."""
    run[0].clip_grad_norm_(run[1].parameters(), 0.5)


def clip_by_scaler(run):
    """Clip as the scaler does; it wants the optimizer inside."""
    run[0].scaler.clip_grad_norm_(run[2].optimizer, 0.5)


@case("accelerate")
def accelerate_skips_a_bad_step_and_holds_the_schedule():
    """Check a skipped step between two that are taken."""
    for settings in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        for clip in (None, clip_by_accelerate, clip_by_scaler):
            run = accelerated(GradScaler(DEVICE, init_scale=1024.0), **settings)
            accelerator, model, optimizer, schedule = run
            seen = []
            for factor in (1.0, INF, 1.0):
                take_step(run, factor, clip)
                skipped = optimizer.step_was_skipped
                check(skipped, accelerator.optimizer_step_was_skipped, "skipped")
                rate = schedule.get_last_lr()[0]
                seen.append((skipped, rate, accelerator.scaler.get_scale()))
            expected = [
                (False, 0.05, 1024.0),
                (True, 0.05, 512.0),
                (False, 0.025, 512.0),
            ]
            check(expected, seen, f"{settings}, {clip}")
            check(
                (3, 1),
                (accelerator.scaler.total_steps, accelerator.scaler.skipped_steps),
                "n",
            )
            check_finite(model)


@case("accelerate")
def accelerate_trains_as_with_the_scaler_of_torch():
    """Check weights and scales of thirty steps, the first of which overflow."""
    for settings in ({"foreach": True}, {"fused": True}):
        found = []
        for kind in (torch.amp.GradScaler, GradScaler):
            scaler = kind(DEVICE, init_scale=2.0**24, growth_interval=3)
            run = accelerated(scaler, **settings)
            scales = []
            for _ in range(30):
                take_step((*run[:3], _NoSchedule()))
                scales.append(scaler.get_scale())
            found.append((scales, [p.detach() for p in run[1].parameters()]))
        (scales, expected), (ours, weights) = found
        check(scales, ours, f"scales with {settings}")
        torch.testing.assert_close(weights, expected)


class _NoSchedule:
    """Used where no schedule is wanted: torch's goes wrong with a fused optimizer."""

    def step(self):
        """Do nothing."""


@case("accelerate")
def accelerate_saves_and_loads_the_scaler():
    """Check that a loaded run goes on as the one that was saved."""
    run = accelerated(GradScaler(DEVICE, init_scale=1024.0), fused=True)
    for factor in (1.0, INF, 1.0):
        take_step(run, factor)
    again = accelerated(GradScaler(DEVICE), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        run[0].save_state(folder)
        again[0].load_state(folder)
    check(run[0].scaler.state_dict(), again[0].scaler.state_dict(), "state")
    for one in (run, again):
        take_step(one)
    check(run[0].scaler.state_dict(), again[0].scaler.state_dict(), "state after")
    torch.testing.assert_close(list(again[1].parameters()), list(run[1].parameters()))


# -- the Trainer of Transformers -----------------------------------------------------


def trainer_of(folder, scaler, bad):
    """Return a Trainer of six steps with `fp16=True` and the default optimizer."""
    import transformers

    class Scaled(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler

        def compute_loss(self, *arguments, **keywords):
            loss = super().compute_loss(*arguments, **keywords)
            return loss * INF if self.state.global_step in bad else loss

    config = transformers.GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        fp16=True,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.06,
        lr_scheduler_type="linear",
        disable_tqdm=True,
        report_to=[],
    )
    return Scaled(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )


@case("transformers", "accelerate")
def trainer_skips_holds_the_schedule_and_resumes():
    """Check two overflows, one on either side of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        scaler = GradScaler(DEVICE, init_scale=1024.0)
        through = trainer_of(Path(folder) / "through", scaler, bad=[1, 4])
        through.train()
        check(
            (6, 2, 256.0),
            (scaler.total_steps, scaler.skipped_steps, scaler.get_scale()),
            "n",
        )
        check(6, through.state.global_step, "global_step")
        rate = through.lr_scheduler.get_last_lr()[0]
        check(0.02, round(rate, 6), "rate after four of six steps")
        check_finite(through.model)

        checkpoint = Path(folder) / "through" / "checkpoint-3"
        check(True, (checkpoint / "scaler.pt").exists(), "scaler.pt is there")
        again = GradScaler(DEVICE)
        resumed = trainer_of(Path(folder) / "resumed", again, bad=[1, 4])
        resumed.train(resume_from_checkpoint=str(checkpoint))
        check(scaler.state_dict(), again.state_dict(), "state")
        torch.testing.assert_close(
            list(resumed.model.parameters()), list(through.model.parameters())
        )


# -- Lightning -----------------------------------------------------------------------


@case("lightning")
def lightning_skips_a_bad_step():
    """Check `MixedPrecision("16-mixed", "cuda", scaler=...)` with an overflow."""
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_model()

        def training_step(self, batch, batch_idx):
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.model(inputs).float(), targets)
            return loss * INF if batch_idx == 1 else loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    scaler = GradScaler(DEVICE, init_scale=1024.0)
    inputs, targets = (tensor.cpu() for tensor in data())
    batches = torch.utils.data.TensorDataset(inputs, targets)
    trainer = lightning.Trainer(
        accelerator=DEVICE,
        devices=1,
        plugins=[MixedPrecision("16-mixed", DEVICE, scaler=scaler)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=4))
    check(
        (4, 1, 512.0),
        (scaler.total_steps, scaler.skipped_steps, scaler.get_scale()),
        "n",
    )
    check_finite(module)


def main():
    """Run every case whose packages are there."""
    if not torch.cuda.is_available():
        sys.exit("not run: there is no CUDA device")
    for function, packages in CASES:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            is_or_are = "is" if len(missing) == 1 else "are"
            missing = " and ".join(missing)
            print(f"{function.__name__}: not run: {missing} {is_or_are} not installed")
            continue
        function()
        print(f"{function.__name__}: passed")
    for name in ("torch", "accelerate", "transformers", "lightning"):
        there = importlib.util.find_spec(name) is not None
        print(name, importlib.metadata.version(name) if there else "is not installed")
    print(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
