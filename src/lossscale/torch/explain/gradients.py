# SPDX-License-Identifier: Apache-2.0
"""`GradientWatch`: the gradients of parameters, in the order in which they arrive."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lossscale.torch.explain.events import Event
from lossscale.torch.explain.kinds import is_finite, kind_of
from lossscale.torch.explain.modules import Names

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

FindEvent = Callable[[torch.Tensor], Event | None]
"""Returns the event that wrote a tensor; `None` if it is finite, or if none is kept."""


class GradientWatch:
    """Which gradients arrived, and which of them were not finite."""

    def __init__(
        self, model: torch.nn.Module, names: Names, find_event: FindEvent
    ) -> None:
        self._names = names
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._find_event = find_event
        self._handles: list[RemovableHandle] = []
        self.arrived: list[str] = []
        """The names of parameters, in order."""
        self.nonfinite: dict[str, Event | None] = {}
        """Those whose gradient was not finite, each with the event that wrote it."""
        self.late: dict[str, bool] = {}
        """Those whose gradient was finite when it arrived, and not at the end, each
        with whether it has a NaN."""

    def __enter__(self) -> None:
        """Watch every parameter."""
        for param in self._params:
            hook = param.register_post_accumulate_grad_hook(self._take)
            self._handles.append(hook)

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    @property
    def is_finite(self) -> bool:
        """Whether every gradient was finite."""
        return not self.nonfinite and not self.late

    def _take(self, param: Any) -> None:
        name = self._names.tensors.get(id(param))
        if param.grad is None or name is None:
            return
        self.arrived.append(name)
        if name not in self.nonfinite and not is_finite(param.grad):
            self.nonfinite[name] = self._find_event(param.grad)

    def check_all(self) -> None:
        """Check what the gradients are by now: other ranks' were added to them."""
        for param in self._params:
            name = self._names.tensors[id(param)]
            if param.grad is None:
                continue
            if name not in self.arrived:
                self._take(param)
            is_recorded = name in self.nonfinite or name in self.late
            kind = None if is_recorded else kind_of(param.grad)
            if kind is not None:
                self.late[name] = kind.nan

    def bracket(self) -> tuple[str | None, str | None]:
        """Return the last finite gradient before the first that was not, and that."""
        last = None
        for name in self.arrived:
            if name in self.nonfinite:
                return last, name
            last = name
        return None, None
