# SPDX-License-Identifier: Apache-2.0
"""`are_identical`: whether two long lists hold the same tensors, quickly.

Comparing lists compares what they hold by identity first, in C: two thousand tensors
take a microsecond, thirty times less than a loop over `is`. Where two tensors are not
the same object, Python goes on to compare their elements; that is refused.
"""

from typing import Any

from torch.overrides import TorchFunctionMode


class _Different(Exception):  # noqa: N818  # a signal, caught where it is expected
    """Raised instead of comparing the elements of tensors."""


class _RefuseToCompute(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise _Different


def are_identical(first: list[Any], second: list[Any]) -> bool:
    """Whether two lists, of tensors or dictionaries with tensors, hold the same ones.

    What is not a tensor is compared by value.
    """
    try:
        with _RefuseToCompute():
            return first == second
    except (_Different, ValueError):  # NumPy's arrays have no one truth value
        return False
