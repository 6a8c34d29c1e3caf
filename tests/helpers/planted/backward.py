"""Faults that only the backward pass shows: the loss is finite."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.planted.fault import (
    Block,
    autocast_step,
    normal_batch,
    plain_step,
    plant,
)
from lossscale.torch import to_float16


@plant(None, "backward", "overflow", "to", helps=True, scale=2.0**40)
def scale_too_high_for_a_healthy_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return model, autocast_step(model, normal_batch())


@plant(
    "1",
    "backward",
    "overflow",
    "mm",
    helps=True,
    role="parameter gradient",
    tensor="1.weight",
    node="AddmmBackward0",
    scale=1024.0,
)
def weight_gradient_summed_over_a_large_batch():
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 8))

    def loss_of(output):
        return output.float().sum() / 8

    return model, autocast_step(model, torch.ones(2048, 8), loss_of)


@plant(
    "1",
    "backward",
    "overflow",
    "sum",
    helps=True,
    role="parameter gradient",
    tensor="1.bias",
    scale=1024.0,
)
def bias_gradient_summed_over_a_large_batch():
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 8))

    def loss_of(output):
        return output.float().sum() / 8

    return model, autocast_step(model, torch.ones(2048, 8) / 1000, loss_of)


@plant(
    "3",
    "backward",
    "overflow",
    "mm",
    helps=True,
    role="input gradient",
    nan=("2", "inf * 0"),
)
def gradient_that_grows_from_layer_to_layer():
    # Forwards 1/64 at the bottom undoes what the upper layers multiply by.
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    with torch.no_grad():
        for layer, gain in zip(model, (2**-8, 2**-8, 16, 16, 4, 1), strict=True):
            layer.weight.copy_(gain * torch.eye(8))

    def loss_of(output):
        return output.float().sum() / 16

    return model, autocast_step(model, torch.ones(1, 8), loss_of)


@plant(None, "backward", "overflow", "to", helps=True, role="intermediate gradient")
def loss_in_float16():
    model = nn.Sequential(nn.Linear(8, 8))

    def loss_of(output):
        return output.pow(2).mean()  # in float16, which has no 65,536

    return model, autocast_step(model, normal_batch(), loss_of)


@plant(
    None,
    "backward",
    "division by zero",
    "div",
    node="SqrtBackward0",
    nan=(None, "inf * 0"),
)
def root_at_0():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))

    def loss_of(output):
        return output.float().pow(2).sum().sqrt()

    return model, autocast_step(model, torch.zeros(4, 8), loss_of)


@plant("middle", "backward", "division by zero", "rsqrt", node="AcosBackward0")
def acos_at_1():
    model = Block(lambda x: (x * 0 + 1).acos())
    return model, plain_step(model, normal_batch())


class Halve(torch.autograd.Function):
    """Halves; its backward pass divides by the wrong number."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient * 0)


@plant("middle", "backward", "division by zero", "div", node="HalveBackward")
def custom_function_with_a_wrong_backward():
    model = Block(Halve.apply)
    return model, autocast_step(model, normal_batch())


@plant("middle", "forward", "overflow", "exp", nan=("middle", "inf * 0"))
def exp_that_where_hides():
    def hide(x):
        return torch.where(x.detach() > 1e9, (x * 0 + 12).exp(), x)

    model = Block(hide)
    to_float16(model)
    return model, plain_step(model, normal_batch())


@plant("middle", "backward", "0 / 0", "div", node="SqrtBackward0")
def root_that_where_hides():
    def hide(x):
        return torch.where(x.detach() > 1e9, (x * 0).sqrt(), x)

    model = Block(hide)
    return model, plain_step(model, normal_batch())


class Checkpointed(nn.Module):
    """A block whose forward pass runs again in the backward pass."""

    def __init__(self, block, *, use_reentrant):
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


def _checkpointed(*, use_reentrant):
    block = Block(Halve.apply)
    model = nn.Sequential(
        nn.Linear(8, 8),
        Checkpointed(block, use_reentrant=use_reentrant),
        nn.Linear(8, 8),
    )
    return model, autocast_step(model, normal_batch())


