# SPDX-License-Identifier: Apache-2.0
"""`explain`: evaluates one batch equation by equation, and says what failed first."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lossscale.core.explanation.causes import find_causes
from lossscale.core.explanation.evaluated import (
    Location,
    Node,
    find_bracket,
    has_modules,
    make_finding,
    mark_forward,
)
from lossscale.core.explanation.findings import Explanation, Trial
from lossscale.core.explanation.trials import scales_to_try
from lossscale.core.state import ScaleState
from lossscale.core.validation import check_scale, format_value
from lossscale.errors import ContextError, SettingTypeError
from lossscale.jax.arguments import check_state, normalize_argnums
from lossscale.jax.explanation.evaluation import Evaluation
from lossscale.jax.explanation.values import Value
from lossscale.jax.gradient import is_differentiable
from lossscale.jax.types import PyTree
from lossscale.jax.value_and_grad import differentiate_scaled

_TRACED = (
    "explain() was called inside jit or another transformation, where there are no "
    "numbers. Call it outside, with the arguments of the batch."
)
_INTERPRETED_ONLY = (
    "Compiled, the gradients of this batch are finite at this scale: XLA keeps some "
    "results in a wider format. Here each operation was rounded by itself."
)
_COMPILED_ONLY = (
    "Compiled, the batch is not finite at this scale. Evaluated one operation at a "
    "time it is finite, so the operation cannot be named."
)


def explain(
    fun: Callable[..., Any],
    state: ScaleState | float,
    /,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Run one batch again, and say which operation first left its number format.

    Takes what the function of `value_and_grad` takes. The program of the scaled loss
    and its gradients is evaluated one equation at a time, in seconds rather than
    milliseconds, through `jit`, `scan`, `cond`, `checkpoint` and custom derivatives. If
    a gradient overflowed, the compiled program is run up to four times at lower scales.
    Nothing is changed: everything is a pure function of the arguments.

    A layer is named by the `jax.named_scope`s around the operation, which flax's linen
    modules and equinox's layers make, by the class whose `__call__` it is in, and by
    the line of your code.

    Args:
        fun: Returns a loss, or with `has_aux` a pair of a loss and auxiliary data.
        state: The scale's state, or the scale as a number.
        *args: The arguments of `fun` for this batch.
        argnums: Which arguments of `fun` to differentiate: a number, or several.
        has_aux: Whether `fun` returns a pair.
        **kwargs: Further arguments of `fun`.

    Returns:
        The explanation. Print it, or read its fields.

    Raises:
        GradientError: If `fun` does not return a loss, or nothing can be
            differentiated.
        ContextError: If it is called inside `jit` or another transformation.
        StateError: If the state is not a `ScaleState`.

    Example:
        >>> import jax.numpy as jnp, lossscale.jax as ls
        >>> def loss(weight, x):
        ...     return jnp.sum(jnp.log(weight * x))
        >>> seen = ls.explain(loss, 1024.0, 2.0, jnp.array([1.0, 0.0]))
        >>> seen.loss_finite, seen.first.origin, seen.first.operation
        (False, 'log of 0', 'log')
    """
    scale = _read_scale(state)
    positions = normalize_argnums("argnums", argnums)
    program = _Program(fun, args, kwargs, positions, has_aux=has_aux)
    return explain_program(
        program.run,
        scale,
        program.leaves,
        names=program.names,
        parameters=program.parameters,
        gradient_names=program.gradient_names,
    )


def explain_program(
    run: Callable[[Any, list[Any]], tuple[Any, Any]],
    scale: float,
    leaves: list[Any],
    *,
    names: Sequence[str],
    parameters: Sequence[bool],
    gradient_names: Sequence[str] | None = None,
) -> Explanation:
    """Explain a function of a scale and arrays.

    Args:
        run: Returns the unscaled loss and a tree of gradients, still scaled.
        scale: The scale.
        leaves: The arrays.
        names: A name for each of them.
        parameters: Whether each of them is a parameter.
        gradient_names: A name for each gradient; by default its key path.
    """
    number = jnp.float32(scale)
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(number, leaves)
    evaluation = Evaluation()
    inputs = [evaluation.add_argument(number, "the scale", is_parameter=False)]
    inputs += [
        evaluation.add_argument(leaf, name, is_parameter=flag)
        for leaf, name, flag in zip(leaves, names, parameters, strict=True)
    ]
    count = len(jax.tree.leaves(shapes[0]))
    results = evaluation.run_closed(closed, inputs, Location())
    loss = results[0]
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(shapes[1])[0]
    ]
    named = zip(gradient_names or paths, results[count:], strict=True)
    gradients = {name: value.node for name, value in named if value.node is not None}
    mark_forward(loss.node)
    seen = _explain_results(scale, loss, gradients, jax.jit(run), leaves)
    if has_modules(evaluation.nodes):
        return seen
    found = seen.first, seen.first_nan
    first, first_nan = (one and replace(one, has_model=False) for one in found)
    return replace(seen, first=first, first_nan=first_nan)


