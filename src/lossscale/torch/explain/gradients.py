# SPDX-License-Identifier: Apache-2.0
"""`GradientWatch`: the gradients of parameters, in the order in which they arrive."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lossscale.torch.explain.events import Event
from lossscale.torch.explain.kinds import is_finite, kind_of
from lossscale.torch.explain.modules import Names

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

FindEvent = Callable[[torch.Tensor], Event | None]
"""Returns the event that wrote a tensor; `None` if it is finite, or if none is kept."""


class LateGradient(NamedTuple):
    """A gradient that was finite when it arrived, and not at the end."""

    has_nan: bool
    event: Event | None
    """What wrote to it."""


class GradientWatch:
    """Which gradients arrived, and which of them were not finite."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Names,
        find_event: FindEvent,
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: The model.
            names: Its names.
            find_event: Returns the event that wrote a gradient.
            on_arrival: Called when a gradient arrives.
        """
        self._names = names
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._find_event = find_event
        self._on_arrival = on_arrival
        self._handles: list[RemovableHandle] = []
        self.arrived: list[str] = []
        """The names of parameters, in the order of the backward pass."""
        self.has_arrived = False
        """Whether a parameter has a gradient."""
        self.nonfinite: dict[str, Event | None] = {}
        """Those whose gradient was not finite, each with the event that wrote it."""
        self.late: dict[str, LateGradient] = {}
        """Those whose gradient was finite when it arrived, and not at the end."""

    def __enter__(self) -> None:
        """Watch every parameter."""
        for param in self._params:
            hook = param.register_post_accumulate_grad_hook(self._note_arrival)
            self._handles.append(hook)

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    @property
    def is_finite(self) -> bool:
        """Whether every gradient was finite."""
        return not self.nonfinite and not self.late

    def _note_arrival(self, param: Any) -> None:
        """Check a gradient when the backward pass has made it."""
        if self._on_arrival is not None:
            self._on_arrival()
        name = self._names.tensors.get(id(param))
        if param.grad is None or name is None:
            return
        self.has_arrived = True
        self.arrived.append(name)
        self._check(name, param.grad)

    def _check(self, name: str, grad: torch.Tensor) -> None:
        if name not in self.nonfinite and not is_finite(grad):
            self.nonfinite[name] = self._find_event(grad)

    def check_all(self) -> None:
        """Check what the gradients are by now.

        Other ranks' were added to them, and hooks may have changed them. Those of FSDP2
        are there only now.
        """
        for param in self._params:
            name = self._names.tensors[id(param)]
            if param.grad is None or name in self.late:
                continue
            self.has_arrived = True
            if name not in self.arrived:
                self._check(name, param.grad)
            elif name not in self.nonfinite:
                kind = kind_of(param.grad)
                if kind is not None:
                    event = self._find_event(param.grad)
                    self.late[name] = LateGradient(kind.nan, event)

    def bracket(self) -> tuple[str | None, str | None]:
        """Return the last finite gradient before the first that was not, and that."""
        last = None
        for name in self.arrived:
            if name in self.nonfinite:
                return last, name
            last = name
        return None, None
