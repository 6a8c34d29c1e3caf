"""The Trainer of Transformers with our scaler on two ranks that talk over gloo.

At one step one of the ranks has an infinite loss, or an infinity in its gradients; both
must skip. `native_amp` turns on what Accelerate turns on by itself on a GPU (see
`test_accelerate.py`).
"""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from helpers.ranks import Pool, break_gradient  # noqa: E402

from lossscale.torch import GradScaler  # noqa: E402

STEPS = 6
FUSED, FOREACH = "adamw_torch_fused", "adamw_torch"


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(2, launched=True)
    yield pool
    pool.close()


class Scaled(transformers.Trainer):
    """A Trainer with a scaler; at the steps `bad` rank 1 has something infinite."""

    def __init__(self, scaler, bad, what, **keywords):
        self.own_scaler, self.bad, self.what = scaler, bad, what
        super().__init__(**keywords)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = self.own_scaler

    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        spoilt = self.what == "loss" and self.state.global_step in self.bad
        return loss * torch.inf if spoilt and self.args.process_index == 1 else loss

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        if self.what == "gradient" and self.state.global_step in self.bad:
            break_gradient(self.model.parameters())
        return loss


class Recorder(transformers.TrainerCallback):
    """Keeps what there is after every step, as plain numbers."""

    def __init__(self, scaler):
        self.scaler, self.rates, self.scales, self.weights = scaler, [], [], []

    def on_step_end(self, args, state, control, **keywords):
        self.rates.append(keywords["lr_scheduler"].get_last_lr()[0])
        self.scales.append(self.scaler.get_scale())
        self.weights.append([p.tolist() for p in keywords["model"].parameters()])


def train(folder, optimizer, bad, what, checkpoint=None):
    """Train six steps with rates from 0.06 down to 0; return what was seen."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    group = torch.distributed.group.WORLD if what == "gradient" else None
    scaler = GradScaler(
        "cpu", init_scale=1024.0, growth_interval=2, process_groups=group
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(16, (48, 8), generator=torch.Generator().manual_seed(1))
    recorder = Recorder(scaler)
    trainer = Scaled(
        scaler,
        bad,
        what,
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            fp16=True,
            optim=optimizer,
            max_steps=STEPS,
            save_steps=3,
            learning_rate=0.06,
            lr_scheduler_type="linear",
            per_device_train_batch_size=4,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[recorder],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "mode": trainer.args.parallel_mode.value,
        "model": type(trainer.model_wrapped).__name__,
        "rates": recorder.rates,
        "scales": recorder.scales,
        "weights": recorder.weights,
        "state": scaler.state_dict(),
    }


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", [FUSED, FOREACH])
def test_what_is_infinite_on_one_rank_skips_the_step_on_all(
    ranks, tmp_path, optimizer, what
):
    first, second = ranks.run(train, str(tmp_path), optimizer, [2], what)
    assert first == second
    assert ("distributed", "DistributedDataParallel") == (first["mode"], first["model"])
    assert [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0] == first["scales"]
    changed = [before != after for before, after in pairwise(first["weights"])]
    assert [True, False, True, True, True] == changed
    taken = (1, 2, 2, 3, 4, 5)  # the schedule is held
    expected = pytest.approx([0.06 - 0.01 * steps for steps in taken])
    assert expected == first["rates"]
    assert (STEPS, 1) == (
        first["state"]["total_steps"],
        first["state"]["skipped_steps"],
    )


@pytest.mark.parametrize("optimizer", [FUSED, FOREACH])
def test_a_resumed_run_ends_where_the_other_did(ranks, tmp_path, optimizer):
    through = ranks.run(train, str(tmp_path), optimizer, [1, 4], "loss")
    checkpoint = str(tmp_path / "checkpoint-3")
    again = ranks.run(train, str(tmp_path), optimizer, [1, 4], "loss", checkpoint)
    for whole, half in zip(through, again, strict=True):
        assert 3 == len(half["weights"])
        for what in ("weights", "scales", "rates"):
            assert whole[what][3:] == half[what]
        assert whole["state"] == half["state"]
        assert (STEPS, 2) == (
            half["state"]["total_steps"],
            half["state"]["skipped_steps"],
        )
