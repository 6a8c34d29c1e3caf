# SPDX-License-Identifier: Apache-2.0
"""The update of Adam on a CPU, over a run of tensors that fits into the cache.

It has the arithmetic of torch's foreach step, in the same order, and gives its bits.
What differs is the walk: tensors are taken in runs of a few ten thousand elements, and
larger ones in pieces, so that a run stays in the cache from the cast of its gradients
to the write of its weights. The bias corrections are computed once for each count of
steps and not for each tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from lossscale.torch import torch_internals as ti
from lossscale.torch.optim.eager import has_duplicates

_PIECE = 2**15
"""How many elements a thread takes; torch gives no thread fewer."""

_SMALL = 2**12
"""Below so many elements a tensor, one copy of all is cheaper than many calls."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}

Tensors: TypeAlias = list[torch.Tensor]


class Columns(NamedTuple):
    """Tensors, or pieces of them: what an update reads and writes, by kind."""

    weights: Tensors
    """What is updated: masters, or parameters that have none."""
    grads: Tensors
    means: Tensors
    squares: Tensors
    largest: Tensors
    """The largest second moments; empty without amsgrad."""
    halves: list[torch.Tensor | None]
    """The parameter of each master; `None` for a parameter that has none."""

    def cut(self, start: int, stop: int) -> "Columns":
        """Return a run of the tensors."""
        return Columns(
            self.weights[start:stop],
            self.grads[start:stop],
            self.means[start:stop],
            self.squares[start:stop],
            self.largest[start:stop],
            self.halves[start:stop],
        )

    def split(self, index: int, size: int) -> Iterator["Columns"]:
        """Return one of the tensors in pieces; it must have no gaps."""
        half = self.halves[index]
        kinds = [self.weights, self.grads, self.means, self.squares]
        pieces = [kind[index].view(-1).split(size) for kind in kinds]
        largest = self.largest[index].view(-1).split(size) if self.largest else ()
        halves = () if half is None else half.view(-1).split(size)
        for number, own in enumerate(zip(*pieces, strict=True)):
            weights, grads, means, squares = ([piece] for piece in own)
            yield Columns(
                weights,
                grads,
                means,
                squares,
                [largest[number]] if largest else [],
                [halves[number] if halves else None],
            )


class Corrections(NamedTuple):
    """What the count of steps decides."""

    size: float
    """What the quotient of the moments is multiplied by."""
    root: float
    """The square root of the correction of the second moment."""


def can_update(group: Mapping[str, Any], columns: Columns) -> bool:
    """Whether `update` can take these tensors: real float32 or float64 of a CPU.

    Args:
        group: Their settings.
        columns: The tensors.
    """
    if group["foreach"] is not None or group["fused"] or group["capturable"]:
        return False
    settings = (group["lr"], group["weight_decay"], group["eps"], *group["betas"])
    if any(isinstance(setting, torch.Tensor) for setting in settings):
        return False
    dtypes = set(map(_dtype_of, columns.weights))
    kept = columns.means + columns.squares + columns.largest
    used = columns.weights + columns.grads
    return (
        dtypes in ({torch.float32}, {torch.float64})
        and set(map(_dtype_of, kept)) == dtypes
        and _PLAIN.issuperset(map(type, used))
        and all(map(attrgetter("is_cpu"), used))
        and all(map(torch.is_floating_point, columns.grads))
        and set(map(attrgetter("layout"), columns.grads)) == {torch.strided}
        and not has_duplicates(columns.weights)
    )


_dtype_of = attrgetter("dtype")


def update(
    columns: Columns, steps: Tensors, group: Mapping[str, Any], inverse: float | None
) -> None:
    """Take a step of Adam or AdamW.

    Args:
        columns: The tensors.
        steps: The number of steps of each; counted here.
        group: The settings.
        inverse: What the gradients are multiplied by, if they are scaled.
    """
    ti.foreach_add_(steps, 1)
    counts = [step.item() for step in steps]
    known = {count: _correct(count, group) for count in set(counts)}
    for count, run in _runs(columns, counts):
        _update_run(run, known[count], group, inverse)


def _correct(count: float, group: Mapping[str, Any]) -> Corrections:
    beta1, beta2 = group["betas"]
    size = group["lr"] / (1 - beta1**count) * -1
    return Corrections(size, (1 - beta2**count) ** 0.5)


