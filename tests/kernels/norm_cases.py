"""Normalisation by the kernels, against float64 and casts: the same on every device.

The tests run the checks in Triton's interpreter; on a machine with a GPU:

    PYTHONPATH=src:tests python tests/kernels/norm_cases.py cuda
"""

import copy
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

import lossscale.torch as ls
from lossscale.torch.half_precision import row_norm
from lossscale.torch.half_precision.mixed_norms import MixedLayerNorm, MixedRMSNorm

FLOAT16, FLOAT32, FLOAT64 = torch.float16, torch.float32, torch.float64
LAYERS = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda size: nn.LayerNorm(size, bias=False),
    "LayerNorm without weights": lambda size: nn.LayerNorm(
        size, elementwise_affine=False
    ),
    "RMSNorm": nn.RMSNorm,
    "RMSNorm, epsilon": lambda size: nn.RMSNorm(size, eps=1e-3),
    "RMSNorm without weights": lambda size: nn.RMSNorm(size, elementwise_affine=False),
}
SHAPES = {
    "one row": ((1, 8), 8),
    "odd rows": ((37, 7), 7),
    "three dimensions": ((3, 5, 64), 64),
    "two normalized": ((6, 3, 20), (3, 20)),
    "wide": ((3, 1000), 1000),
}
LARGE = {
    "GPT-2": ((8, 1024, 768), 768),
    "wider than a tile": ((300, 5000), 5000),
    "the widest": ((64, 16384), 16384),
    "many rows": ((70_001, 256), 256),
}


class Counts:
    """How often the kernels were taken."""

    def __init__(self):
        self.calls = 0
        self._original = original = row_norm.PreparedNorm.normalize

        def count(*arguments):
            self.calls += 1
            return original(*arguments)

        row_norm.PreparedNorm.normalize = count

    def close(self):
        row_norm.PreparedNorm.normalize = self._original


def make_layer(make, size, device, seed=0):
    """Return a float32 layer whose weights are not those of the start."""
    torch.manual_seed(seed)
    layer = make(size)
    for param in layer.parameters():
        nn.init.normal_(param, mean=0.5)
    return layer.to(device)


def make_rows(shape, device, dtype=FLOAT16, seed=1):
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(shape, generator=generator) * 3 + 0.5
    return rows.to(device, dtype)


def run(model, rows, grads):
    """Return outputs, and the gradients of the rows and of all parameters."""
    rows = rows.detach().requires_grad_()
    outputs = model(rows)
    outputs.backward(grads.to(outputs.dtype))
    params = [param.grad for param in model.parameters()]
    return [outputs.detach(), rows.grad, *params]


class Outside(nn.Module):
    """A model with a float16 weight, whose normalisation layer alone is called."""

    def __init__(self, layer):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.layer = layer

    def forward(self, rows):
        return self.layer(rows)


def convert(layer):
    """Return a layer as `to_float16` leaves it in a model."""
    model = Outside(copy.deepcopy(layer)).to(next(iter(devices_of(layer))))
    ls.to_float16(model)
    return model.layer


def devices_of(layer):
    return {param.device for param in layer.parameters()} or {torch.device("cpu")}


