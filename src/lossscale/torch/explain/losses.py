# SPDX-License-Identifier: Apache-2.0
"""`LossCount`: which of several losses an operator was part of.

Several losses of one step are micro-batches if each was made by the same modules, and
otherwise losses of one batch, such as those of two networks. A scaled output from which
a gradient penalty is made is no loss: its backward pass is differentiated itself.
"""

from collections import defaultdict

import torch


class LossCount:
    """How many losses were scaled, and which modules made each of them."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0
        """The newest output that was scaled."""
        self._is_fresh = False
        """Whether no backward pass of it has been seen yet."""
        self._is_penalty = False
        """Whether it was taken for part of a gradient penalty."""
        self._modules: defaultdict[int, list[int]] = defaultdict(list)
        """The outermost modules that were entered for each, by id."""

    def note_module(self, module: torch.nn.Module) -> None:
        """Note a module that was entered in a forward pass, outside any other."""
        self._modules[self.count].append(id(module))

    def note_scaled(self) -> None:
        """Note an output that is scaled."""
        self._last = self.count
        self.count += 1
        self._is_fresh, self._is_penalty = True, False

    def note_backward(self) -> None:
        """Note an operator of a backward pass."""
        # create_graph: autograd.grad for a penalty, if no gradient arrives after it.
        if self._is_fresh and torch.is_grad_enabled():
            self.count -= 1
            self._is_penalty = True
        self._is_fresh = False

    def note_gradient(self) -> None:
        """Note a gradient that has arrived at a parameter."""
        if self._is_penalty:
            self.count += 1
            self._is_penalty = False

    def position(self, *, is_backward: bool) -> int:
        """Return which loss an operator is part of that is run now."""
        return self._last if is_backward else self.count

    @property
    def are_micro_batches(self) -> bool:
        """Whether the losses were all made by the same modules."""
        first, *others = (self._modules[number] for number in range(self.count))
        return bool(first) and all(modules == first for modules in others)
