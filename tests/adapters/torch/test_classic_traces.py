"""The classic classes on torch replay recordings of TensorFlow's."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers.traces import read  # noqa: E402

import lossscale.torch.classic as ls  # noqa: E402
from lossscale.core.validation import FLOAT32_MAX  # noqa: E402


def usable(row):
    """Whether ours takes the settings of a recording."""
    config = row["config"]
    first = float(config.get("init_loss_scale", config.get("initial_loss_scale")))
    return (
        0 < first <= FLOAT32_MAX
        and config.get("incr_ratio", 2) > 1
        and config.get("decr_ratio", 0.5) < 1
        and config.get("multiplier", 2) > 1
    )


def rows(file, every):
    return [row for row in read(f"tensorflow/{file}") if usable(row)][::every]


def test_the_manager_replays_the_original():
    for row in rows("contrib_exponential.tf1.15.5.eager", 4):
        manager = ls.ExponentialUpdateLossScaleManager(
            **row["config"], at_floor="clamp"
        )
        found = []
        for finite in row["finite"]:
            manager.update_loss_scale(torch.tensor(finite))
            found.append(tuple(manager.state_dict().values()))
        assert list(zip(row["scale"], row["good"], row["bad"], strict=True)) == found


def test_the_loss_scale_replays_the_original():
    for row in rows("dynamic.tf2.3.4.eager", 4):
        loss_scale = ls.DynamicLossScale(**row["config"])
        found = []
        for finite in row["finite"]:
            gradient = torch.tensor(1.0 if finite else math.nan)
            _, should_apply = loss_scale.update({"w": gradient, "b": None})
            found.append((*loss_scale.state_dict().values(), bool(should_apply)))
        recorded = row["scale"], row["good"], row["should_apply"]
        assert list(zip(*recorded, strict=True)) == found


@pytest.mark.parametrize("style", ["apply_gradients", "step"])
def test_the_optimizer_replays_the_original(style):
    """One weight from 0 at rate 1, and gradients of 1, or what was recorded as bad."""
    for row in rows("opt_contrib.tf1.15.5.eager", 4):
        config = dict(row["config"])
        rate = config.pop("learning_rate")
        weight = torch.nn.Parameter(torch.tensor(config.pop("var_init")))
        manager = ls.ExponentialUpdateLossScaleManager(**config, at_floor="clamp")
        optimizer = ls.LossScaleOptimizer(torch.optim.SGD([weight], rate), manager)
        found = []
        for finite in row["finite"]:
            gradient = torch.tensor(1.0 if finite else float(row["bad_value"]))
            if style == "step":
                weight.grad = gradient * manager.get_loss_scale()
                optimizer.step()
            else:
                optimizer.apply_gradients([(gradient, weight)])
            found.append((*manager.state_dict().values(), weight.item()))
        recorded = row["scale"], row["good"], row["bad"], row["var"]
        expected = list(zip(*recorded, strict=True))
        # Beyond 2**126 the reciprocal of a scale is subnormal, and inexact.
        if style == "apply_gradients" or max(row["scale"]) <= 2.0**126:
            assert expected == found
