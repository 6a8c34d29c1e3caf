# SPDX-License-Identifier: Apache-2.0
"""From what was not finite at the end to the first cause, the same for every framework.

A mask is no cause: its -inf is there on purpose, for a softmax to turn into zeros. It
is one as long as additions, choices and softmaxes read it. A product, a convolution or
a norm that makes a NaN of it has read something that was not meant to be -inf.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar, cast

from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin


class Made(Protocol):
    """A result that was not finite, as frameworks' adapters keep it."""

    @property
    def index(self) -> int:
        """Its position in the order in which results were made."""

    @property
    def operation(self) -> str | None:
        """The framework's name of what made it."""

    @property
    def kind(self) -> Kind | None:
        """What it has that is not finite."""

    @property
    def origin(self) -> Origin | None:
        """What the operation did; `None` if it passed on what it was given."""

    @property
    def bad_parents(self) -> "tuple[Made, ...]":
        """What it was made of that was not finite either."""


Result = TypeVar("Result", bound=Made)


def find_causes(results: Iterable[Result]) -> tuple[Result | None, Result | None]:
    """Return where results first left their format, and where a NaN was made of it.

    Only what reaches one of the results counts: the -inf of a mask that a softmax has
    turned into zeros is not seen.

    Args:
        results: The results that are not finite.

    Returns:
        The first cause; and the first NaN after it, unless the cause is one or there is
        none.
    """
    found = list_ancestors(results)
    makers = sorted((one for one in found if one.origin is not None), key=_index)
    masks = _find_masks(makers)
    faults = [one for one in makers if one not in masks] or makers
    if not faults:
        return None, None
    first = faults[0]
    if _has_nan(first):
        return first, None
    later = (one for one in makers if _has_nan(one) and one.index > first.index)
    return first, next(later, None)


def list_ancestors(results: Iterable[Result]) -> set[Result]:
    """Return results and all that they were made of and that was not finite."""
    seen: set[Result] = set()
    waiting = list(results)
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += _parents_of(one)
    return seen


def _parents_of(one: Result) -> tuple[Result, ...]:
    return cast("tuple[Result, ...]", one.bad_parents)


def _index(one: Made) -> int:
    return one.index


def _has_nan(one: Made) -> bool:
    return one.kind is not None and one.kind.nan


def _find_masks(makers: Iterable[Result]) -> set[Result]:
    """Return those that are -inf on purpose."""
    makers = list(makers)
    masks = {
        one
        for one in makers
        if one.origin in _GIVEN and one.kind is not None and one.kind.is_mask
    }
    for one in makers:
        if _has_nan(one) and not _reads_masks(one):
            masks -= _list_sources(one)
    return masks


def _list_sources(one: Result) -> set[Result]:
    """Return what a result read, through operations that only passed it on."""
    sources: set[Result] = set()
    waiting = list(_parents_of(one))
    seen = set(waiting)
    while waiting:
        parent = waiting.pop()
        if parent.origin is not None:
            sources.add(parent)
            continue
        waiting += [new for new in _parents_of(parent) if new not in seen]
        seen.update(_parents_of(parent))
    return sources


def _reads_masks(one: Made) -> bool:
    """Whether what made a NaN is an operation that masks are for."""
    name = one.operation or ""
    is_attention = name.startswith(("scaled_dot_product", "efficient_attention"))
    return one.origin == "row of -inf" or name in _MASKING or is_attention


_GIVEN: tuple[Origin, ...] = ("constant", "batch", "buffer", "parameter")
"""Where a mask may come from."""

_MASKING = frozenset(
    {
        *("add", "where", "masked_fill", "softmax", "log_softmax", "logsumexp"),
        *("add_any", "select_n"),
        *("AddV2", "Add", "AddN", "Select", "SelectV2", "Softmax", "LogSoftmax"),
    }
)
"""Operations that put a mask onto logits or take it off, by torch's names, JAX's and
TensorFlow's."""