def unit(values, dtype):
    """Return the distance of the numbers of a dtype at some magnitudes."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.abs().double().clamp(min=info.tiny)))
    return info.eps * torch.exp2(exponent)


def check_layer(make, shape, size, device):
    """Compare outputs and gradients with the same layer in float64.

    Outputs and input gradients are rounded once, to their dtype: half a unit, and what
    float32 arithmetic adds. The gradients of weights are sums in float32.
    """
    layer = make_layer(make, size, device)
    mixed = convert(layer).to(device)
    assert isinstance(mixed, (MixedLayerNorm, MixedRMSNorm))
    rows, grads = make_rows(shape, device), make_rows(shape, device, seed=2)
    counts = Counts()
    try:
        actual = run(mixed, rows, grads)
    finally:
        counts.close()
    assert 1 == counts.calls
    wide = copy.deepcopy(layer).double()
    if isinstance(wide, nn.RMSNorm) and wide.eps is None:
        wide.eps = torch.finfo(FLOAT32).eps  # that of the dtype it computes in
    expected = run(wide, rows.double(), grads.double())
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        assert want.shape == have.shape
        if index < 2:
            assert have.dtype == FLOAT16
            allowed = 0.51 * unit(want, FLOAT16) + 2e-6 * want.abs().max()
        else:
            assert have.dtype == FLOAT32
            # Errors of a sum grow with the root of its length, at the most.
            allowed = 1e-6 * want.abs().max() * max(1.0, rows.numel() ** 0.25)
        error = (have.double() - want).abs()
        assert bool((error <= allowed).all()), (index, error.max(), allowed.min())


def check_repeatable(shape, size, device):
    """Compare two runs bit for bit."""
    mixed = convert(make_layer(nn.LayerNorm, size, device)).to(device)
    rows, grads = make_rows(shape, device), make_rows(shape, device, seed=2)
    first = run(mixed, rows, grads)
    mixed.zero_grad()
    for one, other in zip(first, run(mixed, rows, grads), strict=True):
        assert torch.equal(one, other)


def check_not_finite(device):
    """Infinities and NaN stay in their rows, and reach the gradients of the weights."""
    mixed = convert(make_layer(nn.LayerNorm, 16, device)).to(device)
    rows = make_rows((5, 16), device)
    rows[1, 3], rows[4, 0] = float("inf"), float("nan")
    outputs, input_grads, *params = run(mixed, rows, make_rows((5, 16), device, seed=2))
    for tensor in (outputs, input_grads):
        finite = tensor.isfinite().all(1).tolist()
        assert [True, False, True, True, False] == finite
    weight_grad, bias_grad = params
    assert not weight_grad.isfinite().any()
    assert bias_grad.isfinite().all()


def check_too_large(device):
    """Results beyond the range of float16 are infinite, as casts make them."""
    layer = nn.LayerNorm(4).to(device)
    with torch.no_grad():
        layer.weight.fill_(60000.0)
    mixed = convert(layer).to(device)
    outputs = mixed(torch.tensor([[0.0, 0.0, 0.0, 8.0]], device=device).half())
    assert bool(outputs.isinf().any())
    assert not outputs.isnan().any()


def check_memory_formats(device):
    """Rows with gaps, expanded ones and such that start in between are copied."""
    mixed = convert(make_layer(nn.LayerNorm, 8, device)).to(device)
    base = make_rows((10, 24), device)
    odd = make_rows((81,), device)[1:].view(10, 8)
    for rows in (
        base[:, 3:11],
        base.t()[:8].t()[:, :8],
        odd,
        base[:1, :8].expand(6, 8),
    ):
        grads = make_rows((rows.shape[0], 16), device, seed=2)[:, ::2]
        expected = run(mixed, rows.contiguous(), grads.contiguous())
        mixed.zero_grad()
        actual = run(mixed, rows, grads)
        mixed.zero_grad()
        for want, have in zip(expected, actual, strict=True):
            assert torch.equal(want, have)


def check_frozen(device):
    """What needs no gradient gets none, and the others are the same."""
    layer = make_layer(nn.LayerNorm, 12, device)
    rows, grads = make_rows((9, 12), device), make_rows((9, 12), device, seed=2)
    expected = run(convert(layer).to(device), rows, grads)
    for frozen in ("weight", "bias"):
        mixed = convert(layer).to(device)
        getattr(mixed, frozen).requires_grad_(False)
        actual = run(mixed, rows, grads)
        for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
            if have is None:
                assert ("weight", "bias")[index - 2] == frozen
            else:
                assert torch.equal(want, have)
    with torch.no_grad():
        assert torch.equal(expected[0], convert(layer).to(device)(rows))


def check_second_derivatives(device):
    """The gradients of a gradient penalty are those in float64."""
    layer = make_layer(nn.LayerNorm, 6, device)
    results = []
    for dtype in (FLOAT64, FLOAT16):
        norm = copy.deepcopy(layer).double() if dtype == FLOAT64 else convert(layer)
        rows = make_rows((5, 6), device).to(dtype).requires_grad_()
        weighted = (norm(rows).to(FLOAT64) * torch.arange(6.0, device=device)).sum()
        (grad,) = torch.autograd.grad(weighted, rows, create_graph=True)
        grad.double().square().sum().backward()
        results.append([grad.detach(), rows.grad, norm.weight.grad])
    assert results[1][1] is not None
    for want, have in zip(*results, strict=True):
        error = (have.double() - want).abs().max()
        assert error <= 4e-3 * want.abs().max(), (error, want.abs().max())


def check_create_graph(device):
    """With `create_graph` gradients are counted once, and so are calls of hooks."""
    layer = make_layer(nn.LayerNorm, 8, device)
    results, calls = [], []
    for creates in (False, True):
        norm = convert(layer)
        rows = make_rows((3, 8), device).requires_grad_()
        inner = norm(rows) * 2
        inner.retain_grad()
        inner.register_hook(lambda grad: calls.append(grad.shape))
        loss = (norm(inner).float() * torch.arange(8.0, device=device)).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of reference cycles
            loss.backward(create_graph=creates)
        found = [x.grad.detach() for x in (rows, inner, norm.weight, norm.bias)]
        results.append(found)
    assert 2 == len(calls)
    for want, have in zip(*results, strict=True):
        difference = (have.double() - want.double()).abs().max()
        assert difference <= 4e-3 * want.abs().max()


def check_batched_gradients(device):
    """Several gradients at once, by a vmap of the backward pass alone."""
    norm = convert(make_layer(nn.LayerNorm, 8, device))
    rows = make_rows((3, 8), device).requires_grad_()
    grads, outputs = make_rows((5, 3, 8), device, seed=2), norm(rows)
    wanted = (rows, norm.weight, norm.bias)
    batched = torch.autograd.grad(
        outputs, wanted, grads, is_grads_batched=True, retain_graph=True
    )
    singly = [
        torch.autograd.grad(outputs, wanted, grad, retain_graph=True) for grad in grads
    ]
    for have, *want in zip(batched, *singly, strict=True):
        difference = (have.double() - torch.stack(want).double()).abs().max()
        assert difference <= 2e-3 * have.abs().max()


def check_changes(device):
    """What is other than at the call before is noticed."""
    layer = make_layer(nn.LayerNorm, 8, device)
    model = Outside(copy.deepcopy(layer)).to(device)
    ls.to_float16(model)
    norm, rows = model.layer, make_rows((3, 8), device)
    expected = norm(rows)
    assert torch.equal(expected, norm(torch._neg_view(-rows)))
    grads = make_rows((3, 8), device, seed=2)
    plain = run(norm, rows, grads)[1]
    assert torch.equal(plain, run(norm, rows, torch._neg_view(-grads))[1])
    norm.eps = 1.0
    assert not torch.equal(expected, norm(rows))
    norm.eps = np.float32(layer.eps)
    assert torch.equal(expected, norm(rows))
    model.linear.float()
    assert norm(rows).dtype == FLOAT32
    model.linear.half()
    assert torch.equal(expected, norm(rows))
    for wrong in (4, 16):
        broken = copy.deepcopy(norm)
        broken.weight = nn.Parameter(torch.ones(wrong, device=device))
        try:
            broken(rows)
        except RuntimeError as error:
            assert "weight" in str(error)  # noqa: PT017  # torch's own
        else:
            message = "a weight of another length was read"
            raise AssertionError(message)
    plain_norm = convert(nn.LayerNorm(4, elementwise_affine=False)).to(device)
    halves = rows.view(3, 2, 4)
    plain_norm(halves)
    plain_norm.normalized_shape = (2, 4)
    wide = nn.functional.layer_norm(halves.float(), (2, 4))
    assert bool(((plain_norm(halves) - wide).abs() <= 1e-3).all())


def check_constant_rows(device):
    """Rows of one number have no deviation from their mean, to the bit."""
    for columns in (7, 768, 1000):
        norm = convert(nn.LayerNorm(columns)).to(device)
        values = torch.tensor([0.1, 1.0, 1000.0, 60000.0], device=device)[:, None]
        rows = values.expand(4, columns).to(FLOAT16)
        assert 0.0 == norm(rows).abs().max().item()


def check_copies(device):
    """Copies and pickles of a layer whose kernels have run."""
    norm = convert(make_layer(nn.LayerNorm, 8, device)).to(device)
    rows = make_rows((3, 8), device)
    expected = norm(rows)
    loaded = pickle.loads(pickle.dumps(norm))  # noqa: S301  # its own
    for other in (copy.copy(norm), copy.deepcopy(norm), loaded):
        assert torch.equal(expected, other(rows))
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert torch.equal(expected, norm(rows))
    assert torch.equal(expected, copy.deepcopy(norm)(rows))


def check_wrapped_forward(device):
    """`to_float32` of a layer whose `forward` other code has wrapped, and calls."""
    model = Outside(make_layer(nn.LayerNorm, 8, device)).to(device)
    ls.to_float16(model)
    original = model.layer.forward
    model.layer.forward = lambda rows: original(rows)  # noqa: PLW0108
    rows = make_rows((3, 8), device)
    half = model.layer(rows)
    ls.to_float32(model)
    wide = model.layer(rows.float())
    assert [FLOAT16, FLOAT32] == [half.dtype, wide.dtype]
    assert bool(((half.float() - wide).abs() <= 2e-3 * wide.abs().max()).all())


def check_recomputation(device):
    """Checkpointed layers have the gradients of others."""
    mixed = convert(make_layer(nn.LayerNorm, 8, device)).to(device)
    rows, grads = make_rows((4, 8), device), make_rows((4, 8), device, seed=2)
    expected = run(mixed, rows, grads)
    mixed.zero_grad()

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = mixed

        def forward(self, rows):
            return torch.utils.checkpoint.checkpoint(
                self.layer, rows, use_reentrant=False
            )

    for want, have in zip(expected, run(Recomputed(), rows, grads), strict=True):
        assert torch.equal(want, have)


def check_bfloat16(device):
    """bfloat16 rows are taken in a model whose weights were made bfloat16 by hand."""
    layer = make_layer(nn.LayerNorm, 10, device)
    model = Outside(layer).to(device)
    ls.to_float16(model)
    model.linear.bfloat16()
    rows = make_rows((7, 10), device, torch.bfloat16)
    outputs = model.layer(rows)
    assert outputs.dtype == torch.bfloat16
    wide = nn.functional.layer_norm(rows.float(), (10,), layer.weight, layer.bias)
    error = (outputs.double() - wide.double()).abs()
    assert bool((error <= 0.51 * unit(wide, torch.bfloat16)).all())


def run_under_transforms(layer, rows):
    """Return the results of a layer under what sees its operators, by name."""
    traced = torch.jit.trace(layer, rows, check_trace=False)
    results = {
        "compile": torch.compile(layer, backend="eager", fullgraph=True)(rows),
        "vmap": torch.vmap(layer)(rows),
        "jvp": torch.func.jvp(layer, (rows,), (rows,))[0],
        "trace": traced(rows),
        "fx": torch.fx.symbolic_trace(layer)(rows),
    }
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        results["mode"] = layer(rows)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows, rows)
        results["dual"] = torch.autograd.forward_ad.unpack_dual(layer(dual)).primal
    return results


def check_left_to_torch(device):
    """Compilers, tracers, transforms and modes see torch's operators."""
    mixed = convert(make_layer(nn.LayerNorm, 8, device)).to(device)
    rows = make_rows((4, 8), device)
    expected = mixed.casts.cast_output(
        nn.functional.layer_norm(rows.float(), (8,), mixed.weight, mixed.bias)
    )
    counts = Counts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that tracing is deprecated
            results = run_under_transforms(mixed, rows)
    finally:
        counts.close()
    assert 0 == counts.calls
    for name, have in results.items():
        assert torch.equal(expected, have), name


