"""Hugging Face Accelerate with our scaler, on a CPU.

There `mixed_precision="fp16"` alone does nothing: no autocast, no scaler. `native_amp`
turns on what Accelerate turns on by itself on a GPU, and its own code runs from there:
autocast in the prepared model, `backward`, clipping, the prepared optimizer and the
prepared schedule, checkpoints. torch's scaler in the same place is what ours is
compared with.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import GradScalerKwargs  # noqa: E402
from conformance import DATA_POLICIES  # noqa: E402

from lossscale import Dynamic, errors  # noqa: E402
from lossscale.torch import GradScaler, optim, to_float16  # noqa: E402

KINDS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True)
INF = float("inf")


class Run(NamedTuple):
    """What a run is made of, as `prepare` returned it."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any


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


def start(scaler, kind="plain", micro_batches=1):
    """Return a run at its first step: the same weights every time, a rate of 0.1."""
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=micro_batches
    )
    accelerator.native_amp = True
    accelerator.scaler = scaler
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **KINDS[kind])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return Run(accelerator, *accelerator.prepare(model, optimizer, scheduler))


def backward(run, factor=1.0):
    """Run a backward pass of the loss, times a factor."""
    loss = torch.nn.functional.mse_loss(run.model(INPUTS), TARGETS)
    run.accelerator.backward(factor * loss)


def step(run, factor=1.0):
    """Take one step of a loop as Accelerate's users write it."""
    run.optimizer.zero_grad()
    backward(run, factor)
    run.optimizer.step()
    run.scheduler.step()


def weights(run):
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def check_equal(expected, found):
    """Raise unless two lists of tensors are the same, to the bit."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# -- putting it in -------------------------------------------------------------------


def test_fp16_on_a_cpu_brings_neither_a_scaler_nor_autocast():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    assert (None, False) == (accelerator.scaler, accelerator.native_amp)


def test_the_prepared_model_runs_in_float16():
    run = start(GradScaler("cpu"))
    seen = []
    run.model[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    assert torch.float32 == run.model(INPUTS).dtype  # Accelerate converts the result
    assert [torch.float16] == seen


def test_the_prepared_optimizer_has_the_scaler_that_was_set_before():
    scaler = GradScaler("cpu")
    assert start(scaler).optimizer.scaler is scaler


def test_a_scaler_set_after_prepare_does_not_reach_the_optimizer():
    run = start(None)
    run.accelerator.scaler = GradScaler("cpu")
    assert run.optimizer.scaler is None
    # On a GPU there is torch's, which then has nothing to go by.
    run = start(torch.amp.GradScaler("cpu"))
    run.accelerator.scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match="_scale is None"):
        step(run)


def test_the_kwargs_of_accelerate_are_torchs_five_numbers_which_ours_takes():
    names = [field.name for field in dataclasses.fields(GradScalerKwargs)]
    expected = ["init_scale", "growth_factor", "backoff_factor", "growth_interval"]
    assert [*expected, "enabled"] == names
    handler = GradScalerKwargs(init_scale=256.0, growth_interval=7)
    scaler = GradScaler("cpu", **handler.to_kwargs())
    assert (256.0, 7) == (scaler.get_scale(), scaler.get_growth_interval())


# -- skipped steps -------------------------------------------------------------------


@every_kind
def test_an_infinite_loss_leaves_the_weights_and_holds_the_schedule(kind):
    run = start(GradScaler("cpu", init_scale=1024.0), kind)
    scaler = run.accelerator.scaler
    step(run)
    before = weights(run)
    step(run, INF)
    check_equal(before, weights(run))
    assert run.optimizer.step_was_skipped
    assert run.accelerator.optimizer_step_was_skipped
    assert ([0.05], 512.0) == (run.scheduler.get_last_lr(), scaler.get_scale())
    assert (2, 1, "loss") == (
        scaler.total_steps,
        scaler.skipped_steps,
        scaler.last_step.reason,
    )
    step(run)
    assert not run.optimizer.step_was_skipped
    assert not run.accelerator.optimizer_step_was_skipped
    assert ([0.025], 512.0) == (run.scheduler.get_last_lr(), scaler.get_scale())
    counted = {int(state["step"]) for state in run.optimizer.state.values()}
    assert {2} == counted  # AdamW's own count


@every_kind
def test_a_first_step_that_is_skipped_is_seen(kind):
    run = start(GradScaler("cpu", init_scale=1024.0), kind)
    before = weights(run)
    step(run, INF)
    check_equal(before, weights(run))
    assert run.optimizer.step_was_skipped
    assert [0.1] == run.scheduler.get_last_lr()


def test_torchs_scaler_misses_the_skipped_step_of_a_fused_optimizer():
    """https://github.com/huggingface/accelerate/issues/4242."""
    run = start(torch.amp.GradScaler("cpu", init_scale=1024.0), "fused")
    before = weights(run)
    step(run, INF)
    check_equal(before, weights(run))  # skipped it was
    assert not run.optimizer.step_was_skipped
    assert [0.05] == run.scheduler.get_last_lr()


