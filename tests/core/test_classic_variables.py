"""The names and dtypes of variables: what checkpoints are made of."""

import pytest

import lossscale.numpy as ls
from lossscale.core import classic
from lossscale.core.classic import Variable


class Recording(type(ls.DynamicLossScale._binding)):
    """NumPy's binding, which also writes down what variables were asked for."""

    def __init__(self):
        self.asked = []
        self.contexts = []

    def create_variables(self, owner, state, scale, good, bad):
        self.asked.append((scale, good, bad))
        return super().create_variables(owner, state, scale, good, bad)

    def check_context(self, method):
        self.contexts.append(method)


def test_the_exponential_manager_has_the_originals_three():
    binding = Recording()

    class Manager(classic.ExponentialUpdateLossScaleManager):
        _binding = binding

    manager = Manager(8.0, 2)
    expected = (
        Variable("loss_scale", "float32"),
        Variable("good_steps", "int32"),
        Variable("bad_steps", "int32"),
    )
    assert [expected] == binding.asked
    manager.update_loss_scale(True)
    assert ["update_loss_scale"] == binding.contexts


def test_the_dynamic_loss_scale_has_the_originals_two():
    binding = Recording()

    class Scale(classic.DynamicLossScale):
        _binding = binding

    scale = Scale()
    expected = (
        Variable("current_loss_scale", "float32"),
        Variable("good_steps", "int64"),
        None,
    )
    assert [expected] == binding.asked
    scale.update([])
    assert ["update"] == binding.contexts


def test_a_state_that_cannot_be_read_is_left_out_of_repr(monkeypatch):
    scale = ls.DynamicLossScale(8, 2, 2)
    monkeypatch.setattr(
        type(scale._state_variables), "read_for_repr", lambda self: None
    )
    expected = (
        "DynamicLossScale(initial_loss_scale=8.0, increment_period=2, multiplier=2.0)"
    )
    assert expected == repr(scale)


def test_a_context_that_forbids_it_changes_nothing(monkeypatch):
    scale = ls.DynamicLossScale(8, 1, 2)

    def forbid(self, method):
        message = f"call {method} across replicas"
        raise RuntimeError(message)

    monkeypatch.setattr(type(scale._binding), "check_context", forbid)
    with pytest.raises(RuntimeError, match="across replicas"):
        scale.update([])
    assert 8.0 == scale()
