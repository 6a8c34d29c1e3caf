"""Optimizers of torch in the classic wrapper, for several test files."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lossscale.torch.classic as ls  # noqa: E402

BAD = (math.inf, -math.inf, math.nan)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused adam": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "sparse adam": (torch.optim.SparseAdam, {"lr": 0.01}),
}
DENSE = [name for name in OPTIMIZERS if name != "sparse adam"]
VANISHING = ("adam", "amsgrad", "adamw", "adagrad", "rmsprop", "adamax", "nadam")
VANISHING += ("radam", "sparse adam")
"""Those whose usual epsilon is 0 in float16."""


def make_optimizer(name, params, *, dtype=torch.float32):
    kind, options = OPTIMIZERS[name]
    if dtype is torch.float16 and name in VANISHING:
        options = {**options, "eps": 1e-4}
    return kind(params, **options)


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def wrapped(make="sgd", scale=8, dtype=torch.float32, **options):
    weights = [parameter(1.0, 2.0, dtype=dtype), parameter(3.0, dtype=dtype)]
    optimizer = make_optimizer(make, weights, dtype=dtype)
    return ls.LossScaleOptimizer(optimizer, scale, **options), weights


def fingerprint(optimizer, weights):
    """Return everything that a skipped step must leave alone."""
    saved = optimizer.optimizer.state_dict()
    return str((saved, [weight.tolist() for weight in weights]))


def numbers(pairs):
    return [None if gradient is None else gradient.tolist() for gradient, _ in pairs]