def _explain_results(
    scale: float,
    loss: Value,
    gradients: dict[str, Node],
    compiled: Callable[[Any, list[Any]], tuple[Any, Any]],
    leaves: list[Any],
) -> Explanation:
    bad = [node for node in gradients.values() if node.kind is not None]
    if loss.kind is not None and loss.node is not None:
        bad = [loss.node]
    finite = not bad and loss.kind is None
    compiled_finite = _is_finite_at(scale, compiled, leaves)
    notes: tuple[str, ...] = ()
    if finite != compiled_finite:
        notes = (_COMPILED_ONLY if finite else _INTERPRETED_ONLY,)
    found = find_causes(bad)
    first, first_nan = (make_finding(node, loss.node, gradients) for node in found)
    last_good, first_bad = find_bracket(gradients)
    trials = []
    given = first is not None and first.direction == "given"
    if bad and loss.kind is None and not given:
        ratio = first.ratio if first is not None else None
        for lower in scales_to_try(scale, ratio):
            trials.append(Trial(lower, _is_finite_at(lower, compiled, leaves)))
            if trials[-1].finite:
                break
    return Explanation(
        scale=scale,
        finite=finite and compiled_finite,
        loss_finite=loss.kind is None,
        first=first,
        first_nan=first_nan,
        trials=tuple(trials),
        last_finite_gradient=last_good,
        first_nonfinite_gradient=first_bad,
        notes=notes,
    )


def _is_finite_at(
    scale: float,
    compiled: Callable[[Any, list[Any]], tuple[Any, Any]],
    leaves: list[Any],
) -> bool:
    """Whether the compiled program gives a finite loss and finite gradients."""
    results = jax.tree.leaves(compiled(jnp.float32(scale), leaves))
    floats = [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
    return all(bool(jnp.isfinite(x).all()) for x in floats)


def _read_scale(state: Any) -> float:
    """Return the scale as a number, or raise."""
    scale = state
    if isinstance(state, tuple):
        check_state(state)
        scale = getattr(state, "scale", None)
    if isinstance(scale, jax.core.Tracer):
        raise ContextError(_TRACED)
    if isinstance(scale, (jax.Array, np.ndarray, np.generic)):
        if scale.size != 1:
            message = (
                "state must be a ScaleState or one scale, got an array of shape "
                f"{scale.shape}."
            )
            raise SettingTypeError(message)
        scale = float(scale.item())
    return check_scale("the scale", scale)


class _Program:
    """A loss function and its arguments as a function of arrays."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: int | tuple[int, ...],
        *,
        has_aux: bool,
    ) -> None:
        """Find the arrays among the arguments.

        Raises:
            ContextError: If one of them is a tracer.
            SettingTypeError: If `fun` cannot be called.
        """
        if not callable(fun):
            message = (
                "explain() takes the loss function first, and then the state and its "
                f"arguments; got {format_value(fun)}."
            )
            raise SettingTypeError(message)
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        pairs, self._structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._static = [None if _is_array(leaf) else leaf for _, leaf in pairs]
        self._indices = [i for i, (_, leaf) in enumerate(pairs) if _is_array(leaf)]
        self.leaves: list[PyTree] = [pairs[i][1] for i in self._indices]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in self.leaves):
            raise ContextError(_TRACED)
        chosen = {argnums} if isinstance(argnums, int) else set(argnums)
        chosen = {position % max(1, len(args)) for position in chosen}
        paths = [pairs[i][0] for i in self._indices]
        self.parameters = [
            path[0].idx == 0 and path[1].idx in chosen and is_differentiable(leaf)
            for path, leaf in zip(paths, self.leaves, strict=True)
        ]
        single = len(chosen) == 1 or isinstance(argnums, int)
        self.names = [
            _name_argument(path, single=single and flag)
            for path, flag in zip(paths, self.parameters, strict=True)
        ]
        order = [argnums] if isinstance(argnums, int) else list(argnums)
        self.gradient_names = [
            name
            for position in order
            for path, flag, name in zip(paths, self.parameters, self.names, strict=True)
            if flag and path[1].idx == position % len(args)
        ]

    def run(self, scale: Any, leaves: list[Any]) -> tuple[Any, PyTree]:
        """Return the unscaled loss and the scaled gradients."""
        everything = list(self._static)
        for index, leaf in zip(self._indices, leaves, strict=True):
            everything[index] = leaf
        args, kwargs = jax.tree_util.tree_unflatten(self._structure, everything)
        state = ScaleState(scale, jnp.int32(0), jnp.int32(0))
        value, grads = differentiate_scaled(
            self._fun, state, args, kwargs, argnums=self._argnums, has_aux=self._has_aux
        )
        return value[0] if self._has_aux else value, grads


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; Python's whole numbers and flags stay constants."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))


def _name_argument(path: Any, *, single: bool) -> str:
    """Return the name of an argument's leaf, as the gradient's key path has it."""
    rest = jax.tree_util.keystr(path[2:])
    if path[0].idx == 1:
        return f"{path[1].key}{rest}"
    return rest if single and rest else f"argument {path[1].idx}{rest}"
