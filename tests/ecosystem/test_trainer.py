"""The Trainer of Hugging Face Transformers with our scaler, on a CPU.

The scaler goes in where the Trainer makes its accelerator. `native_amp` turns on what
Accelerate turns on by itself on a GPU (see `test_accelerate.py`); from there the
Trainer's own loop runs: autocast, clipping, optimizer, schedule and checkpoints.
"""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from lossscale import Dynamic, Headroom, LogMax, OverflowRate  # noqa: E402
from lossscale.torch import GradScaler, optim, to_float16  # noqa: E402

INF = float("inf")
STEPS = 6
RULE = Dynamic(init_scale=1024.0, growth_interval=2)
REMEMBERING = [Headroom(RULE, window=2), LogMax(RULE), OverflowRate(RULE)]
FUSED, FOREACH = "adamw_torch_fused", "adamw_torch"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads of a busy machine wait for each other longer than such layers take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _forget_the_last_accelerator():
    """Accelerate shares its state between all accelerators of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Scaled(transformers.Trainer):
    """A Trainer with a scaler of its own, and a bad loss at the steps `bad`."""

    def __init__(self, scaler, bad, **keywords):
        self.own_scaler, self.bad = scaler, bad
        super().__init__(**keywords)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = self.own_scaler

    def compute_loss(self, *arguments, **keywords):
        loss = super().compute_loss(*arguments, **keywords)
        return loss * INF if self.state.global_step in self.bad else loss


class Recorder(transformers.TrainerCallback):
    """Keeps the learning rate and the weights after every step."""

    def __init__(self):
        self.rates, self.weights = [], []

    def on_step_end(self, args, state, control, **keywords):
        self.rates.append(keywords["lr_scheduler"].get_last_lr()[0])
        self.weights.append(weights(keywords["model"]))


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(expected, found):
    """Raise unless two lists of tensors are the same, to the bit."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def tiny_model():
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
    return transformers.GPT2LMHeadModel(config)


def texts():
    """Return random tokens, which are their own labels."""
    tokens = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(folder, scaler, bad=(), model=None, **settings):
    """Return a trainer of six steps whose rate falls from 0.06 by 0.01 a step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fp16=True,
        max_steps=STEPS,
        learning_rate=0.06,
        lr_scheduler_type="linear",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        **{"save_strategy": "no", "per_device_train_batch_size": 4, **settings},
    )
    recorder = Recorder()
    made = Scaled(
        scaler,
        bad,
        model=tiny_model() if model is None else model,
        args=arguments,
        train_dataset=texts(),
        callbacks=[recorder],
    )
    return made, recorder


def rates(*taken):
    """Return the rates after so many steps taken."""
    return pytest.approx([0.06 - 0.01 * steps for steps in taken])


def test_the_default_optimizer_is_fused():
    assert FUSED == transformers.TrainingArguments().optim


@pytest.mark.parametrize("optimizer", [FUSED, FOREACH])
def test_an_overflow_is_skipped_and_the_schedule_held(optimizer, tmp_path):
    scaler = GradScaler("cpu", init_scale=1024.0)
    made, recorder = trainer(tmp_path, scaler, bad=[2], optim=optimizer)
    made.train()
    assert rates(1, 2, 2, 3, 4, 5) == recorder.rates
    check_equal(recorder.weights[1], recorder.weights[2])
    assert all(weight.isfinite().all() for weight in recorder.weights[-1])
    assert not torch.equal(recorder.weights[2][0], recorder.weights[3][0])
    assert (STEPS, 1) == (scaler.total_steps, scaler.skipped_steps)
    assert 512.0 == scaler.get_scale()
    assert STEPS == made.state.global_step  # the Trainer counts skipped steps as well


def test_torchs_scaler_lets_the_schedule_go_on_with_the_default_optimizer(tmp_path):
    """https://github.com/huggingface/accelerate/issues/4242."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made, recorder = trainer(tmp_path, scaler, bad=[2])
    made.train()
    check_equal(recorder.weights[1], recorder.weights[2])  # skipped it was
    assert rates(1, 2, 3, 4, 5, 6) == recorder.rates


@pytest.mark.parametrize("optimizer", [FUSED, FOREACH])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_training_is_that_of_torchs_scaler(optimizer, max_grad_norm, tmp_path):
    found = []
    for kind in (torch.amp.GradScaler, GradScaler):
        scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
        settings = {"optim": optimizer, "max_grad_norm": max_grad_norm}
        made, recorder = trainer(tmp_path, scaler, **settings)
        made.train()
        norms = [row["grad_norm"] for row in made.state.log_history[:-1]]
        found.append((recorder.weights, norms, scaler.get_scale()))
    (expected, norms, scale), (weights, ours, our_scale) = found
    check_equal(expected, weights)
    assert (norms, scale) == (ours, our_scale)
    assert 8192.0 == scale  # it has grown three times
    assert 0.1 < max(norms) < 100.0  # unscaled, and there was something to clip


