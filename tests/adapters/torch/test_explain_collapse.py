"""The batch after the collapse alarm is watched, once, while it is trained."""

import math
import pickle
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import (  # noqa: E402
    _get_current_dispatch_mode_stack,
)

from lossscale.errors import CollapseWarning, SettingError  # noqa: E402
from lossscale.torch import GradScaler  # noqa: E402


class Training:
    """A model of two layers, and batches of which any may be bad."""

    def __init__(self, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler(
            "cpu",
            init_scale=1024.0,
            module=self.model,
            max_consecutive_skips=2,
            **settings,
        )
        self.texts = []

    def step(self, value=math.nan):
        numbers = np.ones((3, 4), np.float32)
        numbers[0, 0] = value
        batch = torch.from_numpy(numbers)
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch).mean()).backward()
        self.scaler.step(self.optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.scaler.update()
        self.texts += [
            str(one.message) for one in caught if one.category is CollapseWarning
        ]


def test_the_next_batch_is_explained_once():
    training = Training(on_collapse="explain")
    training.step()
    assert training.texts == []
    training.step()
    assert "2 consecutive steps were skipped" in training.texts[0]
    assert "The next batch is watched" in training.texts[0]
    assert training.scaler.last_explanation is None
    for _ in range(4):
        training.step()
    assert len(training.texts) == 2
    assert "a tensor of the batch" in training.texts[1]
    seen = training.scaler.last_explanation
    assert seen.first.origin == "batch"
    assert seen.loss_finite is False
    assert seen.scale == 256.0  # 1024, halved by the two steps before


def test_nothing_is_left_behind():
    training, plain = Training(on_collapse="explain"), Training()
    for _ in range(4):
        training.step()
        plain.step()
    assert _get_current_dispatch_mode_stack() == []
    assert "scale" not in training.scaler.__dict__
    assert "add" not in training.scaler._history.__dict__
    assert all(not p._post_accumulate_grad_hooks for p in training.model.parameters())


def test_training_is_what_it_is_without():
    training, plain = Training(on_collapse="explain"), Training()
    for value in (1.0, math.nan, math.nan, 2.0, 3.0, math.nan, 1.0):
        training.step(value)
        plain.step(value)
    for expected, weight in zip(
        plain.model.parameters(), training.model.parameters(), strict=True
    ):
        assert torch.equal(expected, weight)
    assert plain.scaler.state_dict() == training.scaler.state_dict()


def test_a_batch_that_is_finite_again_is_said_to_be():
    training = Training(on_collapse="explain")
    for value in (math.nan, math.nan, 1.0):
        training.step(value)
    assert training.scaler.last_explanation.finite
    assert "nothing to explain" in training.texts[1]


def test_the_next_alarm_explains_again():
    training = Training(on_collapse="explain")
    for value in (math.nan, math.nan, 1.0, math.inf, math.inf, math.inf):
        training.step(value)
    assert len(training.texts) == 4
    assert not training.scaler.last_explanation.first.is_nan


def test_it_needs_the_model():
    with pytest.raises(SettingError, match="module=model"):
        GradScaler("cpu", on_collapse="explain")


def test_a_pickled_scaler_warns_and_watches_nothing():
    training = Training(on_collapse="explain")
    training.scaler = pickle.loads(pickle.dumps(training.scaler))  # noqa: S301
    for _ in range(3):
        training.step()
    assert len(training.texts) == 1


def test_the_alarm_names_explain_where_the_loss_is_not_finite():
    training = Training()
    training.step()
    training.step()
    assert "scaler.explain(step_function)" in training.texts[0]


def test_a_scaler_can_be_pickled_while_the_next_batch_is_watched():
    training = Training(on_collapse="explain")
    training.step()
    training.step()
    again = pickle.loads(pickle.dumps(training.scaler))  # noqa: S301
    training.step()
    assert again.get_scale() == 256.0
    assert "scale" not in again.__dict__
    assert training.scaler.last_explanation is not None


def run_until_alarm(on_collapse, make_loss, scale):
    """Return the texts of the warnings of six steps that are all skipped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(
        "cpu",
        init_scale=scale,
        module=model,
        max_consecutive_skips=5,
        on_collapse=on_collapse,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(make_loss(model, scaler)).backward()
            scaler.step(optimizer)
            scaler.update()
    return [str(one.message) for one in caught if one.category is CollapseWarning]


def mean_of(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x).float().mean()


def penalty_of(model, scaler):
    x = torch.ones(4, 8, requires_grad=True)
    loss = mean_of(model, x)
    (gradient,) = scaler.grad(loss, x)
    return loss + gradient.norm(dim=1).pow(2).mean()


def test_the_alarm_does_not_rule_out_the_scale_of_a_gradient_penalty():
    (text,) = run_until_alarm("warn", penalty_of, 2.0**40)
    assert "5 loss" in text
    assert "no scale" not in text
    assert "It is made of gradients (scaler.grad)" in text


def test_a_penalty_after_the_alarm_is_explained_by_the_scale():
    _, text = run_until_alarm("explain", penalty_of, 2.0**40)
    assert "No scale helps" not in text
    assert "The scale is probably too high." in text


def test_a_scale_that_is_too_high_is_said_to_be_still_lowered():
    texts = run_until_alarm(
        "explain", lambda model, _: mean_of(model, torch.ones(4, 8)), 2.0**60
    )
    assert "At a scale of 2^55 the loss was finite" in texts[1]
    assert "The scale is probably too high. It is still being lowered;" in texts[1]
    assert "Compute code outside" not in texts[1]
