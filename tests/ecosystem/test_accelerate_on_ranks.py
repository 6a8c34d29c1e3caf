"""Accelerate with our scalers on two ranks: DDP, FSDP2 and FSDP1.

The ranks are processes that talk over gloo, on a CPU. At one step one of them has an
infinite loss, or an infinity in what it has of the gradients; both must skip. torch's
scaler in the same place is what ours is compared with.

On a CPU Accelerate turns on neither float16 (see `test_accelerate.py`) nor FSDP: a
plugin for it is passed over. `start` turns both on, and Accelerate's own code runs from
there.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from helpers.ranks import Pool, break_gradient, local  # noqa: E402

from lossscale import Dynamic  # noqa: E402
from lossscale.torch import GradScaler, ShardedGradScaler  # noqa: E402

VERSIONS = {"DDP": None, "FSDP2": 2, "FSDP1": 1}
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}
STEPS, BAD = 5, 1
SCALES = [1024.0, 512.0, 512.0, 512.0, 1024.0]
RATES = [0.025, 0.025, 0.025 / 4, 0.025 / 16, 0.025 / 64]
"""A prepared schedule, which halves the rate, takes a step for each rank."""
plain_or_fused = pytest.mark.parametrize("kind", ["plain", "fused"])


class Run(NamedTuple):
    """What a run is made of, as `prepare` returned it."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(2, launched=True)
    yield pool
    pool.close()


def turned_on(way):
    """Return an accelerator of a new run, in float16 and FSDP if that is the way."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # of the last run
    # Without a number, "cpu" and "cpu:0" are two devices to FSDP1.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    plugin = None
    if VERSIONS[way]:
        # FSDP1 fails on a CPU at a full state dict, which is its default here.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=VERSIONS[way], state_dict_type="SHARDED_STATE_DICT"
        )
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="fp16", fsdp_plugin=plugin
    )
    accelerator.native_amp = True
    if plugin is not None:
        plugin.set_mixed_precision("fp16")
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerate.PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def made(way, whose, settings):
    """Return the scaler for a way."""
    if whose == "none":
        return None
    if whose == "torch's" and way == "FSDP1":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Its

        return Its("cpu", **settings)
    if whose == "torch's":
        return torch.amp.GradScaler("cpu", **settings)
    return (ShardedGradScaler if way == "FSDP1" else GradScaler)("cpu", **settings)


def start(way, whose="ours", kind="plain", settings=SETTINGS):
    """Return a run at its first step: the same weights every time, a rate of 0.1."""
    accelerator = turned_on(way)
    if settings.get("process_groups") == "all":
        settings = {**settings, "process_groups": torch.distributed.group.WORLD}
    accelerator.scaler = made(way, whose, settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    if way == "FSDP1":  # its parameters are others when it is prepared
        model = accelerator.prepare(model)
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        fused = kind == "fused"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if way == "FSDP1":
        return Run(accelerator, model, *accelerator.prepare(optimizer, scheduler))
    return Run(accelerator, *accelerator.prepare(model, optimizer, scheduler))


def step(run, bad=None, clip=None):
    """Take one step of a loop as Accelerate's users write it; return the norm."""
    rank = torch.distributed.get_rank()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank))
    run.optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(run.model(inputs), inputs.sum(1, keepdim=True))
    if bad == "loss" and rank == 1:
        loss = loss * torch.inf
    run.accelerator.backward(loss)
    if bad == "gradient":
        break_gradient(run.model.parameters())
    norm = 0.0
    if clip == "by Accelerate":
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 0.5)
    elif clip == "by the scaler":
        norm = run.accelerator.scaler.clip_grad_norm_(run.optimizer, 0.5)
    run.optimizer.step()
    run.scheduler.step()
    return float(norm)


def weights(run):
    """Return what this rank has of the weights, as plain numbers."""
    return [local(p.detach()).tolist() for p in run.model.parameters()]


