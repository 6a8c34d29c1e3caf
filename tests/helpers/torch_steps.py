"""Small training steps for both classes of GradScaler: torch's own and ours."""

import copy
import math

import pytest
import torch

import lossscale.torch as ls

CLASSES = {"torch": torch.amp.GradScaler, "ours": ls.GradScaler}

both = pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
"""Runs a test with torch's class and with ours."""

FUSED = {
    "SGD": lambda params, **kw: torch.optim.SGD(params, lr=0.5, **kw),
    "momentum": lambda params, **kw: torch.optim.SGD(
        params, lr=0.5, momentum=0.9, **kw
    ),
    "Adam": lambda params, **kw: torch.optim.Adam(params, lr=0.5, **kw),
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, lr=0.5, **kw),
    "Adagrad": lambda params, **kw: torch.optim.Adagrad(params, lr=0.5, **kw),
}
"""Optimizers that have a fused form on a CPU."""


def parameter(values, dtype=torch.float32):
    """Return a parameter of these numbers."""
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def one_weight():
    """Return a parameter of one number, and a plain optimizer of it."""
    weight = parameter([1.0])
    return weight, torch.optim.SGD([weight], lr=1.0)


def init_scale_tensor(scaler):
    """Return a scaler whose tensors are on the CPU."""
    scaler.scale(torch.zeros(()))
    return scaler


def set_grads(parameters, gradients, scale=1.0):
    """Set gradients, multiplied by a scale in their own dtype; `None` for none."""
    for one, gradient in zip(parameters, gradients, strict=True):
        one.grad = None if gradient is None else gradient * scale


def step(scaler, optimizer, gradient, parameters):
    """Take one iteration with the same number in every gradient, still scaled."""
    init_scale_tensor(scaler)
    for one in parameters:
        one.grad = torch.full_like(one, gradient)
    result = scaler.step(optimizer)
    scaler.update()
    return result


def tensors_of(value):
    """Return every tensor of a nested state, in order, as NumPy bytes."""
    if isinstance(value, torch.Tensor):
        dense = value.detach()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        flat = dense.contiguous().resolve_conj().resolve_neg().reshape(-1)
        return [(str(value.dtype), flat.view(torch.uint8).numpy().tobytes())]
    if isinstance(value, dict):
        return [item for key in value for item in tensors_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [item for one in value for item in tensors_of(one)]
    return [value]


def snapshot(optimizer):
    """Return weights and optimizer state, to the bit, to compare with later."""
    weights = [one for group in optimizer.param_groups for one in group["params"]]
    state = [copy.deepcopy(dict(optimizer.state.get(one, {}))) for one in weights]
    return tensors_of(weights), [tensors_of(one) for one in state]


_RAISED = (AssertionError, RuntimeError, ValueError, KeyError, AttributeError)


def result_or_error(call):
    """Return what a call returns, or the kind and text of what it raises."""
    try:
        return ("returned", call())
    except (
        AssertionError,
        RuntimeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:
        return (type(error), str(error))


def ulps(expected, found):
    """Return how many float32 numbers two tensors are apart, at most."""
    first = expected.detach().float().view(torch.int32).long()
    second = found.detach().float().view(torch.int32).long()
    # Of negative numbers the order of the bits is the other way round.
    first = torch.where(first < 0, -(first & 0x7FFFFFFF), first)
    second = torch.where(second < 0, -(second & 0x7FFFFFFF), second)
    return int((first - second).abs().max()) if len(first.reshape(-1)) else 0


BAD = (math.inf, -math.inf, math.nan)
