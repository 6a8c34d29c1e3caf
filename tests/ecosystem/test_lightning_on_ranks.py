"""Lightning's Trainer and Fabric with our scalers on two ranks: DDP and FSDP2.

The ranks are processes that talk over gloo, on a CPU. At one step one of them has an
infinite loss, or an infinity in what it has of the gradients; both must skip. torch's
scaler in the same place is what ours is compared with.
"""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from helpers.ranks import Pool, break_gradient, local
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lossscale.torch import GradScaler, ShardedGradScaler

BATCHES, BAD = 5, 1
SCALES = [1024.0, 512.0, 512.0, 512.0, 1024.0]
RATES = [0.05, 0.05, 0.025, 0.0125, 0.00625]
ROWS = torch.randn(2 * BATCHES, 4, 4, generator=torch.Generator().manual_seed(1))
TARGETS = ROWS.sum(2, keepdim=True)
SPREAD = {"data_parallel_size": 2, "tensor_parallel_size": 1}

plain_or_fused = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@pytest.fixture(scope="module")
def ranks():
    pool = Pool(2, launched=True)
    yield pool
    pool.close()


def network():
    """Return a small model with the same weights every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )


def spread(model, mesh):
    """Spread a model over the ranks, by FSDP2."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def made(whose, bad):
    """Return a scaler; where ranks would differ it is given their group."""
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    if whose == "torch's":
        return torch.amp.GradScaler("cpu", **settings)
    if whose == "ours for parts":
        return ShardedGradScaler("cpu", **settings)
    group = torch.distributed.group.WORLD if bad == "gradient" else None
    return GradScaler("cpu", **settings, process_groups=group)


def loss_of(model, batch, bad):
    """Return the loss; on rank 1 it is infinite if it is to be bad."""
    rows, targets = batch
    loss = torch.nn.functional.mse_loss(model(rows).float(), targets)
    return loss * torch.inf if bad and torch.distributed.get_rank() == 1 else loss


def check_skipped(every):
    """Raise unless all ranks have skipped the overflow, and no other."""
    for seen in every:
        assert SCALES == seen["scales"]
        assert RATES == seen["rates"]
        changed = [before != after for before, after in pairwise(seen["weights"])]
        assert [number != BAD for number in range(1, BATCHES)] == changed


# -- the Trainer ---------------------------------------------------------------------