def train(way, whose, kind, bad, settings=SETTINGS, clip=None):
    """Train a few steps, one of them bad; return what was seen after each."""
    run = start(way, whose, kind, settings)
    seen = {"weights": [], "scales": [], "rates": [], "skipped": [], "norms": []}
    for number in range(STEPS):
        norm = step(run, bad if number == BAD else None, clip)
        seen["norms"].append(norm)
        seen["weights"].append(weights(run))
        seen["scales"].append(run.accelerator.scaler.get_scale())
        seen["rates"] += run.scheduler.get_last_lr()
        seen["skipped"].append(run.optimizer.step_was_skipped)
    return seen


def check_skipped(every):
    """Raise unless all ranks have skipped the overflow, and no other."""
    for seen in every:
        assert SCALES == seen["scales"]
        assert [number == BAD for number in range(STEPS)] == seen["skipped"]
        assert pytest.approx(RATES) == seen["rates"]
        changed = [before != after for before, after in pairwise(seen["weights"])]
        assert [number != BAD for number in range(1, STEPS)] == changed


# -- DDP -----------------------------------------------------------------------------


@plain_or_fused
def test_an_infinite_loss_of_one_rank_skips_the_step_on_all(ranks, kind):
    found = ranks.run(train, "DDP", "ours", kind, "loss")
    check_skipped(found)
    assert found[0]["weights"] == found[1]["weights"]
    if kind == "plain":  # torch's scaler does not hold the schedule of a fused one
        assert ranks.run(train, "DDP", "torch's", kind, "loss") == found


@plain_or_fused
def test_a_gradient_that_one_rank_alone_has_wrong_skips_the_step_on_all(ranks, kind):
    settings = {**SETTINGS, "process_groups": "all"}
    found = ranks.run(train, "DDP", "ours", kind, "gradient", settings)
    check_skipped(found)
    assert found[0]["weights"] == found[1]["weights"]


def loss_that_is_bad_on_one_rank(process_group):
    """Skip by a policy that asks whether the loss was finite; return the scale."""
    policy = Dynamic(init_scale=1024.0, hold_on_nonfinite_loss=True)
    settings = {"policy": policy, "process_groups": process_group}
    run = start("DDP", settings=settings)
    step(run, "loss")
    return run.accelerator.scaler.get_scale()


def test_ranks_have_to_be_named_where_the_policy_reads_losses(ranks):
    assert [1024.0, 1024.0] == ranks.run(loss_that_is_bad_on_one_rank, "all")
    # Rank 0 has seen gradients that are not finite, and no reason to keep the scale.
    assert [512.0, 1024.0] == ranks.run(loss_that_is_bad_on_one_rank, None)


# -- FSDP ----------------------------------------------------------------------------


def without_the_switch(version):
    """Return how Accelerate takes a plugin for FSDP on a CPU."""
    turned_on("DDP")
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    return str(accelerator.distributed_type), type(model).__name__


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_passes_over_fsdp_on_a_cpu(ranks, version):
    expected = ("DistributedType.MULTI_CPU", "DistributedDataParallel")
    assert [expected] * 2 == ranks.run(without_the_switch, version)


def kinds_of(way):
    """Return what the model and its first parameter are."""
    run = start(way)
    modules = {type(module).__name__ for module in run.model.modules()}
    (first, *_) = run.model.parameters()
    return sorted(modules), type(first).__name__, first.dtype == torch.float32


def test_the_models_are_sharded_where_it_is_turned_on(ranks):
    for modules, parameter, full in ranks.run(kinds_of, "FSDP2"):
        assert "FSDPSequential" in modules
        assert ("DTensor", True) == (parameter, full)
    for modules, _, full in ranks.run(kinds_of, "FSDP1"):
        assert "FullyShardedDataParallel" in modules
        assert full


@plain_or_fused
@pytest.mark.parametrize("way", ["FSDP2", "FSDP1"])
def test_a_bad_part_of_a_gradient_skips_the_step_on_all_ranks(ranks, way, kind):
    found = ranks.run(train, way, "ours", kind, "gradient")
    check_skipped(found)
    if kind == "plain":
        assert ranks.run(train, way, "torch's", kind, "gradient") == found


