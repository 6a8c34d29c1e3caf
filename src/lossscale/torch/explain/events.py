# SPDX-License-Identifier: Apache-2.0
"""`Event`: an operator that wrote something that was not finite."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lossscale.core.explanation.findings import Role
from lossscale.core.explanation.kinds import Kind
from lossscale.core.explanation.origins import Origin


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
    operation: str | None
    """`None` for what no operator wrote."""
    kind: Kind
    origin: Origin | None
    """What the operator did; `None` if it passed on what it was given."""
    bad_parents: tuple["Event", ...] = ()
    """The events whose results it read."""
    site: Site | None = None
    node: str | None = None
    """In a backward pass: the node of the graph."""
    node_number: int | None = None
    """Its sequence number."""
    is_backward: bool = False
    is_passive: bool = False
    """Whether it only copies, casts or adds up what it is given."""
    loss: int = 0
    """Which of several losses it was part of."""
    role: Role = "intermediate"
    tensor: str | None = None
    dtype: str | None = None
    magnitude: float | None = None
    largest: float | None = None
    lost_epsilon: float | None = None
    """A number that was added to what it divided by, and that is 0 in the format."""