def test_an_overflow_of_several_micro_batches_is_skipped(tmp_path):
    scaler = GradScaler("cpu", init_scale=1024.0)
    made, recorder = trainer(
        tmp_path,
        scaler,
        bad=[2],
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    made.train()
    assert rates(1, 2, 2, 3, 4, 5) == recorder.rates
    assert (STEPS, 1) == (scaler.total_steps, scaler.skipped_steps)


@pytest.mark.parametrize("optimizer", [FUSED, FOREACH])
def test_a_checkpoint_has_the_scaler_and_resuming_restores_it(optimizer, tmp_path):
    def fresh(folder):
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        settings = {"save_strategy": "steps", "save_steps": 3, "optim": optimizer}
        return scaler, *trainer(folder, scaler, bad=[1, 4], **settings)

    scaler, through, _ = fresh(tmp_path / "through")
    through.train()
    checkpoint = tmp_path / "through" / "checkpoint-3"
    saved = torch.load(checkpoint / "scaler.pt", weights_only=True)
    assert (512.0, 3, 1) == (
        saved["scale"],
        saved["total_steps"],
        saved["skipped_steps"],
    )

    again, resumed, recorder = fresh(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert 3 == len(recorder.weights)
    assert scaler.state_dict() == again.state_dict()
    assert (STEPS, 2) == (again.total_steps, again.skipped_steps)
    check_equal(weights(through.model), weights(resumed.model))


@pytest.mark.parametrize("policy", REMEMBERING, ids=lambda p: type(p).__name__)
def test_what_a_policy_remembers_survives_resuming(policy, tmp_path):
    def fresh(folder):
        scaler = GradScaler("cpu", policy=policy)
        settings = {"save_strategy": "steps", "save_steps": 3, "optim": FUSED}
        return scaler, *trainer(folder, scaler, bad=[1, 4], **settings)

    scaler, through, _ = fresh(tmp_path / "through")
    first = scaler.state_dict()["memory"]
    through.train()
    checkpoint = tmp_path / "through" / "checkpoint-3"
    saved = torch.load(checkpoint / "scaler.pt", weights_only=True)
    assert first != saved["memory"]

    again, resumed, _ = fresh(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert scaler.state_dict() == again.state_dict()
    check_equal(weights(through.model), weights(resumed.model))


def test_a_checkpoint_of_torchs_scaler_is_taken_up(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "optim": FOREACH}
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    through, _ = trainer(tmp_path / "through", theirs, bad=[1], **settings)
    through.train()
    ours = GradScaler("cpu")
    resumed, _ = trainer(tmp_path / "resumed", ours, bad=[1], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-3"))
    assert theirs.get_scale() == ours.get_scale()
    assert 3 == ours.total_steps  # torch's state has no count of what was before
    check_equal(weights(through.model), weights(resumed.model))


def test_a_checkpoint_with_a_scaler_is_not_resumed_without_one(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    through, _ = trainer(tmp_path / "through", GradScaler("cpu"), **settings)
    through.train()
    resumed, _ = trainer(tmp_path / "resumed", None, **settings)
    with pytest.raises(AttributeError, match="load_state_dict"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-3"))


def test_a_scaler_can_be_assigned_before_training(tmp_path):
    made, recorder = trainer(tmp_path, None, bad=[2])
    scaler = made.accelerator.scaler = GradScaler("cpu", init_scale=1024.0)
    made.train()
    assert rates(1, 2, 2, 3, 4, 5) == recorder.rates
    assert (STEPS, 1) == (scaler.total_steps, scaler.skipped_steps)


def test_a_scaler_assigned_after_training_does_not_reach_the_optimizer(tmp_path):
    scaler = GradScaler("cpu", init_scale=1024.0)
    made, _ = trainer(tmp_path, scaler)
    made.train()
    made.accelerator.scaler = GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        made.train()
    assert made.optimizer.scaler is scaler


def test_names_and_reports_come_with_the_model(tmp_path):
    seen, model = [], tiny_model()
    scaler = GradScaler("cpu", init_scale=1024.0, module=model, on_step=seen.append)
    made, _ = trainer(tmp_path, scaler, bad=[2], model=model)
    made.train()
    applied = [True, True, False, True, True, True]
    assert applied == [report.applied for report in seen]
    assert "transformer.wte.weight" in seen[2].nonfinite_names


def test_what_the_trainer_logs_of_a_skipped_step(tmp_path):
    made, _ = trainer(tmp_path, GradScaler("cpu", init_scale=1024.0), bad=[2])
    made.train()
    made.save_state()
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    skipped, after = history[2], history[3]
    assert skipped["grad_norm"] != skipped["grad_norm"]  # NaN
    assert skipped["loss"] == 0.0  # a bad loss counts as the mean since the last log
    assert after["loss"] > 0.0


# -- LoRA ----------------------------------------------------------------------------


def test_lora_on_float16_weights_trains_in_float32(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny_model().half(), config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {torch.float32} == {p.dtype for p in trained.values()}
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    assert {torch.float16} == {p.dtype for p in frozen}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}

    scaler = GradScaler("cpu", init_scale=1024.0, module=model)
    made, recorder = trainer(tmp_path, scaler, bad=[2], model=model)
    made.train()
    assert rates(1, 2, 2, 3, 4, 5) == recorder.rates
    assert (STEPS, 1) == (scaler.total_steps, scaler.skipped_steps)
    for name, parameter in trained.items():
        assert parameter.isfinite().all()
        assert not torch.equal(before[name], parameter)
    check_equal(frozen, [p for p in model.parameters() if not p.requires_grad])


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_float16_weights_that_are_trained_are_refused(kind, tmp_path):
    made, _ = trainer(tmp_path, kind("cpu"), model=tiny_model().half(), optim=FOREACH)
    with pytest.raises(ValueError, match="FP16 gradients"):
        made.train()


def test_float16_weights_with_masters_are_trained(tmp_path):
    model = tiny_model()
    to_float16(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.06, master_weights=True)
    made, recorder = trainer(tmp_path, GradScaler("cpu", init_scale=8.0), {2}, model)
    made.optimizer = optimizer
    made.train()
    skipped = [
        all(map(torch.equal, *pair))
        for pair in zip(recorder.weights, recorder.weights[1:], strict=False)
    ]
    assert [False, True, False, False, False] == skipped
    assert {STEPS - 1.0} == {state["step"].item() for state in optimizer.state.values()}
