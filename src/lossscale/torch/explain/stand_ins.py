# SPDX-License-Identifier: Apache-2.0
"""`StandIns`: what a scaler's methods do while a batch is explained.

`scale` and `get_scale` use the scale that is tried, and the loss is checked. Methods
that step, unscale, clip or update do nothing, so that a whole training step can be
explained as it is. Nothing of the scaler is touched: the methods are replaced on the
object, and the attributes are removed again.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lossscale.errors import ContextError

OnLoss = Callable[[torch.Tensor], None]
"""Called with each loss before it is scaled."""


class StandIns:
    """The methods of a scaler while one batch is run at one scale."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        scale: float,
        on_loss: OnLoss,
        on_gradients: Callable[[], None],
    ) -> None:
        """Make stand-ins.

        Args:
            scaler: The scaler.
            scale: The scale to use.
            on_loss: Called with each loss before it is scaled.
            on_gradients: Called when the gradients of the step are complete.
        """
        self._scaler = scaler
        self._scale = scale
        self._on_loss = on_loss
        self._on_gradients = on_gradients
        self._before: dict[str, Any] = {}
        self.is_scale_used = False
        """Whether the loss was scaled, or the scale was asked for."""
        self._methods: dict[str, Callable[..., Any]] = {
            "scale": self.scale,
            "get_scale": self._get_scale,
            "grad": self._grad,
            "step": self._do_nothing,
            "step_all": self._step_all,
            "unscale_": self._do_nothing,
            "clip_grad_norm_": self._clip,
            "accumulate": self._accumulate,
            "update": self._do_nothing,
            "step_scheduler": self._do_nothing,
            "discard": self._do_nothing,
        }

    def __enter__(self) -> None:
        """Replace the methods of the object."""
        attributes = self._scaler.__dict__
        for name, method in self._methods.items():
            if name in attributes:
                self._before[name] = attributes[name]
            attributes[name] = method

    def __exit__(self, *_: object) -> None:
        """Give the object its methods back."""
        attributes = self._scaler.__dict__
        for name in self._methods:
            del attributes[name]
        attributes.update(self._before)

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale that is tried."""
        self.is_scale_used = True
        if isinstance(outputs, torch.Tensor):
            self._on_loss(outputs)
            return self._multiply(outputs)
        if not isinstance(outputs, Iterable):
            message = (
                f"scale() takes a tensor or an iterable of tensors, got "
                f"{type(outputs).__name__}."
            )
            raise ContextError(message)
        scaled = [self.scale(output) for output in outputs]
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _multiply(self, output: torch.Tensor) -> torch.Tensor:
        return output * torch.full(
            (), self._scale, dtype=torch.float32, device=output.device
        )

    def _get_scale(self) -> float:
        self.is_scale_used = True
        return self._scale

    def _grad(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Any, ...]:
        """Return unscaled gradients, of which a penalty is made: these are no loss."""
        options.setdefault("create_graph", True)
        scaled = tree_map_only(torch.Tensor, self._multiply, outputs)
        grads = torch.autograd.grad(scaled, inputs, **options)
        return tuple(None if grad is None else grad / self._scale for grad in grads)

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        self._on_gradients()

    def _step_all(self, *optimizers: Any) -> list[None]:
        self._on_gradients()
        return [None] * len(optimizers)

    def _clip(
        self, optimizer: Any, max_norm: float | Sequence[float] = 1.0, **_: Any
    ) -> torch.Tensor:
        """Return a norm of 0, of the shape that the scaler's has."""
        self._on_gradients()
        param = optimizer.param_groups[0]["params"][0]
        shape = () if isinstance(max_norm, (int, float)) else (len(max_norm),)
        return torch.zeros(shape, device=param.device)

    def _accumulate(self, optimizer: Any) -> None:
        """Take the gradients of a micro-batch off the parameters."""
        self._on_gradients()
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
