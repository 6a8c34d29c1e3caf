"""Explaining a batch changes nothing, and bad input gets one clear error."""

import copy
import pickle
import random
import sys

import numpy as np
import pytest
from helpers.processes import run_process

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.modules import module as torch_module  # noqa: E402
from torch.optim.optimizer import _global_optimizer_pre_hooks  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    _get_current_dispatch_mode_stack,
)

from lossscale.errors import (  # noqa: E402
    ContextError,
    SettingError,
    SettingTypeError,
)
from lossscale.torch import GradScaler  # noqa: E402


class StepError(Exception):
    """Raised in the middle of a step."""


class Setup:
    """A model with everything that a run could change, after two steps of training."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.Dropout(0.5),
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 6)),
            torch.nn.Linear(6, 2, bias=False),
        )
        self.model[4].weight.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )
        self.scaler = GradScaler("cpu", init_scale=8.0, module=self.model)
        self.batch = torch.randn(5, 6)
        self.forward_backward()
        self.scaler.step(self.optimizer)
        self.scaler.update(2.0**40)
        self.optimizer.zero_grad()
        self.forward_backward()  # gradients that are not finite, not stepped yet

    def forward_backward(self):
        random.random()
        np.random.rand()  # noqa: NPY002  # the global generator
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.batch).float().pow(2).mean()
        self.scaler.scale(loss).backward()

    def write_everywhere(self):
        self.forward_backward()
        self.model[0].weight.data.mul_(2)
        with torch.no_grad():
            self.model[0].bias.add_(1)
        self.model[1].running_mean = torch.zeros(6)
        self.model.eval()
        self.model[0].weight.grad = None

    def raise_in_forward(self):
        self.model[0](self.batch)
        self.model[1](self.batch)
        random.random()
        raise StepError

    def raise_in_module(self):
        handle = self.model[2].register_forward_hook(raise_error)
        try:
            self.forward_backward()
        finally:
            handle.remove()

    def raise_in_backward(self):
        handle = self.model[0].weight.register_hook(raise_error)
        try:
            self.forward_backward()
        finally:
            handle.remove()

    def step_all_of_it(self):
        self.optimizer.zero_grad()
        self.forward_backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.clip_grad_norm_(self.optimizer, 1.0).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def fingerprint(self):
        """Return every bit that must stay."""
        iteration = self.scaler._iteration
        state = {
            "model": self.model.state_dict(),
            "buffers": [id(b) for b in self.model.buffers()],
            "grads": [p.grad for p in self.model.parameters()],
            "versions": [
                p.grad._version for p in self.model.parameters() if p.grad is not None
            ],
            "identities": [id(p.grad) for p in self.model.parameters()],
            "training": [m.training for m in self.model.modules()],
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "attributes": sorted(self.scaler.__dict__),
            "losses": iteration.losses,
            "iteration": id(iteration),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "modes": len(_get_current_dispatch_mode_stack()),
            "hooks": (
                len(torch_module._global_forward_hooks),
                len(torch_module._global_forward_pre_hooks),
                len(_global_optimizer_pre_hooks),
                [len(m._forward_hooks) for m in self.model.modules()],
                [
                    len(p._post_accumulate_grad_hooks or ())
                    for p in self.model.parameters()
                ],
            ),
        }
        return pickle.dumps(copy.deepcopy(to_bytes(state)))


def to_bytes(value):
    """Return nested values with the bytes of tensors: NaN is compared as well."""
    if isinstance(value, torch.Tensor):
        dtype, shape = str(value.dtype), tuple(value.shape)
        return dtype, shape, value.detach().contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: to_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_bytes(item) for item in value]
    return value


def raise_error(*_):
    raise StepError


@pytest.mark.parametrize("name", ["forward_backward", "write_everywhere"])
def test_a_run_leaves_every_bit_as_it_was(name):
    setup = Setup()
    before = setup.fingerprint()
    seen = setup.scaler.explain(getattr(setup, name))
    assert not seen.finite
    assert before == setup.fingerprint()


def test_a_whole_training_step_changes_nothing():
    setup = Setup()
    before = setup.fingerprint()
    seen = setup.scaler.explain(setup.step_all_of_it)
    assert seen.lower_scale_helps
    assert before == setup.fingerprint()


@pytest.mark.parametrize(
    "name", ["raise_in_forward", "raise_in_module", "raise_in_backward"]
)
def test_a_function_that_raises_leaves_every_bit_as_it_was(name):
    setup = Setup()
    before = setup.fingerprint()
    with pytest.raises(StepError):
        setup.scaler.explain(getattr(setup, name))
    assert before == setup.fingerprint()


def test_the_next_step_is_the_one_that_it_would_have_been():
    explained, plain = Setup(), Setup()
    plain_random = torch.get_rng_state()
    explained.scaler.explain(explained.forward_backward)
    torch.set_rng_state(plain_random)
    for setup in (explained, plain):
        torch.set_rng_state(plain_random)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update(8.0)
        setup.optimizer.zero_grad()
        setup.forward_backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
    assert to_bytes(plain.model.state_dict()) == to_bytes(explained.model.state_dict())
    assert plain.scaler.state_dict() == explained.scaler.state_dict()


def test_every_run_draws_the_same_random_numbers():
    setup = Setup()
    drawn = []

    def step():
        drawn.append((torch.rand(()).item(), random.random()))
        setup.forward_backward()

    assert setup.scaler.explain(step).trials
    assert len(drawn) > 1
    assert len(set(drawn)) == 1


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda s: 3, ContextError, "no backward pass"),
        (lambda s: s.model(s.batch).detach(), ContextError, "no backward pass"),
        (lambda s: s.model(s.batch).mean().backward(), ContextError, "not scaled"),
        (lambda s: s.optimizer.step(), ContextError, "step() of AdamW directly"),
    ],
)
def test_a_function_that_is_no_forward_and_backward_pass_is_refused(
    function, error, words
):
    setup = Setup()
    before = setup.fingerprint()
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        setup.scaler.explain(lambda: function(setup))
    assert before == setup.fingerprint()


def test_without_a_model_it_says_what_to_type():
    scaler = GradScaler("cpu")
    with pytest.raises(SettingError, match="module=model"):
        scaler.explain(lambda: None)


def test_a_loss_in_place_of_a_function_is_refused():
    setup = Setup()
    with pytest.raises(SettingTypeError, match="takes a function"):
        setup.scaler.explain(torch.ones(()))
    with pytest.raises(SettingTypeError, match=r"torch\.nn\.Module"):
        setup.scaler.explain(setup.forward_backward, module="model")


def test_the_model_may_be_an_argument():
    setup = Setup()
    scaler = GradScaler("cpu", init_scale=8.0)
    seen = scaler.explain(lambda: setup.model(setup.batch).mean(), module=setup.model)
    assert seen.finite


def test_a_scaler_with_a_model_can_be_pickled():
    setup = Setup()
    again = pickle.loads(pickle.dumps(setup.scaler))  # noqa: S301
    with pytest.raises(SettingError, match="needs the model"):
        again.explain(lambda: None)


def test_a_scaler_does_not_keep_its_model():
    setup = Setup()
    scaler = setup.scaler
    del setup
    with pytest.raises(SettingError, match="Keep a reference to it"):
        scaler.explain(lambda: None)


NOTHING_LOADED = """
import sys
import torch
import lossscale.torch as ls

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = ls.GradScaler("cpu", module=model, on_collapse="explain")
scaler.scale(model(torch.ones(1, 2)).sum()).backward()
scaler.step(optimizer)
scaler.update()
print([name for name in sys.modules if name.startswith("lossscale.torch.explain")])
"""


def test_nothing_of_it_is_imported_by_a_training_step():
    result = run_process([sys.executable, "-c", NOTHING_LOADED], check=True)
    assert result.stdout.strip() == "[]"
