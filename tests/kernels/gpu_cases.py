"""Gradients, and what their summary must be: the same cases on every device.

What is expected comes from NumPy in float64. The tests run the cases in Triton's
interpreter, with small chunks; on a machine with a GPU they run as they are:

    PYTHONPATH=src:tests python tests/kernels/gpu_cases.py [cuda] [--large]
"""

import math
import random
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from lossscale import Dynamic, Fixed, Signal, presets
from lossscale import numpy as ls
from lossscale.core.validation import FLOAT32_MAX
from lossscale.torch.inspection.request import EPSILON, LIMITS, InspectionRequest
from lossscale.torch.inspection.summary import (
    AMAX,
    CLIP,
    FACTOR,
    FOUND_INF,
    GRAD_SCALE,
    HEADER,
    NAN,
    NORM,
    NOT_MEASURED,
    SCALE,
    TOO_LARGE,
)
from lossscale.torch.scaler.scale_update import (
    ScaleUpdate,
    StateTensors,
    StepOutcome,
    torch_policy,
)

FLOAT32, FLOAT16 = torch.float32, torch.float16
BFLOAT16, FLOAT64 = torch.bfloat16, torch.float64
DTYPES = (FLOAT32, FLOAT16, BFLOAT16, FLOAT64)
CLOSE = 1e-6


class Case(NamedTuple):
    """Gradients with a scale, and what is wanted of them."""

    name: str
    make: Callable[[], list[Any]]
    """Makes the gradients again, on their device."""
    scale: float = 4.0
    request: InspectionRequest = InspectionRequest()
    inverted: bool = False
    bound: float | None = None
    """What the optimizer can hold of an unscaled gradient, if there is a bound."""
    large: bool = False
    """Needs gigabytes, and a GPU. All but a few of the numbers are 0."""


# -- the cases -------------------------------------------------------------------------


def cases(
    device: str,
    *,
    chunk: int | None = None,
    long: int = 4097,
    many: int = 2000,
    large: bool = False,
) -> list[Case]:
    """Return the cases.

    Args:
        device: Where the gradients are.
        chunk: How many numbers one program takes; as the kernels have it unless given.
        long: The size of the longest of the small tensors.
        many: How many tensors there are in the case of many.
        large: Whether to add the cases of more than 2**31 bytes.
    """
    if chunk is None:
        from lossscale.torch.inspection.kernels import launch

        chunk = launch.BLOCK * launch.LOOPS
    making = Making(device)
    every = [
        *_of_sizes(making, chunk, long, many),
        *_of_dtypes(making, chunk),
        *_not_finite(making, chunk),
        *_extreme(making),
        *_clipped(making, chunk),
        *_scaled(making),
        *_beyond_headroom(making, chunk),
    ]
    if large:
        every += _large(making)
    names = [case.name for case in every]
    if len(set(names)) < len(names):
        message = f"two cases have the same name: {sorted(names)}"
        raise AssertionError(message)
    return every


class Making(NamedTuple):
    """Makes gradients on a device."""

    device: str

    def random(self, *sizes: int, dtype=FLOAT32, offset=0, seed=0) -> list[Any]:
        """Return normal numbers; they start `offset` numbers into their storage."""
        rng = np.random.default_rng(seed)
        return [
            self.of(rng.standard_normal(size), dtype=dtype, offset=offset)
            for size in sizes
        ]

    def of(self, numbers: Any, *, dtype=FLOAT32, offset=0) -> Any:
        values = torch.tensor(np.asarray(numbers, np.float64)).to(dtype)
        memory = torch.empty(values.numel() + offset, dtype=dtype, device=self.device)
        return memory[offset:].copy_(values)

    def full(self, size: int, number: float, *, dtype=FLOAT32) -> Any:
        return self.of(np.full(size, number), dtype=dtype)

    def with_one(self, size: int, at: int, number: float, *, dtype=FLOAT32) -> Any:
        tensor = self.full(size, 0.5, dtype=dtype)
        tensor[at] = number
        return tensor

    def transposed(self, rows: int, columns: int, *, dtype=FLOAT32) -> Any:
        (flat,) = self.random(rows * columns, dtype=dtype)
        return flat.view(columns, rows).t()

    def mixed(self, *sizes: int, offset=0) -> list[Any]:
        return [
            gradient
            for at, dtype in enumerate(DTYPES)
            for gradient in self.random(*sizes, dtype=dtype, offset=offset, seed=at)
        ]


