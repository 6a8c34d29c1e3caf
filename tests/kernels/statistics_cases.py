"""Tensor statistics of the kernel, against NumPy: the same cases on every device.

The tests run them in Triton's interpreter; on a machine with a GPU:

    PYTHONPATH=src:tests python tests/kernels/statistics_cases.py cuda
"""

import sys

import torch
from helpers.statistics import assert_measured_as_numpy_does, hard_tensors

from lossscale.torch.inspection.groups import GradientGroups
from lossscale.torch.inspection.statistics import SampledTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sample(tensors):
    """Return the statistics of tensors as the scaler takes them, and their groups."""
    grads = list(tensors.values())
    groups = GradientGroups(grads, [])
    sampled = SampledTensors()
    sampled.add(grads, groups.groups, list(tensors))
    return sampled, groups.groups


def check_dtype(dtype, device):
    """Compare the statistics of tensors of one dtype with NumPy's."""
    tensors = hard_tensors(dtype, device)
    sampled, groups = sample(tensors)
    assert [True] == [group.kernels is not None for group in groups]
    assert_measured_as_numpy_does(sampled.read(), tensors)


def check_mixed(device):
    """Compare the statistics of tensors of all dtypes at once."""
    tensors = {
        f"{dtype}.{name}": tensor
        for dtype in DTYPES
        for name, tensor in hard_tensors(dtype, device).items()
    }
    assert_measured_as_numpy_does(sample(tensors)[0].read(), tensors)


def check_large(device):
    """Compare those of a tensor that takes every program several times."""
    generator = torch.Generator(device).manual_seed(0)
    large = torch.randn(40_000_001, generator=generator, device=device).half()
    tensors = {"large": large, "small": large[:3]}
    assert_measured_as_numpy_does(sample(tensors)[0].read(), tensors)


def check_no_wait():
    """Sample while torch raises an error if the host waits; it arrives later."""
    tensors = hard_tensors(torch.float16, "cuda")
    sample(tensors)  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled, _ = sample(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sampled.is_ready()
    assert_measured_as_numpy_does(sampled.read(), tensors)


def main(device):
    for dtype in DTYPES:
        check_dtype(dtype, device)
    check_mixed(device)
    if device == "cuda":
        check_large(device)
        check_no_wait()
    print(f"tensor statistics on {device}: as NumPy has them")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
