# SPDX-License-Identifier: Apache-2.0
"""Optimizers that ask for the loss themselves: LBFGS, SAM and their kind.

The closure scales its loss, runs `backward` and returns the loss. After each call the
gradients are unscaled and checked. A gradient that is not finite ends the optimizer's
step where it is: by then it may have moved the weights, so they and the optimizer's
state are put back. So they are if anything is raised in between.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from lossscale.core.errors import ContextError
from lossscale.torch.gradients import parameters


class _NotFiniteError(Exception):
    """Ends an optimizer's step from within its closure."""


def step(
    scaler: Any,
    optimizer: Any,
    closure: Callable[[], Any],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Step an optimizer with a closure; return its result, `None` if skipped.

    Gradients that are there before the call belong to nobody the scaler knows: they
    are left alone, unless `unscale_` was called for them (SAM takes its first step from
    them). If it was, and they are not finite, the closure is not called at all.
    """
    if id(optimizer) in scaler._iteration.sums:
        message = (
            "accumulate() and a closure do not go together: the closure brings its own "
            "gradients. Add the micro-batches up inside the closure."
        )
        raise ContextError(message)
    flags = scaler._found_inf_per_device(optimizer).values()
    if any(flag.item() for flag in flags):
        return None
    before = _Snapshot(optimizer)

    def checked() -> Any:
        scaler._rearm(optimizer)
        with torch.enable_grad():
            loss = closure()
        if scaler._unscale_again(optimizer):
            return loss
        raise _NotFiniteError

    try:
        return optimizer.step(checked, *arguments, **keywords)
    except _NotFiniteError:
        before.restore()
        return None
    except BaseException:
        before.restore()
        raise


class _Snapshot:
    """The weights and the state of an optimizer, to go back to."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._weights = [
            (parameter, parameter.detach().clone())
            for parameter in parameters(optimizer)
        ]
        self._state = {
            key: copy.deepcopy(value) for key, value in optimizer.state.items()
        }

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad():
            for parameter, weight in self._weights:
                parameter.copy_(weight)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
