# SPDX-License-Identifier: Apache-2.0
"""`Event`: an operator that wrote something that was not finite."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lossscale.core.explanation.findings import Role
from lossscale.core.explanation.origins import Origin
from lossscale.torch.explain.kinds import Kind


class Site(NamedTuple):
    """Where the forward pass ran an operator."""

    module: torch.nn.Module | None
    """`None` outside any module."""
    line: str | None
    """The line of the user's code."""


@dataclass(eq=False)
class Event:
    """What one operator wrote that was not finite, and where it had it from."""

    index: int
    """Events are counted in the order in which they happened."""
    operation: str
    kind: Kind
    origin: Origin | None
    """What the operator did; `None` if it passed on what it was given."""
    parents: tuple["Event", ...] = ()
    """The events whose results it read."""
    site: Site | None = None
    node: str | None = None
    """In a backward pass: the node of the graph."""
    node_number: int | None = None
    """Its sequence number."""
    is_backward: bool = False
    is_passive: bool = False
    """Whether it only copies, casts or adds up what it is given."""
    micro_batch: int = 0
    role: Role = "intermediate"
    tensor: str | None = None
    dtype: str | None = None
    magnitude: float | None = None
    largest: float | None = None

    @property
    def is_deliberate(self) -> bool:
        """Whether it wrote or was a mask, such as that of attention.

        Its infinities are there on purpose; what is made of them may not be.
        """
        is_input = self.origin in ("batch", "parameter", "buffer")
        if self.origin == "constant":
            return not self.kind.nan
        return is_input and self.kind.is_mask
