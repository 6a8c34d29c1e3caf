# SPDX-License-Identifier: Apache-2.0
"""The update of Adam on a CPU, over a run of tensors that fits into the cache.

It has the arithmetic of torch's foreach step, in the same order, and gives its bits.
What differs is the walk: tensors are taken in runs of a few ten thousand elements, and
larger ones in pieces, so that a run stays in the cache from the cast of its gradients
to the write of its weights. A run of small tensors is copied to one tensor of each
kind, updated there and copied back: that takes fewer calls than an update of each. The
bias corrections are computed once for each count of steps and not for each tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from lossscale.torch import torch_internals as ti
from lossscale.torch.optim.eager import has_duplicates

_PIECE = 2**15
"""How many elements a thread takes; torch gives no thread fewer."""

_SMALL = 2**11
"""Tensors of fewer elements are copied to one. A call takes longer than two copies."""

_ONE = torch.ones((), dtype=torch.float32, device="cpu")
"""Added to many tensors, it takes a third of the time of a Python number."""

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
    params: Tensors
    """The parameters: each is its weight, or the half-precision copy of it."""

    def take(self, indices: Sequence[int]) -> "Columns":
        """Return some of the tensors, in an order."""
        return Columns(*([kind[i] for i in indices] if kind else [] for kind in self))

    def cut(self, start: int, stop: int) -> "Columns":
        """Return a run of the tensors."""
        return Columns(*(kind[start:stop] for kind in self))

    def split(self, index: int, size: int) -> Iterator["Columns"]:
        """Return one of the tensors in pieces; it must have no gaps."""
        pieces = [kind[index].view(-1).split(size) if kind else () for kind in self]
        for number in range(len(pieces[0])):
            yield Columns(*([kind[number]] if kind else [] for kind in pieces))


class RunKey(NamedTuple):
    """What the tensors of a run have in common."""

    step_count: float
    """The number of the step."""
    grad_dtype: torch.dtype
    """The dtype of the gradients."""
    rounded: torch.dtype | None
    """The dtype of the parameters of masters; `None` if there are no masters."""
    is_small: bool
    """Whether the run is copied to one tensor of each kind."""


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
    counts = [step.item() + 1.0 for step in steps]
    corrections = {count: _correct(count, group) for count in set(counts)}
    # A setting that is no number has raised by now, and no step was counted.
    ti.foreach_add_(steps, _ONE, alpha=1.0)
    rounded = [
        None if param is weight else param.dtype
        for param, weight in zip(columns.params, columns.weights, strict=True)
    ]
    grad_dtypes = map(_dtype_of, columns.grads)
    are_small = [weight.numel() < _SMALL for weight in columns.weights]
    keys = list(map(RunKey, counts, grad_dtypes, rounded, are_small))
    kinds = dict.fromkeys(keys)
    if len(kinds) > 1:  # in most models weights and biases alternate
        places = {kind: place for place, kind in enumerate(kinds)}
        order = sorted(range(len(keys)), key=lambda index: places[keys[index]])
        columns, keys = columns.take(order), [keys[index] for index in order]
    for key, run in _runs(columns, keys):
        _update_run(run, key, corrections[key.step_count], group, inverse)


def _correct(count: float, group: Mapping[str, Any]) -> Corrections:
    beta1, beta2 = group["betas"]
    size = group["lr"] / (1 - beta1**count) * -1
    return Corrections(size, (1 - beta2**count) ** 0.5)


def _runs(columns: Columns, keys: Sequence[RunKey]) -> Iterator[tuple[RunKey, Columns]]:
    """Return runs of tensors that have one key, and large tensors in pieces."""
    limit = _PIECE * torch.get_num_threads()
    start, length = 0, 0
    for index, size in enumerate(map(torch.Tensor.numel, columns.weights)):
        is_large = size > limit
        if start < index and (
            is_large or length + size > limit or keys[index] != keys[start]
        ):
            yield keys[start], columns.cut(start, index)
            start, length = index, 0
        length += size
        if is_large and _is_dense(columns, index):
            for piece in columns.split(index, limit):
                yield keys[index], piece
            start, length = index + 1, 0
    if start < len(keys):
        yield keys[start], columns.cut(start, len(keys))


def _is_dense(columns: Columns, index: int) -> bool:
    """Whether all tensors of a parameter can be cut into pieces alike."""
    return all(kind[index].is_contiguous() for kind in columns if kind)


def _update_run(
    run: Columns,
    key: RunKey,
    known: Corrections,
    group: Mapping[str, Any],
    inverse: float | None,
) -> None:
    """Update tensors of one key."""
    dtype = run.weights[0].dtype
    if key.is_small and len(run.weights) > 1:
        flat = _flatten(run)
        _update_tensors(flat, _unscale(flat.grads, dtype, inverse), known, group)
        _write(flat, run, key.rounded)
        return
    grads = _unscale(run.grads, dtype, inverse)
    memory = _update_tensors(run, grads, known, group)
    if key.rounded is not None:
        largest = torch.finfo(key.rounded).max  # as `write_weight` limits them
        for half, weight, limited in zip(run.params, run.weights, memory, strict=True):
            half.copy_(torch.clamp(weight, -largest, largest, out=limited))


def _unscale(
    grads: Tensors, dtype: torch.dtype, inverse: float | None
) -> Sequence[torch.Tensor]:
    """Return gradients in a dtype, unscaled; they are left as they are."""
    if grads[0].dtype != dtype:
        grads = [grad.to(dtype) for grad in grads]
    return grads if inverse is None else ti.foreach_mul(grads, inverse)


def _update_tensors(
    run: Columns,
    grads: Sequence[torch.Tensor],
    known: Corrections,
    group: Mapping[str, Any],
) -> Sequence[torch.Tensor]:
    """Update weights and moments; return tensors of their shapes that may be changed.

    Args:
        run: The tensors.
        grads: Their gradients, unscaled.
        known: What the count of steps decides.
        group: The settings.
    """
    weights, means, squares = run.weights, run.means, run.squares
    decay = group["weight_decay"]
    beta1, beta2 = group["betas"]
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
    return divisors


def _flatten(run: Columns) -> Columns:
    """Return a copy of a run: of each kind, one tensor of one dimension."""
    copied = run._replace(params=[])
    return Columns(*([ti.flatten(kind)] if kind else [] for kind in copied))


def _write(flat: Columns, run: Columns, rounded: torch.dtype | None) -> None:
    """Write an updated copy back, and round masters to their parameters.

    Args:
        flat: The copy.
        run: What it was made of.
        rounded: The dtype of the parameters of masters, if there are masters.
    """
    kept = flat._replace(grads=[])
    for copies, kind in zip(kept, run, strict=True):
        for copy in copies:
            ti.foreach_copy_(kind, _view_as(kind, copy))
    if rounded is not None:
        largest = torch.finfo(rounded).max  # as `write_weight` limits them
        halves = flat.weights[0].clamp_(-largest, largest).to(rounded)
        ti.foreach_copy_(run.params, _view_as(run.params, halves))


def _view_as(tensors: Tensors, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a flat tensor that have the shapes of tensors."""
    if {1}.issuperset(map(torch.Tensor.dim, tensors)):  # such as biases
        sizes = list(map(torch.Tensor.numel, tensors))
        return torch.split_with_sizes(flat, sizes)  # in a third of the time
    return ti.unflatten(flat, tensors)