class Model(LightningModule):
    """A small network; notes what there is after every batch, as plain numbers."""

    def __init__(self, way, bad, fused):
        super().__init__()
        self.network, self.way, self.bad, self.fused = network(), way, bad, fused
        self.seen = {"weights": [], "scales": [], "rates": []}

    def configure_model(self):
        if self.way == "FSDP2":
            spread(self.network, self.device_mesh)

    def training_step(self, batch, index):
        return loss_of(self.network, batch, self.bad == "loss" and index == BAD)

    def on_after_backward(self):
        if self.bad in ("gradient", "part") and self.trainer.global_step == BAD:
            break_gradient(self.parameters())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scaler = self.trainer.precision_plugin.scaler
        if isinstance(scaler, GradScaler):
            scaler.step_scheduler(scheduler)
        elif self.trainer.global_step != BAD + 1:  # as if torch's could tell
            scheduler.step()

    def on_train_batch_end(self, *_):
        scaler = self.trainer.precision_plugin.scaler
        self.seen["weights"].append([local(p).tolist() for p in self.parameters()])
        self.seen["scales"].append(scaler.get_scale())
        self.seen["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def train_dataloader(self):
        mine = slice(torch.distributed.get_rank(), None, 2)
        return DataLoader(TensorDataset(ROWS[mine], TARGETS[mine]), batch_size=None)


def trainer_of(way, plugin, epochs=1):
    """Return a trainer of two ranks."""
    strategy = ModelParallelStrategy(**SPREAD) if way == "FSDP2" else "ddp"
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[plugin],
        max_epochs=epochs,
        use_distributed_sampler=False,  # which shuffles, and after a load otherwise
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(way, whose, fused, bad):
    """Train an epoch; return what was seen."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler=made(whose, bad))
    model = Model(way, bad, fused)
    trainer_of(way, plugin).fit(model)
    return model.seen


@plain_or_fused
def test_the_trainer_skips_on_all_ranks_for_the_loss_of_one(ranks, fused):
    found = ranks.run(fit, "DDP", "ours", fused, "loss")
    check_skipped(found)
    assert found[0] == found[1]
    assert ranks.run(fit, "DDP", "torch's", fused, "loss") == found


@plain_or_fused
def test_the_trainer_skips_on_all_ranks_for_a_gradient_of_one(ranks, fused):
    found = ranks.run(fit, "DDP", "ours", fused, "gradient")
    check_skipped(found)
    assert found[0] == found[1]


@plain_or_fused
def test_the_trainer_skips_on_all_ranks_for_a_part_of_one(ranks, fused):
    found = ranks.run(fit, "FSDP2", "ours", fused, "part")
    check_skipped(found)
    assert ranks.run(fit, "FSDP2", "torch's", fused, "part") == found


def fit_again(way, path):
    """Train two epochs; then the second one again, from what the first has saved."""

    def trainer(epochs):
        plugin = MixedPrecision("16-mixed", "cpu", scaler=made("ours", "loss"))
        return trainer_of(way, plugin, epochs), Model(way, "loss", fused=False)

    whole, model = trainer(2)
    whole.fit(model)
    half, first = trainer(1)
    half.fit(first)
    half.save_checkpoint(path)
    second, resumed = trainer(2)
    second.fit(resumed, ckpt_path=path)
    states = [one.precision_plugin.scaler.state_dict() for one in (whole, second)]
    return model.seen, first.seen, resumed.seen, states


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_resumed_trainer_ends_where_the_other_did(ranks, tmp_path, way):
    for whole, first, second, states in ranks.run(fit_again, way, str(tmp_path / "a")):
        for what in ("weights", "scales", "rates"):
            assert whole[what] == first[what] + second[what]
        assert states[0] == states[1]
        assert (2 * BATCHES, 2) == (
            states[1]["total_steps"],
            states[1]["skipped_steps"],
        )


# -- Fabric --------------------------------------------------------------------------


class Run:
    """A run in Fabric, at its first step."""

    def __init__(self, way, whose, bad, *, fused=False):
        self.bad, self.scaler = bad, made(whose, bad)
        strategy = FabricParallel(spread, **SPREAD) if way == "FSDP2" else "ddp"
        plugin = FabricPrecision("16-mixed", "cpu", scaler=self.scaler)
        self.fabric = Fabric(
            accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin]
        )
        self.fabric.launch()
        model = network()
        if way == "FSDP2":  # its parameters are others when it is set up
            model = self.fabric.setup_module(model)
        raw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        if way == "FSDP2":
            self.model, self.optimizer = model, self.fabric.setup_optimizers(raw)
        else:
            self.model, self.optimizer = self.fabric.setup(model, raw)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(raw, 0.5)

    def train(self, steps):
        """Take steps; return what was seen."""
        seen = {"weights": [], "scales": [], "rates": []}
        for number in steps:
            self.optimizer.zero_grad()
            mine = 2 * number + torch.distributed.get_rank()
            batch = ROWS[mine], TARGETS[mine]
            loss = loss_of(self.model, batch, self.bad == "loss" and number == BAD)
            self.fabric.backward(loss)
            if self.bad in ("gradient", "part") and number == BAD:
                break_gradient(self.model.parameters())
            self.optimizer.step()
            if isinstance(self.scaler, GradScaler):
                self.scaler.step_scheduler(self.schedule)
            elif number != BAD:
                self.schedule.step()
            parts = [local(p).tolist() for p in self.model.parameters()]
            seen["weights"].append(parts)
            seen["scales"].append(self.scaler.get_scale())
            seen["rates"] += self.schedule.get_last_lr()
        return seen

    def parts(self):
        """Return what a checkpoint is made of."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }


def steps_of_fabric(way, whose, fused, bad):
    """Train a few steps in Fabric."""
    return Run(way, whose, bad, fused=fused).train(range(BATCHES))


@plain_or_fused
@pytest.mark.parametrize(
    ("way", "bad"), [("DDP", "loss"), ("DDP", "gradient"), ("FSDP2", "part")]
)
def test_fabric_skips_on_all_ranks_for_one(ranks, way, bad, fused):
    found = ranks.run(steps_of_fabric, way, "ours", fused, bad)
    check_skipped(found)
    if way == "DDP":
        assert found[0] == found[1]
    if bad != "gradient":  # there the ranks differ with torch's
        assert ranks.run(steps_of_fabric, way, "torch's", fused, bad) == found


def steps_of_fabric_again(way, path):
    """Save in the middle and go on; then go on from there with new objects."""
    run = Run(way, "ours", "loss")
    run.train(range(3))
    run.fabric.save(path, run.parts())
    through = run.train(range(3, BATCHES)), run.scaler.state_dict()
    run = Run(way, "ours", "loss")
    parts = run.parts()
    run.fabric.load(path, parts)
    left = [name for name, part in parts.items() if isinstance(part, dict)]
    for name in left:
        getattr(run, name).load_state_dict(parts[name])
    return through, (run.train(range(3, BATCHES)), run.scaler.state_dict()), left


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_resumed_run_of_fabric_ends_where_the_other_did(ranks, tmp_path, way):
    arguments = way, str(tmp_path / "half")
    for through, again, left in ranks.run(steps_of_fabric_again, *arguments):
        # Of FSDP2's checkpoints Fabric loads models and optimizers, and leaves the rest
        # in the dictionary.
        assert (["schedule", "scaler"] if way == "FSDP2" else []) == left
        assert through == again
        assert (BATCHES, 1) == (again[1]["total_steps"], again[1]["skipped_steps"])


# -- what is refused -----------------------------------------------------------------


def refused_by_its_name():
    """Ask for float16 by a word, where parts are spread over ranks."""
    for kind, strategy in [
        (Trainer, ModelParallelStrategy(**SPREAD)),
        (Fabric, FabricParallel(spread, **SPREAD)),
    ]:
        with pytest.raises(ValueError, match="ParallelStrategy` does not support"):
            kind(accelerator="cpu", devices=2, strategy=strategy, precision="16-mixed")


def test_float16_of_fsdp2_goes_in_by_the_plugin_alone(ranks):
    ranks.run(refused_by_its_name)


def refusals():
    """Return what Lightning and Fabric say to FSDP1 on a CPU."""
    said = []
    for kind, strategy in [
        (Trainer, "fsdp"),
        (Trainer, FSDPStrategy()),
        (Fabric, "fsdp"),
        (Fabric, FabricFSDP()),
    ]:
        with pytest.raises(ValueError, match="GPU") as refused:
            kind(accelerator="cpu", devices=2, strategy=strategy)
        said.append(str(refused.value))
    return said


def test_lightning_refuses_fsdp1_on_a_cpu(ranks):
    for said in ranks.run(refusals):
        for message in said[:2]:
            assert message.startswith("The strategy `fsdp` requires a GPU accelerator")
        for message in said[2:]:
            assert message.startswith(
                "You selected the FSDP strategy but FSDP is only available on GPU."
            )


def fit_with_the_plugin_for_fsdp(fused):
    """Train whole gradients with the plugin for parts; FSDP itself is refused."""
    plugin = FSDPPrecision("16-mixed")
    plugin.scaler = made("ours for parts", None)
    model = Model("DDP", "gradient", fused)
    trainer_of("DDP", plugin).fit(model)
    return model.seen


@plain_or_fused
def test_the_plugin_for_fsdp_skips_on_all_ranks_for_a_gradient_of_one(ranks, fused):
    found = ranks.run(fit_with_the_plugin_for_fsdp, fused)
    check_skipped(found)
    assert found[0] == found[1]
