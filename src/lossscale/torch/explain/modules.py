# SPDX-License-Identifier: Apache-2.0
"""`ModuleTracker`: which module an operator is in, forwards and backwards.

In a forward pass, hooks on all modules keep a stack. In a backward pass the node that
is evaluated has a sequence number, which the autograd engine gave to it when the
forward pass made it; the first operator after that was the node's own, and where it ran
has been noted.
"""

import contextlib
import linecache
import re
import sys
import threading
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from lossscale.torch.explain.events import Site
from lossscale.torch.torch_internals import current_node, sequence_number

if TYPE_CHECKING:
    from types import CodeType, FrameType

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that wrappers put in: torch.compile, checkpointing, FSDP1."""

_TORCH = Path(torch.__file__).parent
_KERAS = str(_TORCH.parent / "keras")
_LIBRARIES = (
    str(_TORCH),
    _KERAS,
    str(Path(__file__).parent.parent.parent),
    str(Path(contextlib.__file__)),
    "<frozen",
)
"""Where code is not the user's."""

_EXPLAINER = str(Path(__file__).with_name("explainer.py"))

_DISPATCH = (
    str(Path(__file__).parent),
    *(str(_TORCH / name) for name in ("_ops.py", "_compile.py", "_dynamo")),
    str(_TORCH / "utils" / "_python_dispatch.py"),
)
"""Code between an operator and the one who called it."""

_CAST = re.compile(r"\.(to|half|bfloat16|type|type_as|float)\(")
"""A line that casts a tensor."""


_CASTS = ("ToCopyBackward0", "TBackward0", "ViewBackward0", "UnsafeViewBackward0")
"""Nodes between those of two layers."""