@pytest.mark.parametrize("way", VERSIONS)
def test_clipping_goes_by_the_norm_of_the_whole_model(ranks, way):
    ours, own, theirs = (
        ranks.run(train, way, whose, "plain", None, SETTINGS, clip)
        for whose, clip in [
            ("ours", "by Accelerate"),
            ("ours", "by the scaler"),
            ("torch's", "by Accelerate"),
        ]
    )
    assert theirs == ours
    for found in (ours, own):
        assert found[0]["norms"] == found[1]["norms"]
        assert 0.5 < max(found[0]["norms"]) < 100.0  # unscaled, and cut
    assert pytest.approx(theirs[0]["norms"], rel=1e-5) == own[0]["norms"]


# -- checkpoints ---------------------------------------------------------------------


def resumed(way, whose, kind, folder, again):
    """Save in the middle, go on, and go the same way again from what was saved.

    Args:
        way: DDP, FSDP2 or FSDP1.
        whose: The scaler.
        kind: Of optimizer.
        folder: Where to save.
        again: Whether the scaler is loaded once more after everything else.
    """
    run = start(way, whose, kind)
    for number in range(3):
        step(run, "loss" if number == 1 else None)
    run.accelerator.save_state(folder)
    saved = run.accelerator.scaler.state_dict()
    for number in range(3):
        step(run, "loss" if number == 1 else None)
    through = weights(run), run.accelerator.scaler.state_dict()
    run = start(way, whose, kind)
    run.accelerator.load_state(folder)
    if again:
        state = torch.load(Path(folder) / "scaler.pt", weights_only=True)
        run.accelerator.scaler.load_state_dict(state)
    loaded = run.accelerator.scaler.state_dict()
    for number in range(3):
        step(run, "loss" if number == 1 else None)
    return saved, loaded, through, (weights(run), run.accelerator.scaler.state_dict())


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("DDP", "plain"),
        ("DDP", "fused"),
        ("FSDP2", "plain"),
        ("FSDP2", "fused"),
        ("FSDP1", "SGD"),  # AdamW: see below
    ],
)
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(ranks, tmp_path, way, kind):
    arguments = way, "ours", kind, str(tmp_path), way == "FSDP2"
    for saved, loaded, through, end in ranks.run(resumed, *arguments):
        assert (3, 1) == (saved["total_steps"], saved["skipped_steps"])
        assert saved == loaded
        assert (6, 2) == (through[1]["total_steps"], through[1]["skipped_steps"])
        assert through == end


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_loading_counts_as_a_finite_step_under_fsdp2(ranks, tmp_path, whose):
    """The state of a new optimizer is made by a step, which goes through the scaler."""
    arguments = "FSDP2", whose, "plain", str(tmp_path), False
    for saved, loaded, _, _ in ranks.run(resumed, *arguments):
        assert saved["_growth_tracker"] + 1 == loaded["_growth_tracker"]
        if whose == "ours":
            assert saved["total_steps"] + 1 == loaded["total_steps"]


def states_of_adamw(whose, folder):
    """Return of how many parameters there is a state, when saved and when loaded."""
    run = start("FSDP1", whose)
    step(run)
    run.accelerator.save_state(folder)
    saved = len(run.optimizer.state)
    run = start("FSDP1", whose)
    run.accelerator.load_state(folder)
    return saved, len(run.optimizer.state)


@pytest.mark.parametrize("whose", ["ours", "torch's", "none"])
def test_accelerate_restores_nothing_of_an_adamw_under_fsdp1(ranks, tmp_path, whose):
    """It asks a new one what there is to load, and there is nothing yet."""
    for saved, loaded in ranks.run(states_of_adamw, whose, str(tmp_path)):
        assert 0 < saved
        assert 0 == loaded
