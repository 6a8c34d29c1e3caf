# SPDX-License-Identifier: Apache-2.0
"""`inject` for NumPy: a copy of nested arrays, with a fault at given steps."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lossscale.core import trees
from lossscale.core.state import Array
from lossscale.testing.faults import Fault, FaultValue, check_name


def inject(
    arrays: Any,
    name: str,
    value: FaultValue,
    *,
    step: int,
    steps: int | Iterable[int],
    element: int | None = 0,
) -> Any:
    """Return the same arrays, and at given steps one of them with a fault.

    Nothing that was given is changed.

    Args:
        arrays: Any nesting of dict, list and tuple; gradients, for instance.
        name: Which array, by its path: `"['kernel']"`.
        value: "inf", "-inf", "nan", "huge" (the largest finite number) or a number.
        step: Which step this is.
        steps: The steps at which the fault is written, from 1.
        element: Which number of the array, counted as in `ravel`; `None` for all.

    Raises:
        SettingError: If there is no such array, element, step or fault.
        SettingTypeError: If the array is not floating-point.

    Example:
        >>> import numpy as np
        >>> from lossscale.testing.numpy import inject
        >>> grads = {"kernel": np.ones(3, np.float16)}
        >>> inject(grads, "['kernel']", "inf", step=2, steps=[2, 5])["kernel"].tolist()
        [inf, 1.0, 1.0]
    """
    fault = Fault.check(value, steps, element)
    check_name(name, [path for path, _ in trees.leaves(arrays)], "arrays")

    def write(path: str, leaf: Array) -> Array:
        if path != name:
            return leaf
        result = np.array(leaf)
        fault.check_size(name, result.size)
        number = fault.number(name, str(result.dtype))
        if step in fault.steps:
            where = slice(None) if fault.element is None else fault.element
            result.reshape(-1)[where] = number
        return result

    return trees.map_leaves(write, arrays)
