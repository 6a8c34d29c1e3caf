"""What an optimizer's step adds to the weights: measured, and by NumPy in float64."""

import math

import numpy as np
import torch

from helpers.optimizers import check_equal, copy_tensors, make_params, set_grads
from lossscale.torch import GradScaler

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
KINDS = {
    "float32": (FLOAT32, False),
    "float16 with masters": (FLOAT16, True),
    "bfloat16 with masters": (BFLOAT16, True),
    "float16": (FLOAT16, False),
    "bfloat16": (BFLOAT16, False),
}
CLOSE = 1e-5
"""The largest relative difference of a ratio: updates are computed in float32."""


def as_float64(tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().cpu().double().numpy()


def reference_update(kind, group, state, weight, grad):
    """Return what a step adds to a weight, in float64.

    Args:
        kind: The name of the optimizer's class.
        group: The settings.
        state: What is kept before the step, by name.
        weight: The weight before the step.
        grad: Its gradient, unscaled.
    """
    rate, decay = float(group["lr"]), group["weight_decay"]
    grad = -grad if group["maximize"] else grad
    if kind == "SGD":
        grad = grad + decay * weight
        used = grad
        if group["momentum"]:
            buffer = state.get("momentum_buffer")
            undampened = 1 - group["dampening"]
            used = (
                grad
                if buffer is None
                else group["momentum"] * buffer + undampened * grad
            )
            if group["nesterov"]:
                used = grad + group["momentum"] * used
        return -rate * used
    decoupled = group["decoupled_weight_decay"]
    if not decoupled:
        grad = grad + decay * weight
    zero, (beta1, beta2) = np.zeros_like(weight), group["betas"]
    mean = beta1 * state.get("exp_avg", zero) + (1 - beta1) * grad
    square = beta2 * state.get("exp_avg_sq", zero) + (1 - beta2) * grad**2
    if group["amsgrad"]:
        square = np.maximum(square, state.get("max_exp_avg_sq", zero))
    count = state.get("step", 0.0) + 1
    root = np.sqrt(square / (1 - beta2**count)) + group["eps"]
    return -rate / (1 - beta1**count) * mean / root - decoupled * rate * decay * weight


def take_measured_step(optimizer, *, scale=None, skip=False):
    """Take a step, and compare what it has measured with NumPy; return that."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = copy_tensors(optimizer)
    grads = [None if p.grad is None else as_float64(p.grad) for p in params]
    device = params[0].device
    optimizer.grad_scale = None if scale is None else torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(float(skip), device=device)
    optimizer.measure_next_update()
    optimizer.step()
    found = optimizer.last_update
    if skip:
        assert found is None
        return None
    present = [index for index, grad in enumerate(grads) if grad is not None]
    assert len(present) == len(found.names)
    for row, index in enumerate(present):
        state = {
            name.partition(".")[2]: as_float64(tensor)
            for name, tensor in before.items()
            if name.startswith(f"{index}.")
        }
        start = as_float64(before[f"{index}"])
        weight = state.get("master_param", start)
        update = reference_update(
            type(optimizer).__name__,
            groups[index],
            state,
            weight,
            grads[index] / (scale or 1.0),
        )
        is_lost = (update != 0) & (start == as_float64(params[index]))
        size = max(1, start.size)
        assert is_lost.sum() / size == found.lost[row], found.names[row]
        norms = np.linalg.norm(update), np.linalg.norm(weight)
        ratio = 0.0 if norms[0] == 0 else norms[0] / norms[1] if norms[1] else math.inf
        assert math.isclose(ratio, found.ratio[row], rel_tol=CLOSE), found.names[row]
        assert f"torch.{found.dtypes[row]}" == str(params[index].dtype.to_real())
        assert ("master_param" in optimizer.state[params[index]]) == (
            found.has_master[row]
        )
    return found


def check_setting(device, setting, kind):
    """Five steps of every kind of parameter, one of them skipped."""
    dtype, masters = KINDS[kind]
    params = make_params(dtype, device=device)
    optimizer = setting.ours(params, master_weights=masters)
    # Without masters torch computes in half precision unless it unscales.
    first = None if dtype == FLOAT32 or masters else 1.0
    for number, scale in enumerate((first, 8.0, 8.0, 3.0, 2.0**-3)):
        set_grads(params, number, scale or 1.0)
        take_measured_step(optimizer, scale=scale, skip=number == 2)


def check_sizes(device, setting, block):
    """Sizes around that of a chunk; in float16, so that something is lost.

    Without an epsilon, the lanes of a chunk that have no element divide 0 by 0.
    """
    shapes = [(size,) for size in (0, 1, block - 1, block, block + 1, 3 * block + 5)]
    params = make_params(FLOAT16, shapes, device)
    optimizer = setting.ours(params, master_weights=True)
    group = optimizer.param_groups[0]
    group |= {"lr": 1e-3} | ({"eps": 0.0} if "eps" in group else {})
    for number in range(2):
        set_grads(params, number)
        with np.errstate(invalid="ignore"):  # Triton's interpreter divides by NumPy
            found = take_measured_step(optimizer)
    assert any(0 < share < 1 for share in found.lost)


def check_groups(device, setting):
    """Groups of several dtypes and rates, and parameters that have no gradient."""
    dtypes = (FLOAT32, FLOAT16, BFLOAT16)
    groups = [
        {"params": make_params(dtype, device=device), "lr": 10.0**-number}
        for number, dtype in enumerate(dtypes, start=1)
    ]
    optimizer = setting.ours(groups, master_weights=True)
    params = [param for group in groups for param in group["params"]]
    for number in range(4):
        set_grads(params, number, 4.0)
        for param in params[number::3]:
            param.grad = None
        take_measured_step(optimizer, scale=4.0)


def check_same_bits(device, setting, kind):
    """Steps that are measured, and the same ones that are not."""
    dtype, masters = KINDS[kind]
    found = []
    for measures in (False, True):
        params = make_params(dtype, device=device)
        optimizer = setting.ours(params, master_weights=masters)
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        for number in range(4):
            set_grads(params, number, 8.0)
            if measures:
                optimizer.measure_next_update()
            optimizer.step()
        found.append(copy_tensors(optimizer))
    check_equal(*found)


def check_tiny(device, setting):
    """An update whose square float32 cannot hold, and a weight that is zero."""
    params = [
        torch.nn.Parameter(torch.full((3,), w, device=device)) for w in (1.0, 0.0)
    ]
    optimizer = setting.ours(params)
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = 1e-30, 0.0
    for param in params:
        param.grad = torch.ones_like(param)
    found = take_measured_step(optimizer)
    assert [1.0, 0.0] == found.lost
    assert 0.0 < found.ratio[0] < 1e-29
    assert math.inf == found.ratio[1]


class Asked:
    """A callback that wants some steps, and keeps the updates of all."""

    def __init__(self, *steps):
        self.steps, self.found = steps, {}

    def wants_statistics(self, step):
        return step in self.steps

    def __call__(self, report):
        found = report.statistics
        self.found[report.index] = None if found is None else found.updates


def check_with_scaler(device, setting):
    """What a scaler reports is what the optimizer has measured by itself."""
    asked = Asked(1, 2, 4)
    params, others = (make_params(FLOAT16, device=device) for _ in range(2))
    optimizer = setting.ours(params, master_weights=True)
    alone = setting.ours(others, master_weights=True)
    names = [(f"w{index}", param) for index, param in enumerate(params)]
    scaler = GradScaler(
        torch.device(device).type,
        init_scale=8.0,
        backoff_factor=1 - 2**-20,
        on_step=asked,
        names=names,
    )
    scaler.scale(torch.ones((), device=device))
    expected = []
    for number in range(4):
        for each in (params, others):
            set_grads(each, number, 8.0)
        params[1].grad = others[1].grad = None
        scale, skip = scaler.get_scale(), number == 1
        expected.append(take_measured_step(alone, scale=scale, skip=skip))
        if skip:
            params[0].grad.view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    scaler.flush()
    # A step that is not asked for has no statistics, and a skipped one no updates.
    assert [None, None] == [asked.found[2], asked.found[3]]
    for number in (1, 4):
        found, alike = asked.found[number], expected[number - 1]
        assert [f"w{index}" for index in (0, 2, 3, 4)] == found.names
        assert alike._replace(names=found.names) == found