def test_a_schedule_that_was_not_prepared_is_held_by_the_scaler():
    run = start(GradScaler("cpu", init_scale=1024.0))
    scaler, schedule = run.accelerator.scaler, run.scheduler.scheduler
    rates = []
    for factor in (1.0, INF, 1.0):
        run.optimizer.zero_grad()
        backward(run, factor)
        run.optimizer.step()
        scaler.step_scheduler(schedule)
        rates += schedule.get_last_lr()
    assert [0.05, 0.05, 0.025] == rates


@every_kind
def test_training_is_that_of_torchs_scaler(kind):
    def trained(made):
        run = start(made("cpu", init_scale=2.0**24, growth_interval=3), kind)
        scales = []
        for number in range(30):
            run.optimizer.zero_grad()
            backward(run, INF if number == 20 else 1.0)
            run.optimizer.step()
            scales.append(run.accelerator.scaler.get_scale())
        return weights(run), scales

    expected, scales = trained(torch.amp.GradScaler)
    found, ours = trained(GradScaler)
    assert scales == ours
    assert 2.0**23 == scales[0]  # the first step was skipped
    assert min(scales) < scales[-1]  # and later it grew
    check_equal(expected, found)


# -- what only ours can --------------------------------------------------------------


def test_a_policy_and_an_observer_go_in_with_the_scaler():
    seen = []
    scaler = GradScaler("cpu", policy=Dynamic(hysteresis=2), on_step=seen.append)
    run = start(scaler)
    for factor in (1e-3, INF, INF):
        step(run, factor)
    assert [True, False, False] == [report.applied for report in seen]
    assert [2.0**16] * 3 == [report.scale for report in seen]
    assert 2.0**15 == scaler.get_scale()


def test_a_loss_that_is_not_finite_can_leave_the_scale():
    policy = Dynamic(init_scale=1024.0, hold_on_nonfinite_loss=True)
    run = start(GradScaler("cpu", policy=policy))
    step(run, INF)
    scaler = run.accelerator.scaler
    assert (1024.0, "loss") == (scaler.get_scale(), scaler.last_step.reason)
    assert run.optimizer.step_was_skipped


@every_kind
def test_the_alarm_goes_off_in_the_step_and_training_can_go_on(kind):
    scaler = GradScaler(
        "cpu", init_scale=1024.0, max_consecutive_skips=2, on_collapse="raise"
    )
    run = start(scaler, kind)
    step(run, INF)
    with pytest.raises(errors.CollapseError, match="2 consecutive steps were skipped"):
        step(run, INF)
    before = weights(run)
    step(run)
    assert not run.optimizer.step_was_skipped
    assert (3, 2) == (scaler.total_steps, scaler.skipped_steps)
    assert not torch.equal(before[0], weights(run)[0])


# -- clipping ------------------------------------------------------------------------


def clipped(scaler, kind, clip, factors=(1.0, 1.0, 1.0)):
    """Return the norms that clipping measured, and the weights in the end."""
    run = start(scaler, kind)
    norms = []
    for factor in factors:
        run.optimizer.zero_grad()
        backward(run, factor)
        norms.append(clip(run))
        run.optimizer.step()
    return torch.stack(norms), weights(run)