def check_batch_norm(device):
    """On a GPU batch normalisation takes float16 as it is, and computes in float32."""
    plain = make_layer(nn.BatchNorm2d, 6, device)
    model = Outside(copy.deepcopy(plain)).to(device)
    ls.to_float16(model)
    seen = []
    model.layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rows, grads = (make_rows((5, 6, 9, 9), device, seed=seed) for seed in (1, 2))
    actual = run(model.layer, rows, grads)
    assert (FLOAT16 if torch.device(device).type == "cuda" else FLOAT32) == seen[
        0
    ].dtype
    expected = run(plain.double(), rows.double(), grads.double())
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        allowed = 1e-5 * want.abs().max()
        if index < 2:
            assert have.dtype == FLOAT16
            allowed = allowed + 0.51 * unit(want, FLOAT16)
        assert bool(((have.double() - want).abs() <= allowed).all()), index
    for name, want in plain.named_buffers():
        have = getattr(model.layer, name)
        assert have.dtype in (FLOAT32, torch.int64)
        assert bool(((have - want).abs() <= 1e-5 * want.abs().max()).all()), name


def checks(device, *, large=False) -> Iterable[tuple[str, Callable[[], None]]]:
    """Return all checks, by name."""
    shapes = SHAPES | LARGE if large else SHAPES
    for layer, make in LAYERS.items():
        for name, (shape, size) in shapes.items():
            yield (
                f"{layer}, {name}",
                lambda m=make, s=shape, z=size: check_layer(m, s, z, device),
            )
    for name, (shape, size) in shapes.items():
        yield (
            f"repeatable, {name}",
            lambda s=shape, z=size: check_repeatable(s, z, device),
        )
    for check in (
        check_not_finite,
        check_too_large,
        check_memory_formats,
        check_frozen,
        check_second_derivatives,
        check_create_graph,
        check_batched_gradients,
        check_changes,
        check_constant_rows,
        check_copies,
        check_wrapped_forward,
        check_recomputation,
        check_bfloat16,
        check_left_to_torch,
        check_batch_norm,
    ):
        yield check.__name__, lambda c=check: c(device)


def main(device) -> int:
    failed = 0
    for name, check in checks(device, large=True):
        try:
            check()
        except Exception as error:  # noqa: BLE001, PERF203  # all of them are reported
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")  # noqa: T201
    total = len(list(checks(device, large=True)))
    print(f"{total - failed} of {total} checks passed")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