def _runs(columns: Columns, counts: Sequence[float]) -> Iterator[tuple[float, Columns]]:
    """Return runs of tensors of one count of steps, and large tensors in pieces."""
    limit = _PIECE * torch.get_num_threads()
    start, length = 0, 0
    for index, size in enumerate(map(torch.Tensor.numel, columns.weights)):
        is_large = size > limit
        if start < index and (
            is_large or length + size > limit or counts[index] != counts[start]
        ):
            yield counts[start], columns.cut(start, index)
            start, length = index, 0
        length += size
        if is_large and _is_dense(columns, index):
            for piece in columns.split(index, limit):
                yield counts[index], piece
            start, length = index + 1, 0
    if start < len(counts):
        yield counts[start], columns.cut(start, len(counts))


def _is_dense(columns: Columns, index: int) -> bool:
    """Whether all tensors of a parameter can be cut into pieces alike."""
    tensors = [column[index] for column in columns if column]
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _unscale(
    grads: Tensors, dtype: torch.dtype, inverse: float | None
) -> Sequence[torch.Tensor]:
    """Return gradients in a dtype, unscaled; they are left as they are."""
    present = set(map(_dtype_of, grads))
    if present == {dtype}:
        return grads if inverse is None else ti.foreach_mul(grads, inverse)
    are_small = sum(map(torch.Tensor.numel, grads)) < _SMALL * len(grads)
    if inverse is not None and are_small and len(present) == 1:
        # One cast and one product for all of them take half the time.
        flat = ti.flatten(grads).to(dtype).mul_(inverse)
        return ti.unflatten(flat, grads)
    wide = [grad.to(dtype) for grad in grads]
    return wide if inverse is None else ti.foreach_mul(wide, inverse)


def _update_run(
    run: Columns, known: Corrections, group: Mapping[str, Any], inverse: float | None
) -> None:
    """Update tensors of one count of steps."""
    weights, means, squares = run.weights, run.means, run.squares
    decay = group["weight_decay"]
    beta1, beta2 = group["betas"]
    dtype = weights[0].dtype
    grads = _unscale(run.grads, dtype, inverse)
    if group["maximize"]:
        grads = ti.foreach_neg(grads)
    if decay != 0 and group["decoupled_weight_decay"]:
        ti.foreach_mul_(weights, 1 - group["lr"] * decay)
    elif decay != 0:
        grads = ti.foreach_add(grads, weights, alpha=decay)
    ti.foreach_lerp_(means, grads, 1 - beta1)
    ti.foreach_mul_(squares, beta2)
    ti.foreach_addcmul_(squares, grads, grads, 1 - beta2)
    if run.largest:
        ti.foreach_maximum_(run.largest, squares)
    divisors = ti.foreach_sqrt(run.largest or squares)
    ti.foreach_div_(divisors, known.root)
    ti.foreach_add_(divisors, group["eps"])
    ti.foreach_addcdiv_(weights, means, divisors, known.size)
    with_master = [
        (half, weight, divisor)
        for half, weight, divisor in zip(run.halves, weights, divisors, strict=True)
        if half is not None
    ]
    if with_master:
        _write_halves(*map(list, zip(*with_master, strict=True)))


def _write_halves(halves: Tensors, weights: Tensors, memory: Tensors) -> None:
    """Round weights to their half-precision parameters, as `write_weight` does.

    Args:
        halves: The parameters.
        weights: Their masters.
        memory: As many tensors of the same shapes, to write to.
    """
    are_small = sum(map(torch.Tensor.numel, weights)) < _SMALL * len(weights)
    if are_small and _all_fit(halves, weights):
        ti.foreach_copy_(halves, weights)
        return
    for half, weight, limited in zip(halves, weights, memory, strict=True):
        largest = torch.finfo(half.dtype).max
        half.copy_(torch.clamp(weight, -largest, largest, out=limited))


def _all_fit(halves: Tensors, weights: Tensors) -> bool:
    """Whether all weights are in the range of their parameters; False for NaN.

    One check of all takes less time than limiting each of many small tensors.
    """
    largest = min(torch.finfo(dtype).max for dtype in set(map(_dtype_of, halves)))
    flat = ti.flatten(weights)
    if not flat.numel():
        return True
    low, high = flat.aminmax()
    return -largest <= low.item() and high.item() <= largest
