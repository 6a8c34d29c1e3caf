"""torch: how often a step waits for the device, and `torch.compile`."""

import numpy as np
import pytest
from helpers.keras_backend import BACKEND, QUIET, keras, numpy

if BACKEND != "torch":
    pytest.skip(f"needs the torch backend, this is {BACKEND}", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale.keras import LossScaleOptimizer

pytestmark = QUIET

Original = keras.optimizers.LossScaleOptimizer
WAITS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal")


class Waits(TorchDispatchMode):
    """Counts the operations that copy a number to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().partition("::")[2].partition(".")[0] in WAITS
        return function(*args, **(kwargs or {}))


def waits(make, gradient):
    optimizer = make(keras.optimizers.SGD(0.5))
    variables = [keras.Variable(np.ones(3, np.float32)) for _ in range(5)]
    optimizer.build(variables)
    gradients = [torch.full((3,), gradient) for _ in variables]
    optimizer.apply(gradients, variables)
    with Waits() as mode:
        optimizer.apply(gradients, variables)
    return mode.count


def test_a_step_waits_for_the_device_once_and_keras_own_twice():
    inner = waits(lambda inner: inner, 8.0)  # reads its learning rate
    assert 1 == waits(LossScaleOptimizer, 8.0) - inner
    assert 2 == waits(Original, 8.0) - inner
    assert 1 == waits(LossScaleOptimizer, np.inf)
    assert 1 == waits(Original, np.inf)


def test_scaling_the_loss_and_the_report_do_not_wait():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    loss = torch.ones(())
    with Waits() as mode:
        optimizer.scale_loss(loss)
        report = optimizer.last_step
    assert 0 == mode.count
    with Waits() as mode:
        int(report.skipped_steps)
    assert 1 == mode.count


def test_keras_divides_float16_gradients_in_float16():
    # What was scaled up vanishes again: the reason why ours casts first.
    optimizer = Original(keras.optimizers.SGD(1.0), 2.0**15)
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer.build([variable])
    optimizer.apply([torch.tensor([2.0**-24], dtype=torch.float16)], [variable])
    assert [0.0] == numpy(variable).tolist()


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of many things
def test_a_compiled_step_gives_the_same_weights():
    def step(optimizer, variable, values):
        gradient = torch.tensor(values)
        optimizer.apply([gradient], [variable])

    results = []
    for function in (step, torch.compile(step, backend="eager")):
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0, 2)
        variable = keras.Variable(np.ones(2, np.float32))
        optimizer.build([variable])
        for values in ([8.0, 4.0], [np.inf, 1.0], [4.0, 4.0], [4.0, 8.0]):
            function(optimizer, variable, values)
        results.append((numpy(variable).tolist(), numpy(optimizer.dynamic_scale)))
    assert results[0] == results[1]
    assert ([-0.5, -0.75], 8.0) == results[0]


def test_gradients_that_require_no_grad_leave_no_graph_behind():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    variable = keras.Variable(np.ones(2, np.float32))
    optimizer.build([variable])
    optimizer.scale_loss((variable.value * 2.0).sum()).backward()
    optimizer.apply([variable.value.grad], [variable])
    assert [0.0, 0.0] == numpy(variable).tolist()
    assert all(each.value.grad_fn is None for each in optimizer.variables)
