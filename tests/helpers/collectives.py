"""Counts what is really sent: every collective of a block, with its bytes."""

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """The names and sizes of the collectives that run inside, in order.

    Backends reduce plain tensors by operations named `c10d`, DTensors by functional
    ones; both come through here.
    """

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes its operation apart; the parts come here
        space, name = function.name().split("::")
        if "c10d" in space and "wait" not in name:
            tensors = [leaf for leaf in tree_leaves(args[0]) if hasattr(leaf, "numel")]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.seen.append((name, size))
        return function(*args, **(kwargs or {}))