@plant("1.block.middle", "backward", "division by zero", "div", node="HalveBackward")
def wrong_backward_in_a_checkpoint():
    return _checkpointed(use_reentrant=False)


@plant("1.block.middle", "backward", "division by zero", "div", node="HalveBackward")
def wrong_backward_in_a_reentrant_checkpoint():
    return _checkpointed(use_reentrant=True)


@plant(
    "0",
    "backward",
    "overflow",
    "add",
    role="parameter gradient",
    helps=True,
    micro_batch=1,
)
def float16_gradients_of_two_micro_batches():
    # Each is 40,000 and fits float16; their sum does not.
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    to_float16(model)
    step = plain_step(model, torch.ones(1, 8), lambda output: output.sum() * 0.61)

    def both(scaler):
        step(scaler)
        step(scaler)

    return model, both


@plant("1", "backward", "overflow", "convolution_backward", helps=True, scale=2.0**14)
def convolution_gradient_overflow():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(1, 2, 3), nn.ReLU())
    nn.init.ones_(model[1].weight)

    def loss_of(output):
        return output.float().mean() * 8

    return model, autocast_step(model, torch.full((1, 1, 9, 9), 100.0), loss_of)


class Amplify(torch.autograd.Function):
    """Returns a view of what it is given; its backward pass multiplies."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e9


class Pass(torch.autograd.Function):
    """Returns what it is given; its backward pass multiplies by a NaN."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class Gate(nn.Module):
    """Does nothing but to apply a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@plant(
    *("1", "backward", "overflow", "mul"),
    node="AmplifyBackward",
    role="input gradient",
    helps=True,
    nan=("0", "inf - inf"),
)
def custom_function_in_a_module_of_its_own():
    model = nn.Sequential(nn.Linear(8, 8), Gate(Amplify.apply), nn.Linear(8, 8))
    return model, autocast_step(model, normal_batch())


@plant("1", "backward", "constant", "mul", node="PassBackward", role="input gradient")
def custom_function_that_returns_its_input():
    model = nn.Sequential(nn.Linear(8, 8), Gate(Pass.apply), nn.Linear(8, 8))
    return model, plain_step(model, normal_batch())


@plant("1.block.1", "backward", "constant", "mul", node="PassBackward")
def custom_function_in_a_checkpoint():
    block = nn.Sequential(nn.Linear(8, 8), Gate(Pass.apply), nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), Checkpointed(block, use_reentrant=False))
    return model, autocast_step(model, normal_batch())


def _step_with_a_penalty(model, gradient_of):
    """Return a step whose loss is made of gradients."""

    def step(scaler):
        batch = normal_batch().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).float().mean()
        (gradient,) = gradient_of(scaler, loss, batch)
        scaler.scale(loss + gradient.norm(dim=1).pow(2).mean()).backward()

    return model, step


def _differentiate_scaled(scaler, loss, batch):
    gradients = torch.autograd.grad(scaler.scale(loss), batch, create_graph=True)
    return [gradient / scaler.get_scale() for gradient in gradients]


def _differentiate(scaler, loss, batch):
    if hasattr(scaler, "grad"):
        return scaler.grad(loss, batch)
    return _differentiate_scaled(scaler, loss, batch)


@plant(None, "backward", "overflow", "to", helps=True, scale=2.0**30)
def gradient_penalty_at_too_high_a_scale():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return _step_with_a_penalty(model, _differentiate)


@plant(None, "backward", "overflow", "to", helps=True, scale=2.0**30)
def gradient_penalty_of_the_recipe():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return _step_with_a_penalty(model, _differentiate_scaled)


@plant(
    *("0", "backward", "changed afterwards", "div"),
    role="parameter gradient",
    tensor="0.weight",
)
def gradient_divided_by_0_after_the_backward_pass():
    model = nn.Sequential(nn.Linear(8, 8))
    step = plain_step(model, normal_batch())

    def step_and_divide(scaler):
        step(scaler)
        for param in model.parameters():
            param.grad.div_(0.0)

    return model, step_and_divide
