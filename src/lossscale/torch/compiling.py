# SPDX-License-Identifier: Apache-2.0
"""What `torch.compile` is not to trace: looks at gradients, and moves of the scale.

They run as they are between compiled parts, as torch's optimizers do. Traced, they
would be guesses about pointers, and Python numbers that are baked in.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

Method = TypeVar("Method", bound=Callable[..., Any])


def uncompiled(method: Method) -> Method:
    """Return a method that compiled code calls as it is; others pay nothing for it."""
    hidden = _disable_dynamo(method)

    @wraps(method)
    def run(*arguments: Any, **keywords: Any) -> Any:
        call = hidden if torch.compiler.is_compiling() else method
        return call(*arguments, **keywords)

    return cast("Method", run)
