# SPDX-License-Identifier: Apache-2.0
"""`inject` for Keras 3: a fault in a gradient or a layer's output, at steps of `fit`.

The gradients are written where the training loop gives them to the optimizer: by
`apply`, or by `stateless_apply` on JAX. The step is counted from the optimizer's own
variables, so that it is known inside graphs and `jit`.
"""

import math
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import keras
from keras import ops

from lossscale.core.state import Array
from lossscale.core.validation import check_choice, format_value
from lossscale.errors import ContextError, SettingTypeError
from lossscale.keras import backend
from lossscale.testing.faults import Fault, FaultValue, check_name
from lossscale.testing.keras_outputs import OutputInjection, find_layer


@overload
def inject(
    model: Any,
    name: str,
    value: FaultValue,
    *,
    steps: int | Iterable[int],
    where: Literal["gradient"] = "gradient",
    element: int | None = 0,
) -> "Injection": ...


@overload
def inject(
    model: Any,
    name: str,
    value: FaultValue,
    *,
    steps: int | Iterable[int],
    where: Literal["output"],
    element: int | None = 0,
) -> OutputInjection: ...


def inject(
    model: Any,
    name: str,
    value: FaultValue,
    *,
    steps: int | Iterable[int],
    where: str = "gradient",
    element: int | None = 0,
) -> "Injection | OutputInjection":
    """Return a context in which a named tensor gets a fault at given steps.

    Works in `fit` and `train_on_batch` on every backend, eagerly, in graphs and in
    `jit`. A step is counted from 1 in the context: one that the optimizer was called
    for, applied or skipped, or with `where="output"` a forward pass of the layer in
    training.

    Args:
        model: A model that is built, and compiled with an optimizer.
        name: Which variable, by its path, such as "sequential/dense/kernel", or with
            `where="output"` which layer, by its name, such as "dense"; of a layer
            inside another both, as "block/dense".
        value: "inf", "-inf", "nan", "huge" (the largest finite number of the dtype) or
            a number.
        steps: The steps at which the fault is written, from 1.
        where: "gradient" writes into the gradient as the optimizer receives it: scaled
            on TensorFlow, JAX and torch alike. "output" writes into what the layer
            returns, in training; the gradient passes as if nothing had been written.
        element: Which number of the tensor, counted row by row; `None` for all.

    Raises:
        SettingError: If there is no such variable, layer, element, step or fault.
        SettingTypeError: If it is not a model, or the variable not floating-point.
        ContextError: If the model is not built and compiled, or the optimizer does not
            count skipped steps; at the end of the context, if there were too few steps.

    Example:
        >>> import keras, numpy as np
        >>> from lossscale.keras import LossScaleOptimizer
        >>> from lossscale.testing.keras import inject
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        >>> with inject(model, model.trainable_variables[0].path, "inf", steps=2):
        ...     for _ in range(3):
        ...         loss = model.train_on_batch(np.ones((1, 2)), np.ones((1, 1)))
        >>> int(model.optimizer.skipped_steps)
        1
    """
    fault = Fault.check(value, steps, element)
    check_choice("where", where, ("gradient", "output"))
    if not isinstance(model, keras.Model):
        message = (
            f"The model must be a keras.Model, got {format_value(model)} "
            f"({type(model).__name__})."
        )
        raise SettingTypeError(message)
    if not model.built or getattr(model, "optimizer", None) is None:
        message = (
            "The model is not built and compiled, so it has no variables or no "
            "optimizer yet. Call model.build(...) and model.compile(optimizer, loss)."
        )
        raise ContextError(message)
    if where == "output":
        return OutputInjection(model, find_layer(model, name), fault)
    variables = {variable.path: variable for variable in model.trainable_variables}
    variable = variables[check_name(name, list(variables), "trainable variables")]
    fault.number(name, keras.backend.standardize_dtype(variable.dtype))
    fault.check_size(name, math.prod(variable.shape))
    return Injection(model, variable, fault)


class Injection:
    """A context in which a fault is written; `inject` makes it."""

    def __init__(self, model: Any, variable: Any, fault: Fault) -> None:
        """Prepare; nothing is replaced yet."""
        self._model = model
        self._variable = variable
        self._fault = fault
        self._first = 0

    def __enter__(self) -> "Injection":  # noqa: PYI034  # Python 3.10 has no Self
        """Replace the optimizer's `apply`, and have `fit` compile its step again."""
        optimizer = self._model.optimizer
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        if "apply" in vars(optimizer):
            message = f"A fault is being injected into {self._model.name} already."
            raise ContextError(message)
        self._counters = _find_counters(optimizer)
        self._first = self._count(optimizer.variables)
        replaced = {"apply": self._apply, "stateless_apply": self._stateless_apply}
        vars(optimizer).update(replaced)
        self._model.train_function = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the methods back; raise if the last fault was never written."""
        for method in ("apply", "stateless_apply"):
            del vars(self._model.optimizer)[method]
        self._model.train_function = None
        if error is None:
            count = self._count(self._model.optimizer.variables)
            self._fault.check_reached(self._variable.path, int(count - self._first))

    def _apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        optimizer = self._model.optimizer
        own_variables = optimizer._trainable_variables  # noqa: SLF001  # as Keras's own apply
        variables = list(
            own_variables if trainable_variables is None else trainable_variables
        )
        written = self._write(grads, variables, optimizer.variables)
        return type(optimizer).apply(optimizer, written, trainable_variables)

    def _stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> Any:
        optimizer = self._model.optimizer
        own_variables = optimizer._trainable_variables  # noqa: SLF001  # as Keras's own apply
        written = self._write(grads, own_variables, optimizer_variables)
        return type(optimizer).stateless_apply(
            optimizer, optimizer_variables, written, trainable_variables
        )

    def _count(self, values: Sequence[Any]) -> Array:
        """Return how many steps there were, from the values of all variables."""
        return sum(ops.convert_to_tensor(values[index]) for index in self._counters)

    def _write(
        self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients, one of them with the fault if it is its turn."""
        step = ops.cast(self._count(values) - self._first + 1, "int32")
        hit = ops.any(
            ops.equal(step, ops.convert_to_tensor(self._fault.steps, "int32"))
        )
        written = list(grads)
        for index, variable in enumerate(variables):
            if variable is self._variable and written[index] is not None:
                written[index] = backend.map_values(
                    lambda grad: self._write_into(grad, hit), written[index]
                )
        return written

    def _write_into(self, grad: Array, hit: Array) -> Array:
        fault, size = self._fault, ops.size(grad)
        number = fault.number(self._variable.path, backend.dtype_name(grad))
        mask = ops.broadcast_to(hit, ops.shape(grad))
        if fault.element is not None:
            chosen = ops.equal(ops.arange(size), fault.element)
            mask = ops.logical_and(mask, ops.reshape(chosen, ops.shape(grad)))
        return backend.where(
            mask, ops.convert_to_tensor(number, backend.dtype_name(grad)), grad
        )


def _find_counters(optimizer: Any) -> list[int]:
    """Return which of an optimizer's variables count its steps."""
    skipped = getattr(optimizer, "skipped_steps", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and skipped is None:
        message = (
            "Keras's LossScaleOptimizer does not count the steps that it skips, so a "
            "fault would be written again and again. Use "
            "lossscale.keras.LossScaleOptimizer."
        )
        raise ContextError(message)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counters = (inner._iterations, skipped)  # noqa: SLF001  # `iterations` may be divided
    return [
        index
        for index, variable in enumerate(optimizer.variables)
        if any(variable is counter for counter in counters)
    ]