def _called(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _of_sizes(making: Making, chunk: int, long: int, many: int) -> Iterable[Case]:
    sizes = (0, 1, 31, long, chunk, chunk + 1, chunk - 1)
    names = ("0", "1", "31", "long", "chunk", "chunk + 1", "chunk - 1")
    for name, size in zip(names, sizes, strict=True):
        yield Case(f"size {name}", lambda size=size: making.random(size))
    for write in (False, True):
        yield Case(
            f"all sizes{' written' * write}",
            lambda: making.random(*sizes),
            scale=3.0,
            request=InspectionRequest(unscale_in_place=write),
        )
    for with_norm in (False, True):
        yield Case(
            f"only empty tensors{' and their norm' * with_norm}",
            lambda: making.random(0, 0),
            request=InspectionRequest(measure_norm=with_norm),
        )
    yield Case(
        "transposed",
        lambda: [making.transposed(7, 19), *making.random(5)],
        scale=3.0,
        request=InspectionRequest(unscale_in_place=True),
    )

    def tiny():
        return [
            making.random(1 + at % 7, dtype=DTYPES[at % 4], seed=at)[0]
            for at in range(many)
        ]

    yield Case("many tiny tensors", tiny, scale=3.0)

    def one_is_nan():
        gradients = tiny()
        gradients[-2][0] = math.nan
        return gradients

    yield Case("many tiny tensors, one NaN", one_is_nan)


def _of_dtypes(making: Making, chunk: int) -> Iterable[Case]:
    sizes = (chunk + 5, 3)
    lists: dict[str, Callable[..., list[Any]]] = {
        _called(dtype): lambda offset=0, dtype=dtype: making.random(
            *sizes, dtype=dtype, offset=offset
        )
        for dtype in DTYPES
    }
    lists["mixed"] = lambda offset=0: making.mixed(*sizes, offset=offset)
    for name, make in lists.items():
        for write in (False, True):
            for inverted in (False, True):
                words = [name, "written" * write, "inverted" * inverted]
                yield Case(
                    " ".join(filter(None, words)),
                    make,
                    scale=3.0,
                    request=InspectionRequest(unscale_in_place=write),
                    inverted=inverted,
                )
        yield Case(
            f"{name} unaligned",
            lambda make=make: make(offset=1),
            scale=3.0,
            request=InspectionRequest(unscale_in_place=True),
        )

    yield Case(
        "aligned next to unaligned",
        lambda: making.random(chunk + 5) + making.random(chunk + 5, offset=1),
    )


def _not_finite(making: Making, chunk: int) -> Iterable[Case]:
    last = chunk  # the only number of a second chunk
    for dtype in DTYPES:
        for name, at, number in (
            ("NaN last", last, math.nan),
            ("inf first", 0, math.inf),
            ("-inf first", 0, -math.inf),
        ):
            yield Case(
                f"{name} {_called(dtype)}",
                lambda at=at, number=number, dtype=dtype: [
                    making.full(3, 0.25, dtype=dtype),
                    making.with_one(chunk + 1, at, number, dtype=dtype),
                ],
            )

    def both():
        gradients = making.mixed(9)
        gradients[1][0] = math.inf
        gradients[3][8] = math.nan
        return gradients

    for norm_type in (2.0, math.inf):
        for max_norm in (1.0, math.inf):
            yield Case(
                f"inf and NaN norm {norm_type} max {max_norm}",
                both,
                request=InspectionRequest(
                    max_norm=max_norm, norm_type=norm_type, measure_norm=True
                ),
            )
    yield Case(
        "inf and NaN written", both, request=InspectionRequest(unscale_in_place=True)
    )


def _extreme(making: Making) -> Iterable[Case]:
    for write in (False, True):
        request = InspectionRequest(unscale_in_place=write, measure_norm=True)
        words = " written" * write
        yield Case(f"zeros{words}", lambda: [making.full(70, 0.0)], request=request)
        for dtype, number in (
            (FLOAT32, 1e-40),
            (FLOAT16, 2.0**-24),
            (BFLOAT16, 2.0**-133),
            (FLOAT64, 1e-310),
        ):
            yield Case(
                f"subnormal {_called(dtype)}{words}",
                lambda number=number, dtype=dtype: [
                    making.of(number * np.arange(70), dtype=dtype)
                ],
                scale=0.25,
                request=request,
            )
        for dtype, number in (
            (FLOAT32, 3e38),
            (FLOAT16, 6e4),
            (BFLOAT16, 3e38),
            (FLOAT64, 1.7e308),
        ):
            yield Case(
                f"overflow by unscaling {_called(dtype)}{words}",
                lambda number=number, dtype=dtype: [
                    making.full(3, 0.25, dtype=dtype),
                    making.full(5, -number, dtype=dtype),
                ],
                scale=0.25,
                request=request,
            )
        for dtype, number in (
            (FLOAT32, 1e25),
            (BFLOAT16, 1e25),
            (FLOAT64, 1e25),
            (FLOAT64, 1e200),
            (FLOAT32, 1e-30),
            (BFLOAT16, 1e-30),
            (FLOAT64, 1e-30),
            (FLOAT64, 1e-200),
        ):
            for scale in (4.0, 3.0):
                yield Case(
                    f"{number} {_called(dtype)} scale {scale:g}{words}",
                    lambda number=number, dtype=dtype: [
                        making.of(number * np.arange(1, 71), dtype=dtype)
                    ],
                    scale=scale,
                    request=request,
                )
    yield Case(
        "written as subnormal numbers",
        lambda: [making.of(1e-30 * np.arange(1, 71))],
        scale=2.0**40,
        request=InspectionRequest(unscale_in_place=True, measure_norm=True),
    )
    yield Case(
        "1e25 and 1e-30 in tensors of their own",
        lambda: [making.full(70, 1e-30), making.full(70, 1e25), *making.random(9)],
    )
    yield Case("beyond float32", lambda: [making.full(3, 1e60, dtype=FLOAT64)])


def _clipped(making: Making, chunk: int) -> Iterable[Case]:
    for norm_type in (2.0, math.inf):
        for max_norm in (1e-3, 0.25, 1e6, 1e39):
            yield Case(
                f"norm {norm_type} clipped to {max_norm}",
                lambda: making.mixed(chunk + 1, 3),
                scale=3.0,
                request=InspectionRequest(max_norm=max_norm, norm_type=norm_type),
            )
    yield Case(
        "norm inf alone",
        lambda: making.mixed(9),
        scale=3.0,
        request=InspectionRequest(norm_type=math.inf, measure_norm=True),
    )
    yield Case(
        "norm inverted and clipped",
        lambda: making.random(chunk + 1, 3),
        scale=3.0,
        request=InspectionRequest(max_norm=0.25),
        inverted=True,
    )
    yield Case(
        "zeros clipped",
        lambda: [making.full(9, 0.0)],
        request=InspectionRequest(max_norm=1.0),
    )
    # Nothing can be clipped if its norm, or what divides it, is beyond float32.
    for max_norm in (math.inf, 1.0):
        yield Case(
            f"norm beyond float32 max {max_norm}",
            lambda: [making.full(9, 1e30, dtype=FLOAT64)],
            scale=2.0**-40,
            request=InspectionRequest(max_norm=max_norm, measure_norm=True),
        )
        for in_optimizer in (False, True):
            yield Case(
                f"divisor beyond float32 max {max_norm / 1e4} {in_optimizer}",
                lambda: [making.full(9, 1e38)],
                scale=2.0**127,
                request=InspectionRequest(
                    max_norm=max_norm / 1e4, as_grad_scale=in_optimizer
                ),
            )
    yield Case(
        "1e25 clipped",
        lambda: [making.full(70, 1e25)],
        request=InspectionRequest(max_norm=1.0),
    )
    yield Case(
        "1e-30 clipped",
        lambda: [making.full(70, 1e-30)],
        request=InspectionRequest(max_norm=1.0),
    )


def _scaled(making: Making) -> Iterable[Case]:
    powers = (-126, -100, -20, 0, 16, 100, 126, 127)
    for scale in [2.0**power for power in powers] + [3.0, 1e-30, 0.1]:
        for write in (False, True):
            yield Case(
                f"scale {scale:g}{' written' * write}",
                lambda scale=scale: [
                    making.of(np.array([1.0, -0.3, 0.0, 2.7e-3]) * min(scale, 1e38)),
                    making.of([scale, 1.0], dtype=FLOAT64),
                ],
                scale=scale,
                request=InspectionRequest(unscale_in_place=write, measure_norm=True),
            )
    for scale in (math.nan, math.inf, -math.inf, 0.0, -4.0, 2.0**-140):
        for name, request in (
            ("read", InspectionRequest()),
            ("written", InspectionRequest(unscale_in_place=True)),
            ("with its norm", InspectionRequest(measure_norm=True)),
            ("clipped", InspectionRequest(max_norm=1.0)),
        ):
            yield Case(
                f"bad scale {scale:g} {name}",
                lambda: [*making.random(5), making.full(3, 0.0)],
                scale=scale,
                request=request,
            )


def _beyond_headroom(making: Making, chunk: int) -> Iterable[Case]:
    def with_one(number):
        return lambda: [making.full(3, 0.25), making.with_one(chunk + 1, 7, number)]

    for name, number in (
        ("at the bound", 400.0),
        ("beyond it", 404.0),
        ("below it, negative", -404.0),
        ("beyond it with inf", math.inf),
        ("beyond it with NaN", math.nan),
    ):
        for write in (False, True):
            yield Case(
                f"headroom: {name}{' written' * write}",
                with_one(number),
                request=InspectionRequest(unscale_in_place=write),
                bound=100.0,
            )
        # What is clipped to the bound, or below it, is never beyond it.
        for max_norm in (100.0, 101.0):
            for norm_type in (2.0, math.inf):
                yield Case(
                    f"headroom: {name} clipped to {max_norm} by norm {norm_type}",
                    with_one(number),
                    request=InspectionRequest(max_norm=max_norm, norm_type=norm_type),
                    bound=100.0,
                )
    yield Case(
        "headroom: many tensors, the last one beyond it",
        lambda: [*making.random(*[3] * 40), making.full(2, 404.0)],
        bound=100.0,
    )
    yield Case(
        "headroom: beyond it, inverted",
        with_one(404.0),
        inverted=True,
        request=InspectionRequest(as_grad_scale=True),
        bound=100.0,
    )


def _large(making: Making) -> Iterable[Case]:
    def zeros_but(size, dtype, *numbers):
        tensor = torch.zeros(size, dtype=dtype, device=making.device)
        for at, number in numbers:
            tensor[at] = number
        return [tensor, *making.random(5)]

    places = (0, 2**29 + 1, 2**30 + 3)
    for name, size, dtype, at in (
        ("more than 2**31 bytes", 2**30 + 7, FLOAT16, places),
        ("more than 2**32 bytes", 2**30 + 7, FLOAT32, places),
        ("more than 2**31 numbers", 2**31 + 7, FLOAT16, (0, 2**31 - 1, 2**31 + 6)),
    ):
        for last in (3.0, math.nan):
            numbers = tuple(zip(at, (1.0, -4.0, last), strict=True))
            yield Case(
                f"{name}, last {last}",
                lambda size=size, dtype=dtype, numbers=numbers: zeros_but(
                    size, dtype, *numbers
                ),
                request=InspectionRequest(unscale_in_place=math.isnan(last)),
                large=True,
            )


# -- what is expected ------------------------------------------------------------------


class Expected(NamedTuple):
    """A summary in float64."""

    usable: bool
    """Whether the scale is of any use."""
    all_finite: bool
    """Whether the scaled gradients are."""
    found: bool
    too_large: bool
    nan: bool
    amax: float
    norm: float
    divisor: float
    factor: float
    scale: float
    clip: float
    amaxes: list[float]


def scale_and_inverse(case: Case) -> tuple[np.float64, np.float32]:
    """Return the scale in float64 and its inverse in float32, as the kernels do."""
    with np.errstate(all="ignore"):
        scale = np.float64(np.float32(case.scale))
        inverse = np.float32(1.0 / scale)
        if case.inverted:
            scale = 1.0 / np.float64(inverse)
    return scale, inverse


def expected(case: Case, gradients: list[Any]) -> Expected:
    """Return the summary of gradients that are in the host's memory."""
    request = case.request
    with np.errstate(all="ignore"):
        scale, inverse = scale_and_inverse(case)
        times = np.float64(inverse)
        arrays = [gradient.double().numpy().ravel() for gradient in gradients]
        came = [np.abs(array).max(initial=0.0) for array in arrays]  # NaN is above all
        limits = [LIMITS[gradient.dtype] for gradient in gradients]
        amaxes = [
            amax
            if math.isnan(amax) or (amax * times <= limit and times > 0.0)
            else np.float64(math.inf)
            for amax, limit in zip(came, limits, strict=True)
        ]
        finite = all(map(math.isfinite, amaxes))
        if request.norm_type == math.inf:
            norm = np.max(amaxes) / scale
        else:
            norm = _euclid(np.concatenate(arrays)) / scale
        clip = np.float64(1.0)
        if request.max_norm < math.inf:
            clip = min(clip, request.max_norm / (norm + EPSILON))
        divisor = np.float32(scale / clip)
        too_large = False
        if case.bound is not None and not request.max_norm <= case.bound:
            too_large = any(amax * times > case.bound for amax in amaxes)
        if request.max_norm < math.inf:
            too_large = too_large or not norm <= FLOAT32_MAX
        too_large = finite and too_large
        if request.as_grad_scale and not too_large:
            finite = finite and divisor <= FLOAT32_MAX
        return Expected(
            usable=bool(0.0 < times < math.inf),
            all_finite=all(map(math.isfinite, came)),
            found=too_large or not finite,
            too_large=too_large,
            nan=any(map(math.isnan, amaxes)),
            amax=_clamp_to_float32(max(filter(math.isfinite, amaxes), default=0.0)),
            norm=float(np.float32(norm)),
            divisor=float(divisor),
            factor=float(np.float32(clip * times)),
            scale=float(np.float32(scale)),
            clip=float(np.float32(clip)),
            amaxes=[_clamp_to_float32(amax) for amax in amaxes],
        )


def _euclid(numbers: Any) -> np.float64:
    """Return a norm whose squares neither overflow nor vanish."""
    amax = np.abs(numbers).max(initial=0.0)
    if amax == 0.0 or not np.isfinite(amax):
        return np.float64(amax)
    return amax * np.sqrt(np.square(numbers / amax).sum())


def _clamp_to_float32(amax: Any) -> float:
    """Return a magnitude in float32; a finite one beyond it is no infinity."""
    narrow = np.float32(amax)
    return FLOAT32_MAX if math.isinf(narrow) and math.isfinite(amax) else float(narrow)


def product(tensor: Any, factor: np.float32) -> Any:
    """Return a tensor times a float32 number: taken in float32, rounded once."""
    with np.errstate(all="ignore"):
        if tensor.dtype is FLOAT64:
            return torch.from_numpy(tensor.numpy() * np.float64(factor))
        return torch.from_numpy(tensor.float().numpy() * factor).to(tensor.dtype)


# -- checking --------------------------------------------------------------------------


def check(case: Case, kernels: Any = None, *, strict: bool = True) -> None:
    """Raise unless the summary of a case, and what is written, are what they must be.

    Args:
        case: One of `cases`.
        kernels: Has `measure` and `multiply_` as `Launcher` does, which it is unless
            given.
        strict: Whether all must be measured, and magnitudes be exact. Without it a
            norm or magnitudes that were not asked for may be left out.
    """
    if kernels is None:
        from lossscale.torch.inspection.kernels.launch import GroupKernels

        kernels = GroupKernels([], [])
    gradients = case.make()
    kernels.set_bounds(
        [LIMITS[g.dtype] if case.bound is None else case.bound for g in gradients]
    )
    device = gradients[0].device
    before = [_numbers(gradient, case) for gradient in gradients]
    want = expected(case, before)
    _, inverse = scale_and_inverse(case)
    given = torch.tensor(
        inverse if case.inverted else case.scale, dtype=FLOAT32, device=device
    )
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy
        buffer = kernels.measure(gradients, given, case.request, inverted=case.inverted)
    _check_summary(case, want, buffer.cpu().tolist(), strict)
    if not want.usable:
        return
    after = [_numbers(gradient, case) for gradient in gradients]
    if case.request.unscale_in_place:
        _check_written(case, [product(tensor, inverse) for tensor in before], after)
        return
    _check_written(case, before, after)
    with np.errstate(all="ignore"):
        kernels.multiply_(gradients, buffer[FACTOR])
    factor = np.float32(buffer[FACTOR].item())
    after = [_numbers(gradient, case) for gradient in gradients]
    _check_written(case, [product(tensor, factor) for tensor in before], after)


def _numbers(gradient: Any, case: Case) -> Any:
    """Return a copy in the host's memory, without the zeros if there are too many."""
    if not case.large:
        return gradient.detach().cpu().clone()
    parts = [part[part != 0].cpu() for part in gradient.split(2**27)]
    return torch.cat(parts)


def _same(what: str, left: float, right: float, within: float = 0.0) -> None:
    """Raise unless two numbers are the same, or close to each other."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return
    tolerance = within * abs(left) + (1e-44 if within else 0.0)
    if not (math.isfinite(left) and abs(left - right) <= tolerance):
        message = f"{what}: expected {left!r}, got {right!r}"
        raise AssertionError(message)


def _check_summary(case: Case, want: Expected, have: list[float], strict: bool) -> None:
    name, amaxes = case.name, have[HEADER:]
    _same(f"{name}: found", float(want.found), have[FOUND_INF])
    _same(f"{name}: too large", float(want.too_large), have[TOO_LARGE])
    if not want.usable:
        _same(f"{name}: found", 1.0, have[FOUND_INF])
        _same(f"{name}: a finite amax", 0.0, float(any(map(math.isfinite, amaxes))))
        return
    _same(f"{name}: NaN", float(want.nan), have[NAN])
    _same(f"{name}: scale", want.scale, have[SCALE])
    exact = strict or not case.request.unscale_in_place
    _check_amaxes(case, want.amaxes, amaxes, strict=strict, exact=exact)
    if strict or (exact and have[AMAX] != NOT_MEASURED):
        _same(f"{name}: amax", want.amax, have[AMAX])
    if strict or case.request.wants_norm:
        if not want.all_finite:
            _same(f"{name}: a finite norm", 0.0, float(math.isfinite(have[NORM])))
        elif strict or not want.found or case.request.norm_type != math.inf:
            _same(f"{name}: norm", want.norm, have[NORM], _norms_close(case))
    if not want.found:
        within = 0.0 if want.clip == 1.0 else CLOSE
        _same(f"{name}: divisor", want.divisor, have[GRAD_SCALE], within)
        _same(f"{name}: factor", want.factor, have[FACTOR], within)
        _same(f"{name}: clip", want.clip, have[CLIP], within)


def _norms_close(case: Case) -> float:
    """Return how close norms must be.

    Where squares leave float32 the numbers are read again, in float64; if they have
    been written meanwhile, they are rounded to their dtype.
    """
    return (
        2.0**-8 if case.request.unscale_in_place and "bfloat16" in case.name else CLOSE
    )


def _check_amaxes(
    case: Case, want: list[float], have: list[float], *, strict: bool, exact: bool
) -> None:
    if not have and not strict:
        if not all(map(math.isfinite, want)):
            message = f"{case.name}: nothing says which tensor is not finite"
            raise AssertionError(message)
        return
    for at, (left, right) in enumerate(zip(want, have, strict=True)):
        if exact or not (math.isfinite(left) and math.isfinite(right)):
            _same(f"{case.name}: top of tensor {at}", left, right)


def _check_written(case: Case, want: list[Any], have: list[Any]) -> None:
    for at, (left, right) in enumerate(zip(want, have, strict=True)):
        if left.shape != right.shape or left.dtype != right.dtype:
            message = f"{case.name}: tensor {at} is {right.dtype} {right.shape}"
            raise AssertionError(message)
        same = (left == right) | (left.isnan() & right.isnan())
        if not same.all():
            place = tuple((~same).nonzero()[0].tolist())
            message = (
                f"{case.name}: tensor {at} at {place}: expected "
                f"{left[place].item()!r}, got {right[place].item()!r}"
            )
            raise AssertionError(message)


def check_reuse(device: str) -> None:
    """Raise unless one launcher serves gradients that change and move."""
    from lossscale.torch.inspection.kernels.launch import GroupKernels

    making, launcher = Making(device), GroupKernels([], [])

    def moved(offset, seed):
        return lambda: making.random(9, 70, offset=offset, seed=seed)

    for seed, offset in enumerate((0, 0, 1, 0, 3)):
        check(Case(f"reused {seed}", moved(offset, seed)), launcher)
    # At the same place, with other numbers; and the counter of programs starts at 0.
    (gradient,) = making.random(70)
    alone = GroupKernels([], [])
    for number in (1.0, math.nan, 2.0, math.inf, 3.0):
        gradient.fill_(number)
        here = Case(f"the same place {number}", lambda: [gradient])
        check(here._replace(request=InspectionRequest(unscale_in_place=True)), alone)


# -- the rule --------------------------------------------------------------------------


def policies() -> dict[str, Any]:
    """Return policies that between them use every switch of the rule."""
    chosen = {
        name: presets.get(name, growth_interval=2, init_scale=64.0)
        for name in presets.PRESETS
    }
    return chosen | {
        "fixed": Fixed(1024.0),
        "hysteresis": Dynamic(hysteresis=3, growth_interval=2, init_scale=64.0),
        "consecutive_overflows": Dynamic(
            hysteresis=2, consecutive_overflows=True, growth_interval=3
        ),
        "floor held": Dynamic(
            init_scale=8.0, min_scale=3.0, at_min="hold", growth_interval=3
        ),
        "floor clamped": Dynamic(init_scale=8.0, min_scale=3.0, growth_interval=3),
        "cap held": Dynamic(init_scale=8.0, max_scale=50.0, growth_interval=1),
        "cap clamped": Dynamic(
            init_scale=8.0, max_scale=50.0, at_max="clamp", growth_interval=1
        ),
        "divided by 3": Dynamic(
            growth_factor=3.0, backoff_divisor=3.0, growth_interval=2
        ),
        "divided by 1.7": Dynamic(
            growth_factor=1.3, backoff_divisor=1.7, growth_interval=1
        ),
        "odd factors": Dynamic(
            growth_factor=1.7, backoff_factor=0.8, growth_interval=2
        ),
        "largest": Dynamic(
            init_scale=2.0**126, max_scale=FLOAT32_MAX, growth_interval=1
        ),
        "smallest": Dynamic(init_scale=2.0**-125, growth_interval=3),
        "late": Dynamic(
            growth_delay="first", growth_interval=2, backoff_resets_hysteresis=False
        ),
        "held on a bad loss": Dynamic(hold_on_nonfinite_loss=True, growth_interval=2),
    }


def first_state(device: str, scale: float, update: ScaleUpdate) -> StateTensors:
    """Return the state that a scaler with such a policy starts with."""
    good, bad = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    settings = update.make_settings(torch.device(device))
    update.write_settings(settings)
    first = torch.full((), scale, device=device)
    return StateTensors(first, good, bad, counters, settings)


def steps(seed: str, count: int) -> list[tuple[bool, bool, bool, bool]]:
    """Return random steps: overflow, skipped, bad loss, held."""
    rng = random.Random(seed)
    rate = rng.choice((0.2, 0.4, 0.6))
    drawn = []
    for _ in range(count):
        found = rng.random() < rate
        skipped, loss = found and rng.random() < 0.8, rng.random() < 0.3
        drawn.append((found, skipped, loss, skipped and rng.random() < 0.3))
    return drawn


def check_policy(device: str, name: str, policy: Any, count: int = 30) -> None:
    """Raise unless the kernel takes the steps of NumPy's function, to the bit."""
    update = ScaleUpdate(policy, in_float64=False)
    state = ls.init(policy)
    here = first_state(device, float(state.scale), update)
    counted = [0, 0, 0]
    for at, (found, skipped, loss, held) in enumerate(steps(name, count)):
        _advance(update, here, found, skipped, loss, held)
        signal = Signal(not found, loss_finite=not loss, too_large=held)
        state = ls.update(policy, state, signal)
        counted = [
            counted[0] + 1,
            counted[1] + skipped,
            counted[2] + 1 if skipped else 0,
        ]
        want = (*(value.item() for value in state), counted)
        have = (*(cell.item() for cell in here[:3]), here.counters.tolist())
        if want != have:
            message = f"{name}: after step {at + 1} expected {want}, got {have}"
            raise AssertionError(message)


def check_wide(device: str, numbers: tuple[float, float, float, int], count=40) -> None:
    """Raise unless torch's arguments give torch's scale and tracker, to the bit."""
    init_scale, growth, backoff, interval = numbers
    update = ScaleUpdate(torch_policy(*numbers), in_float64=True)
    here = first_state(device, init_scale, update)
    scale, tracker = here.scale.clone(), here.good_steps.clone()
    for at, (found, skipped, _, _) in enumerate(steps(str(numbers), count)):
        flag = torch.full((), float(found), device=device)
        torch._amp_update_scale_(scale, tracker, flag, growth, backoff, interval)
        _advance(update, here, found, skipped, None, held=False)
        want = scale.item(), tracker.item()
        have = here.scale.item(), here.good_steps.item()
        if want != have:
            message = f"{numbers}: after step {at + 1} expected {want}, got {have}"
            raise AssertionError(message)


TORCHS_NUMBERS = (
    (65536.0, 2.0, 0.5, 2),
    (65536.0, 1.7, 0.8, 2),
    (3.0, 1.1, 0.3, 1),
    (2.0**126, 1.7, 0.8, 1),
)
"""Arguments of torch's scaler: the scale, both factors and the interval."""


def _advance(
    update: ScaleUpdate,
    here: StateTensors,
    found: bool,
    skipped: bool,
    loss: Any,
    held: bool,
) -> None:
    """Take a step by the kernel; anything else is an error."""
    device = here.scale.device
    flags = torch.tensor([found, skipped, held], dtype=torch.float32, device=device)
    lost = None if loss is None else torch.full((), float(loss), device=device)
    with np.errstate(all="ignore"):
        update._launch(here, StepOutcome(flags, 1, 2, lost))


# -- the interpreter -------------------------------------------------------------------


def small_chunks(patch: Any, block: int, loops: int, lanes: int) -> None:
    """Make chunks small, so that small tensors have several; for the interpreter.

    Args:
        patch: pytest's `monkeypatch`.
        block: How many numbers are taken at a time.
        loops: How many times.
        lanes: How many chunks or tensors are added up at a time.
    """
    import triton.language as tl

    from lossscale.torch.inspection.kernels import launch, summarize

    patch.setattr(launch, "BLOCK", block)
    patch.setattr(launch, "LOOPS", loops)
    patch.setattr(summarize, "_LANES", tl.constexpr(lanes))


def exact_bfloat16(patch: Any) -> None:
    """Have the interpreter convert bfloat16 as GPUs do.

    Triton 3.9's cuts digits off instead of rounding, and has subnormal ones wrong.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(numbers, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        if source == tl.float32 and target == tl.bfloat16:
            tensor = torch.from_numpy(np.array(numbers, dtype=np.float32))
            return tensor.to(BFLOAT16).view(torch.int16).numpy().view(np.uint16)
        return original(numbers, source, target, mode)

    patch.setattr(interpreter, "_convert_float", convert)


# -- on a GPU --------------------------------------------------------------------------


def every_check(
    device: str, *, large: bool
) -> Iterable[tuple[str, Callable[[], None]]]:
    """Return all checks by name."""
    for case in cases(device, large=large):
        yield case.name, lambda case=case: check(case)
    yield "one launcher for all", lambda: check_reuse(device)
    for name, policy in policies().items():
        yield (
            f"policy {name}",
            lambda name=name, policy=policy: check_policy(device, name, policy, 200),
        )
    for numbers in TORCHS_NUMBERS:
        yield (
            f"torch's {numbers}",
            lambda numbers=numbers: check_wide(device, numbers, 200),
        )


def main(arguments: list[str]) -> int:
    """Run all checks on a device and say which failed."""
    names = [argument for argument in arguments if not argument.startswith("-")]
    device = names[0] if names else "cuda"
    counts = SimpleNamespace(passed=0, failed=0)
    for name, run in every_check(device, large="--large" in arguments):
        try:
            run()
        except Exception as error:  # noqa: BLE001, PERF203  # all of them are shown
            counts.failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
        else:
            counts.passed += 1
    print(f"{counts.passed} passed, {counts.failed} failed")  # noqa: T201
    return 1 if counts.failed or not counts.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
