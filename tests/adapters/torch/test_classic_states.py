"""States of the classic managers and loss scales on torch."""

import copy
import math
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


import lossscale.torch.classic as ls  # noqa: E402
from lossscale.errors import (  # noqa: E402
    GradientError,
    StateError,
)


def moving():
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 2, 3)
    loss_scale = ls.DynamicLossScale(8.0, 2)
    manager.update_loss_scale(True)
    loss_scale.update_from_finite(True)
    return manager, loss_scale


@pytest.mark.parametrize(
    "through",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],  # noqa: S301
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_by_itself(through):
    for original in moving():
        before = original.state_dict()
        other = through(original)
        assert before == other.state_dict()
        update = getattr(other, "update_loss_scale", None) or other.update_from_finite
        update(True)
        assert 16.0 == next(iter(other.state_dict().values()))
        assert before == original.state_dict()
    for fixed in (ls.FixedLossScale(8), ls.FixedLossScaleManager(8)):
        assert {} == through(fixed).state_dict()


def test_a_state_is_plain_numbers_and_comes_back_through_a_file(tmp_path):
    manager, loss_scale = moving()
    assert {"loss_scale": 8.0, "good_steps": 1, "bad_steps": 0} == manager.state_dict()
    assert {"current_loss_scale": 8.0, "good_steps": 1} == loss_scale.state_dict()
    for one, fresh in (
        (manager, ls.ExponentialUpdateLossScaleManager(4.0, 2, 3)),
        (loss_scale, ls.DynamicLossScale(4.0, 2)),
    ):
        torch.save(one.state_dict(), tmp_path / "state")
        fresh.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert one.state_dict() == fresh.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"current_loss_scale": 8.0},
        {"current_loss_scale": 8.0, "good_steps": 0, "bad_steps": 0},
        {"current_loss_scale": math.nan, "good_steps": 0},
        {"current_loss_scale": 0.0, "good_steps": 0},
        {"current_loss_scale": 8.0, "good_steps": -1},
        {"current_loss_scale": "8", "good_steps": 0},
        {"current_loss_scale": torch.ones(2), "good_steps": 0},
    ],
    ids=str,
)
def test_a_foreign_state_is_refused_and_changes_nothing(wrong):
    _, loss_scale = moving()
    before = loss_scale.state_dict()
    with pytest.raises(StateError):
        loss_scale.load_state_dict(wrong)
    assert before == loss_scale.state_dict()
    if wrong:
        with pytest.raises(StateError):
            ls.FixedLossScale(8).load_state_dict(wrong)


def test_an_update_leaves_alone_what_was_read_before():
    weight = torch.ones((), requires_grad=True)
    manager = ls.ExponentialUpdateLossScaleManager(8.0, 1)
    scaled = weight * manager.get_loss_scale()
    manager.update_loss_scale(True)
    scaled.backward()
    assert 8.0 == weight.grad.item()


def test_the_state_moves_to_the_device_of_the_flag():
    loss_scale = ls.DynamicLossScale()
    assert "cpu" == loss_scale().device.type
    loss_scale.update([torch.ones(2, device="meta")])
    assert "meta" == loss_scale().device.type


def test_classes_take_sparse_and_complex_gradients_and_name_others():
    loss_scale = ls.DynamicLossScale(8, 1)
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([3e38, 3e38]), (3,), check_invariants=True
    )
    _, should_apply = loss_scale.update([twice])
    assert not should_apply
    _, should_apply = loss_scale.update([torch.tensor([1 + 2j])])
    assert should_apply
    with pytest.raises(GradientError, match=r"\[0\] is torch.int64"):
        loss_scale.update([torch.tensor([1])])


def test_repr_shows_the_current_state():
    assert repr(ls.DynamicLossScale(8)).startswith(
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=0, "
    )