def by_accelerate(run):
    return run.accelerator.clip_grad_norm_(run.model.parameters(), 0.5)


def by_ours(run):
    return run.accelerator.scaler.clip_grad_norm_(run.optimizer, 0.5)


def test_a_schedule_of_the_prepared_optimizer_is_stepped_by_the_scaler():
    run = start(GradScaler("cpu", init_scale=1024.0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    first = run.optimizer.param_groups[0]["lr"]
    for factor in (1.0, INF, 1.0):
        run.optimizer.zero_grad()
        backward(run, factor)
        run.optimizer.step()
        run.accelerator.scaler.step_scheduler(schedule)
    assert first / 4 == run.optimizer.param_groups[0]["lr"]


@every_kind
def test_the_clipping_of_accelerate_is_the_same_as_with_torchs_scaler(kind):
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms, expected = clipped(theirs, kind, by_accelerate)
    ours, found = clipped(GradScaler("cpu", init_scale=1024.0), kind, by_accelerate)
    assert 0.5 < norms.max() < 100.0  # unscaled, and there was something to clip
    check_equal(norms, ours)
    check_equal(expected, found)


@every_kind
def test_the_clipping_of_the_scaler_takes_the_prepared_optimizer(kind):
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms, expected = clipped(theirs, kind, by_accelerate)
    ours, found = clipped(GradScaler("cpu", init_scale=1024.0), kind, by_ours)
    torch.testing.assert_close(ours, norms)
    torch.testing.assert_close(found, expected)


@every_kind
@pytest.mark.parametrize("clip", [by_accelerate, by_ours])
def test_a_step_that_cannot_be_clipped_is_skipped(kind, clip):
    scaler = GradScaler("cpu", init_scale=1024.0)
    norms, _ = clipped(scaler, kind, clip, [1.0])
    assert norms.isfinite().all()
    scaler = GradScaler("cpu", init_scale=1024.0)
    norms, found = clipped(scaler, kind, clip, [INF])
    assert not norms.isfinite().any()
    assert (1, 512.0) == (scaler.skipped_steps, scaler.get_scale())
    check_equal(weights(start(None)), found)


@every_kind
def test_clipping_by_value_is_the_same_as_with_torchs_scaler(kind):
    def clip(run):
        run.accelerator.clip_grad_value_(run.model.parameters(), 0.1)
        return torch.stack([p.grad.abs().max() for p in run.model.parameters()])

    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    largest, expected = clipped(theirs, kind, clip)
    ours, found = clipped(GradScaler("cpu", init_scale=1024.0), kind, clip)
    assert torch.tensor(0.1) == largest.max()
    check_equal(largest, ours)
    check_equal(expected, found)


def test_gradients_can_be_unscaled_before_the_step():
    run = start(GradScaler("cpu", init_scale=1024.0))
    backward(run)
    scaled = [parameter.grad.clone() for parameter in run.model.parameters()]
    run.accelerator.unscale_gradients()
    unscaled = [gradient / 1024.0 for gradient in scaled]
    check_equal(unscaled, [parameter.grad for parameter in run.model.parameters()])
    run.optimizer.step()
    check_equal(unscaled, [parameter.grad for parameter in run.model.parameters()])


# -- accumulation --------------------------------------------------------------------


def accumulated(scaler, kind, factors, after=lambda run: None):
    """Return a run after micro-batches, two of which make a step."""
    run = start(scaler, kind, micro_batches=2)
    for factor in factors:
        with run.accelerator.accumulate(run.model):
            backward(run, factor)
            after(run)
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
    return run


@every_kind
def test_accumulation_is_the_same_as_with_torchs_scaler(kind):
    theirs, ours = (
        accumulated(made("cpu", init_scale=1024.0), kind, [1.0, 0.5] * 3)
        for made in (torch.amp.GradScaler, GradScaler)
    )
    check_equal(weights(theirs), weights(ours))
    assert 3 == ours.accelerator.scaler.total_steps
    assert [0.1 / 8] == ours.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()


@every_kind
def test_a_bad_micro_batch_skips_the_step_it_belongs_to(kind):
    run = accumulated(GradScaler("cpu", init_scale=1024.0), kind, [1.0, 1.0, INF, 1.0])
    assert (2, 1) == (
        run.accelerator.scaler.total_steps,
        run.accelerator.scaler.skipped_steps,
    )
    assert run.optimizer.step_was_skipped
    assert [0.05] == run.scheduler.get_last_lr()


@every_kind
def test_a_bad_micro_batch_can_be_left_out_of_the_step(kind):
    def leave_out(run):
        run.accelerator.scaler.accumulate(run.optimizer)

    run = accumulated(
        GradScaler("cpu", init_scale=1024.0), kind, [INF, 1.0], after=leave_out
    )
    assert (1, 0) == (
        run.accelerator.scaler.total_steps,
        run.accelerator.scaler.skipped_steps,
    )
    assert (512.0, [0.05]) == (
        run.accelerator.scaler.get_scale(),
        run.scheduler.get_last_lr(),
    )
    # The good one counts twice, which makes it a step of its own.
    alone = start(GradScaler("cpu", init_scale=1024.0), kind)
    step(alone)
    torch.testing.assert_close(weights(run), weights(alone))


# -- several optimizers, closures ----------------------------------------------------


def pair(scaler):
    """Return two weights of 1 with an optimizer each, at a rate of 1."""
    accelerator = start(scaler).accelerator
    both = [torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2)]
    optimizers = accelerator.prepare(*(torch.optim.SGD([one], lr=1.0) for one in both))
    return accelerator, both, optimizers


@pytest.mark.parametrize("made", [torch.amp.GradScaler, GradScaler])
def test_accelerate_moves_the_scale_between_two_optimizers(made):
    """https://github.com/huggingface/accelerate/issues/439."""
    accelerator, (left, right), optimizers = pair(made("cpu", init_scale=1024.0))
    accelerator.backward(INF * left + right)
    for optimizer in optimizers:
        optimizer.step()
    # The second gradient, 1024, was divided by 512: a step of 2 in place of 1.
    assert (1.0, -1.0) == (left.item(), right.item())


@pytest.mark.parametrize("made", [torch.amp.GradScaler, GradScaler])
def test_accelerate_unscales_twice_where_two_optimizers_are_clipped(made):
    accelerator, (left, right), optimizers = pair(made("cpu", init_scale=1024.0))
    accelerator.backward(left + right)
    accelerator.clip_grad_norm_([left, right], 100.0)
    for optimizer in optimizers:
        optimizer.step()
    assert (0.0, 1.0 - 1.0 / 1024.0) == (left.item(), right.item())


def test_the_scaler_itself_steps_two_optimizers():
    accelerator, (left, right), optimizers = pair(GradScaler("cpu", init_scale=1024.0))
    found = []
    for factor in (1.0, INF, 1.0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(factor * left + right)
        accelerator.scaler.step_all(*optimizers)
        accelerator.scaler.update()
        found.append((left.item(), right.item(), accelerator.scaler.get_scale()))
    assert [(0.0, 0.0, 1024.0), (0.0, 0.0, 512.0), (-1.0, -1.0, 512.0)] == found


def test_a_closure_goes_through():
    accelerator = start(GradScaler("cpu", init_scale=1024.0)).accelerator
    point = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    lbfgs = torch.optim.LBFGS([point], max_iter=10)
    schedule = torch.optim.lr_scheduler.ExponentialLR(lbfgs, 0.5)
    lbfgs = accelerator.prepare(lbfgs)
    factor = INF

    def closure():
        lbfgs.zero_grad()
        loss = ((point - 0.5) ** 2).sum() * factor
        accelerator.backward(loss)
        return loss

    lbfgs.step(closure)
    accelerator.scaler.step_scheduler(schedule)
    assert ([2.0, -1.0], [1.0]) == (point.tolist(), schedule.get_last_lr())
    assert not lbfgs.step_was_skipped  # Accelerate sees a call and no more
    factor = 1.0
    lbfgs.step(closure)
    accelerator.scaler.step_scheduler(schedule)
    torch.testing.assert_close(point.detach(), torch.tensor([0.5, 0.5]))
    assert [0.5] == schedule.get_last_lr()


# -- checkpoints ---------------------------------------------------------------------

BAD_IN_BETWEEN = [1.0, INF, 1.0, 1.0, INF, 1.0]


@every_kind
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(kind, tmp_path):
    def fresh():
        return start(GradScaler("cpu", init_scale=1024.0, growth_interval=2), kind)

    through = fresh()
    for number, factor in enumerate(BAD_IN_BETWEEN):
        step(through, factor)
        if number == 2:
            through.accelerator.save_state(str(tmp_path))
            saved = through.accelerator.scaler.state_dict()
    resumed = fresh()
    resumed.accelerator.load_state(str(tmp_path))
    assert saved == resumed.accelerator.scaler.state_dict()
    assert (3, 1, 1) == tuple(
        saved[n] for n in ("total_steps", "skipped_steps", "_growth_tracker")
    )
    for factor in BAD_IN_BETWEEN[3:]:
        step(resumed, factor)
    check_equal(weights(through), weights(resumed))
    assert through.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()
    state = through.accelerator.scaler.state_dict()
    assert state == resumed.accelerator.scaler.state_dict()


@pytest.mark.parametrize("policy", DATA_POLICIES, ids=lambda p: type(p).__name__)
def test_what_a_policy_remembers_survives_a_saved_run(policy, tmp_path):
    through = start(GradScaler("cpu", policy=policy))
    for number, factor in enumerate(BAD_IN_BETWEEN):
        step(through, factor)
        if number == 2:
            through.accelerator.save_state(str(tmp_path))
            saved = through.accelerator.scaler.state_dict()
    resumed = start(GradScaler("cpu", policy=policy))
    if len(policy.init()) > 3:
        assert saved["memory"] != resumed.accelerator.scaler.state_dict()["memory"]
    resumed.accelerator.load_state(str(tmp_path))
    assert saved == resumed.accelerator.scaler.state_dict()
    for factor in BAD_IN_BETWEEN[3:]:
        step(resumed, factor)
    check_equal(weights(through), weights(resumed))
    state = through.accelerator.scaler.state_dict()
    assert state == resumed.accelerator.scaler.state_dict()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(torch.amp.GradScaler, GradScaler), (GradScaler, torch.amp.GradScaler)],
)
def test_torchs_and_our_checkpoints_are_each_others(writer, reader, tmp_path):
    written = start(writer("cpu", init_scale=1024.0, growth_interval=5))
    for factor in (1.0, INF, 1.0):
        step(written, factor)
    written.accelerator.save_state(str(tmp_path))
    read = start(reader("cpu"))
    read.accelerator.load_state(str(tmp_path))
    for run in (written, read):
        state = run.accelerator.scaler.state_dict()
        assert (512.0, 1) == (state["scale"], state["_growth_tracker"])
        assert (2.0, 0.5) == (state["growth_factor"], state["backoff_factor"])
        assert 5 == state["growth_interval"]
        step(run)
    check_equal(weights(written), weights(read))


def test_a_policy_stays_where_a_checkpoint_brings_the_numbers(tmp_path):
    written = start(torch.amp.GradScaler("cpu", init_scale=1024.0))
    step(written, INF)
    written.accelerator.save_state(str(tmp_path))
    policy = Dynamic(min_scale=256.0)
    read = start(GradScaler("cpu", policy=policy))
    read.accelerator.load_state(str(tmp_path))
    assert (512.0, policy) == (
        read.accelerator.scaler.get_scale(),
        read.accelerator.scaler.policy,
    )


# -- our optimizers ------------------------------------------------------------------


def test_float16_weights_with_masters_are_trained_and_a_skip_holds_the_schedule():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = GradScaler("cpu", init_scale=8.0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    to_float16(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = Run(accelerator, *accelerator.prepare(model, optimizer, scheduler))
    for factor in (1.0, INF, 1.0):
        before = weights(run)
        step(run, factor)
        assert (factor == INF) == run.optimizer.step_was_skipped
        assert (factor == INF) == all(map(torch.equal, before, weights(run)))
    assert [0.025] == scheduler.get_last_lr()
    assert {2.0} == {state["step"].item() for state in optimizer.state.values()}
