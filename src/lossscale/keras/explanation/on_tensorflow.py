# SPDX-License-Identifier: Apache-2.0
"""The batch on TensorFlow: run eagerly under a tape, with every operation watched."""

from typing import Any

import keras
import tensorflow as tf

from lossscale.core.explanation.causes import find_causes
from lossscale.core.explanation.evaluated import (
    Node,
    find_bracket,
    make_finding,
    mark_forward,
)
from lossscale.core.explanation.findings import Explanation, Trial
from lossscale.core.explanation.trials import scales_to_try
from lossscale.keras.explanation.layer_scopes import LayerScopes
from lossscale.keras.explanation.operation_watch import OperationWatch, kind_of
from lossscale.keras.explanation.variables import KeptVariables
from lossscale.keras.loss import multiply_loss

_NAMES = ("x", "y", "sample_weight")


def explain(
    model: Any, batch: tuple[Any, Any, Any], scale: float, kept: KeptVariables
) -> Explanation:
    """Return why a batch was not finite."""
    batch = keras.tree.map_structure(_to_tensor, batch)
    with LayerScopes(model) as scopes:
        watch = OperationWatch(scopes, model.variables)
        for name, part in zip(_NAMES, batch, strict=True):
            leaves = keras.tree.flatten(part)
            for index, leaf in enumerate(leaves):
                if leaf is not None:
                    label = name if len(leaves) == 1 else f"{name}[{index}]"
                    watch.add_argument(leaf, label)
        with watch:
            loss, grads = _run(model, batch, scale, scopes)
    gradients = {
        variable.path: node
        for variable, grad in zip(model.trainable_variables, grads, strict=True)
        if grad is not None and (node := watch.node_of(_values_of(grad))) is not None
    }
    loss_node = watch.node_of(loss)
    mark_forward(loss_node)
    return _explain_results(model, batch, scale, kept, (loss_node, gradients))


def _explain_results(
    model: Any,
    batch: Any,
    scale: float,
    kept: KeptVariables,
    results: tuple[Node | None, dict[str, Node]],
) -> Explanation:
    loss, gradients = results
    bad = [node for node in gradients.values() if node.kind is not None]
    loss_finite = loss is None or loss.kind is None
    if loss is not None and not loss_finite:
        bad = [loss]
    found = find_causes(bad)
    first, first_nan = (make_finding(node, loss, gradients) for node in found)
    trials = []
    if bad and loss_finite and (first is None or first.direction != "given"):
        for lower in scales_to_try(scale, None if first is None else first.ratio):
            kept.restore()
            _, grads = _run(model, batch, lower, LayerScopes(model))
            tensors = [_values_of(grad) for grad in grads if grad is not None]
            finite = all(kind_of(tensor) is None for tensor in tensors)
            trials.append(Trial(lower, finite))
            if finite:
                break
    last_good, first_bad = find_bracket(gradients)
    return Explanation(
        scale=scale,
        finite=not bad,
        loss_finite=loss_finite,
        first=first,
        first_nan=first_nan,
        trials=tuple(trials),
        last_finite_gradient=last_good,
        first_nonfinite_gradient=first_bad,
    )


def _run(
    model: Any, batch: Any, scale: float, scopes: LayerScopes
) -> tuple[Any, list[Any]]:
    """Return the unscaled loss and the scaled gradients."""
    x, y, sample_weight = batch
    with tf.GradientTape() as tape:
        with scopes.within(model):
            predicted = model(x, training=True)
        loss = model.compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
        )
        scaled = multiply_loss(loss, tf.constant(scale, tf.float32))
    return loss, tape.gradient(scaled, [v.value for v in model.trainable_variables])


def _values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _to_tensor(leaf: Any) -> Any:
    if leaf is None:
        return None
    tensor = tf.convert_to_tensor(leaf)
    is_wide = tensor.dtype == tf.float64
    return tf.cast(tensor, keras.backend.floatx()) if is_wide else tensor