class Names:
    """The names of a model's modules, parameters and buffers, without wrappers'."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: dict[int, str] = {}
        self._owners: dict[int, torch.nn.Module] = {}
        self.tensors: dict[int, str] = {}
        while isinstance(model, DistributedDataParallel):
            self._modules[id(model)] = ""
            model = model.module
        for name, module in model.named_modules():
            self._modules.setdefault(id(module), clean_name(name))
            own = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            for key, tensor in own:
                full = clean_name(f"{name}.{key}" if name else key)
                self.tensors.setdefault(id(tensor), full)
                self._owners.setdefault(id(tensor), module)

    def of_module(self, module: torch.nn.Module | None) -> str | None:
        """Return the name of a module; `None` if it is not part of the model."""
        return None if module is None else self._modules.get(id(module))

    def of_parameter(self, module: torch.nn.Module, name: str) -> str:
        """Return the name of a parameter by that within its module."""
        prefix = self.of_module(module)
        return clean_name(f"{prefix}.{name}" if prefix else name)

    def owner_of(self, tensor: torch.Tensor) -> torch.nn.Module | None:
        """Return the module that has a parameter or a buffer."""
        return self._owners.get(id(tensor))


def clean_name(name: str) -> str:
    """Return a name without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModuleTracker:
    """The stack of modules, and where each node of the graph was made."""

    def __init__(self) -> None:
        self._stack: list[torch.nn.Module] = []
        self._depth_at_backward: int | None = None
        self.is_backward = False
        """Whether the newest operator was part of a backward pass, or came after one
        and before the next module was entered."""
        self._sites: dict[int, tuple[list[int], list[Site]]] = {}
        """Where nodes were made, by thread and sequence number."""
        self._forward_thread = threading.get_ident()
        self._is_users: dict[CodeType, bool] = {}
        """Whether code is the user's, by code object."""
        self._handles = contextlib.ExitStack()
        self.entered: dict[torch.nn.Module, None] = {}
        """The modules that were entered, in order."""
        self.on_exit: Any = None
        """Called with a module and its outputs."""
        self.on_enter_outermost: Any = None
        """Called with a module that a forward pass enters outside any other."""

    def __enter__(self) -> None:
        """Watch all modules."""
        for handle in (
            register_module_forward_pre_hook(self._push),
            register_module_forward_hook(self._pop, always_call=True),
        ):
            self._handles.callback(handle.remove)

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        self._handles.close()

    def _push(self, module: torch.nn.Module, _: Any) -> None:
        node = current_node()
        self._note_silent_node(node)
        if not self._stack and node is None and self.on_enter_outermost is not None:
            self.on_enter_outermost(module)
        self._stack.append(module)
        self.entered.setdefault(module)
        self.is_backward = False

    def _pop(self, module: torch.nn.Module, _: Any, outputs: Any) -> None:
        self._note_silent_node(current_node())
        # An exception may have left modules on the stack.
        while self._stack and self._stack.pop() is not module:
            pass
        if self.on_exit is not None:
            self.on_exit(module, outputs)

    def enter_operator(self, node: Any) -> bool:
        """Note an operator; return whether it is part of a backward pass itself.

        Checkpointing runs a forward pass again inside a backward pass: there a module
        has been entered since the backward pass began.
        """
        if node is None:
            self._depth_at_backward = None
        elif self._depth_at_backward is None:
            self._depth_at_backward = len(self._stack)
        depth = self._depth_at_backward
        is_backward = depth is not None and len(self._stack) <= depth
        self.is_backward |= is_backward
        # Without gradients as well: the forward pass of a custom autograd function has
        # none, and its node was made before.
        if not is_backward:
            self._note_site()
        return is_backward

    def _note_silent_node(self, node: Any) -> None:
        """Note a node that was made without an operator, before the module changes.

        It is that of a custom function that returns what it was given.
        """
        depth = self._depth_at_backward
        if self._stack and (node is None or depth is None or len(self._stack) > depth):
            self._note_site(Site(self._stack[-1], None))

    def here(self) -> Site:
        """Return where the forward pass is."""
        return Site(self._stack[-1] if self._stack else None, self._line_of_caller())

    def _note_site(self, site: Site | None = None) -> None:
        """Note where the newest node was made, unless that is known."""
        number = sequence_number() - 1
        numbers, sites = self._sites.setdefault(threading.get_ident(), ([], []))
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            sites.append(site or self.here())

    def site_of(self, node: Any) -> Site | None:
        """Return where a node was made; `None` if it is not known."""
        thread = self._forward_thread
        if _is_in_reentrant_backward():
            thread = threading.get_ident()
        numbers, sites = self._sites.get(thread, ([], []))
        index = bisect_right(numbers, node._sequence_nr()) - 1  # noqa: SLF001
        return sites[index] if index >= 0 else None

    def leaves_module(self, node: Any, site: Site | None) -> bool:
        """Whether a node passes its result to another module's, casts aside."""
        module = None if site is None else site.module
        waiting = [after for after, _ in node.next_functions]
        for after in waiting:
            if after is None or hasattr(after, "variable"):
                continue
            if after.name() in _CASTS:
                waiting += [later for later, _ in after.next_functions]
                continue
            other = self.site_of(after)
            if other is not None and other.module is not module:
                return True
        return False

    def is_users_cast(self) -> bool:
        """Whether the user's code asked for the cast that runs now, not autocast."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_KERAS):
            return False  # Keras casts what a layer reads, as autocast does
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        if nesting == 0:
            return True
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return _CAST.search(line) is not None

    def _line_of_caller(self) -> str | None:
        """Return the innermost line that is not torch's, nor ours."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _EXPLAINER:
                return None  # what called explain() did not run the operator
            if code not in self._is_users:
                self._is_users[code] = not code.co_filename.startswith(_LIBRARIES)
            if self._is_users[code]:
                return f"{Path(code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return None


def _is_in_reentrant_backward() -> bool:
    """Whether checkpointing runs a backward pass of its own inside this one.

    Its nodes were made in the thread that runs it, which counts for itself.
    """
    code = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
