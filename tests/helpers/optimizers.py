"""Our optimizers next to torch's: settings, parameters, gradients and comparisons."""

from typing import NamedTuple

import torch

from lossscale.torch import optim

SHAPES = ((7, 9), (9,), (5, 1, 3), (), (0,))


class Setting(NamedTuple):
    """A class by name, and what it is made with."""

    name: str
    arguments: dict

    def __str__(self):
        words = [f"{key}={value}" for key, value in self.arguments.items()]
        return " ".join([self.name, *words])

    def ours(self, params, **more):
        return getattr(optim, self.name)(params, **self.arguments, **more)

    def torchs(self, params, **more):
        return getattr(torch.optim, self.name)(params, **self.arguments, **more)


_ADAM = (
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "betas": (0.5, 0.75)},
    {"maximize": True, "weight_decay": 0.1},
    {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.0},
)
_SGD = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
)
SETTINGS = [
    *(
        Setting(name, {"lr": 0.01} | case)
        for name in ("AdamW", "Adam")
        for case in _ADAM
    ),
    *(Setting("SGD", {"lr": 0.1} | case) for case in _SGD),
]
ONE_OF_EACH = [SETTINGS[3], SETTINGS[6], SETTINGS[12]]


def make_params(dtype=torch.float32, shapes=SHAPES, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in shapes
    ]


def set_grads(params, step, scale=1.0):
    """Give parameters the gradients of a step, the same for every list of a dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(param.device, param.dtype)


def tensors_of(optimizer):
    """Return all parameters and state of an optimizer, by name."""
    found = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        found[f"{number}"] = param.detach()
        for name, value in optimizer.state.get(param, {}).items():
            if value is not None:
                found[f"{number}.{name}"] = value
    return found


def copy_tensors(optimizer):
    return {name: tensor.clone() for name, tensor in tensors_of(optimizer).items()}


def check_equal(expected, actual):
    """Raise unless two dicts of tensors are the same, bit for bit, and in dtype."""
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, name
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs"
        )
