"""Tensors that are hard to measure, and what NumPy finds in them."""

import torch

from lossscale.diagnostics import measure_tensors

_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def as_array(tensor):
    """Return a tensor as a NumPy array.

    NumPy has no bfloat16. Each of its numbers is one of float32's, and subnormal there
    if it is subnormal in bfloat16: the two have the same exponents.
    """
    is_brain = tensor.dtype is torch.bfloat16
    return (tensor.float() if is_brain else tensor).cpu().numpy()


def hard_tensors(dtype, device="cpu"):
    """Return tensors with every kind of number that a format has, by name."""
    limits = torch.finfo(dtype)
    integer = _INTEGERS[dtype]
    generator = torch.Generator().manual_seed(0)
    bits = torch.iinfo(integer)
    smallest = torch.tensor([1, 2, 3], dtype=integer).view(dtype)
    edges = [limits.smallest_normal, limits.max, limits.tiny / 2, 1.0, -1.0, 0.0, -0.0]
    found = {
        "every kind of bits": torch.randint(
            bits.min, bits.max, (5000,), dtype=integer, generator=generator
        ).view(dtype),
        "edges": torch.tensor([*edges, torch.inf, -torch.inf, torch.nan], dtype=dtype),
        "smallest": torch.cat([smallest, -smallest]),
        "not finite": torch.full((3,), torch.nan, dtype=dtype),
        "zeros": torch.zeros(2, 3, dtype=dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "one": torch.tensor(0.75, dtype=dtype),
        "usual": torch.randn(70, 80, generator=generator).mul(1e-4).to(dtype),
        "transposed": torch.randn(5, 7, generator=generator).to(dtype).t(),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def assert_measured_as_numpy_does(found, tensors):
    """Compare every field with that of `measure_tensors`, exactly."""
    expected = measure_tensors({name: as_array(t) for name, t in tensors.items()})
    expected = expected._replace(updates=found.updates)
    for field, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert theirs == ours, field
