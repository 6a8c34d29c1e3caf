"""What a step adds to the weights, measured by torch's operations, next to NumPy."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers import updates  # noqa: E402
from helpers.optimizers import ONE_OF_EACH, SETTINGS, make_params, set_grads  # noqa: E402

from lossscale.torch import optim  # noqa: E402

EACH = pytest.mark.parametrize("setting", ONE_OF_EACH, ids=str)
KINDS = pytest.mark.parametrize("kind", updates.KINDS)


@KINDS
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_measured_step_says_what_numpy_says(setting, kind):
    updates.check_setting("cpu", setting, kind)


@EACH
def test_groups_and_missing_gradients_are_measured_one_by_one(setting):
    updates.check_groups("cpu", setting)


@EACH
def test_tensors_of_many_sizes_are_measured(setting):
    updates.check_sizes("cpu", setting, 64)


@KINDS
@EACH
def test_measuring_changes_no_bit(setting, kind):
    updates.check_same_bits("cpu", setting, kind)


@EACH
def test_an_update_far_below_its_weight_counts_as_lost(setting):
    updates.check_tiny("cpu", setting)


@EACH
def test_float64_and_complex_parameters_are_measured(setting):
    kinds = [torch.float64, torch.complex64]
    params = [param for kind in kinds for param in make_params(kind, [(3, 4), ()])]
    optimizer = setting.ours(params)
    for number in range(2):
        set_grads(params, number)
        updates.take_measured_step(optimizer)


def test_a_sparse_gradient_is_measured_as_the_dense_one():
    found = []
    for is_sparse in (False, True):
        (weight,) = make_params(shapes=[(4, 3)])
        optimizer = optim.SGD([weight], lr=0.1)
        dense = torch.zeros(4, 3)
        dense[2] = 1.0
        weight.grad = dense.to_sparse(1) if is_sparse else dense
        optimizer.measure_next_update()
        optimizer.step()
        found.append(optimizer.last_update)
    assert found[0] == found[1]


def test_one_step_is_measured_and_its_result_stays_until_the_next():
    (weight,) = make_params(shapes=[(3,)])
    optimizer = optim.AdamW([("w", weight)], lr=0.1)
    assert optimizer.last_update is None
    weight.grad = torch.ones(3)
    optimizer.measure_next_update()
    optimizer.step()
    first = optimizer.last_update
    assert ["w"] == first.names
    optimizer.step()
    assert first == optimizer.last_update
    optimizer.measure_next_update()
    optimizer.step()
    assert first.ratio != optimizer.last_update.ratio


def test_a_request_is_dropped_if_no_step_was_taken():
    (weight,) = make_params(shapes=[(3,)])
    optimizer = optim.SGD([weight], lr=0.1)
    optimizer.measure_next_update()
    assert optimizer.take_measurement() is None
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.last_update is None


def test_a_step_without_any_gradient_has_measured_nothing():
    optimizer = optim.SGD(make_params(), lr=0.1)
    optimizer.measure_next_update()
    optimizer.step()
    assert optimizer.last_update is None


def test_a_closure_is_called_before_anything_is_measured():
    (weight,) = make_params(shapes=[(3,)])
    optimizer = optim.SGD([weight], lr=0.5)

    def closure():
        weight.grad = weight.detach().clone()
        return 1.0

    optimizer.measure_next_update()
    optimizer.step(closure)
    assert [0.5] == optimizer.last_update.ratio


def test_measurements_are_neither_pickled_nor_in_the_state_dict():
    (weight,) = make_params(shapes=[(3,)])
    optimizer = optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.measure_next_update()
    optimizer.step()
    optimizer.measure_next_update()
    assert {"state", "param_groups"} == optimizer.state_dict().keys()
    assert not {"_requested", "_measured"} & optimizer.__getstate__().keys()
