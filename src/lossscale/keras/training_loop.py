# SPDX-License-Identifier: Apache-2.0
"""Whether `apply` gets scaled gradients, or ones that are unscaled already.

Keras 3's loop passes scaled gradients to `apply`:

    scale_loss -> gradients -> apply

tf.keras's loop unscales first, often to clip, and then applies:

    get_scaled_loss -> gradients -> get_unscaled_gradients -> apply_gradients

Both end in the same call, so the optimizer must know which loop it is in. Gradients
cannot be marked, because clipping returns new tensors. A flag for the next `apply`
alone fails where one optimizer is applied twice for two calls of
`get_unscaled_gradients`, or where the two calls are in different `tf.function`s, of
which one is traced once. So an optimizer is in one kind of loop for its whole life: the
first call decides, and a call of the other kind is an error, never a wrong scale. All
replicas run the same loop, so the kind need not be kept per thread.
"""

from typing import Literal

from lossscale.errors import GradientError
from lossscale.keras.tracing import is_traced

_ADVICE = (
    "Use one kind of loop: scale_loss and apply; or get_scaled_loss, "
    "get_unscaled_gradients and apply_gradients. To change the loop, make a new "
    "optimizer of this one: LossScaleOptimizer.from_keras(optimizer)."
)


class TrainingLoop:
    """The kind of loop that an optimizer is in, once that is known."""

    def __init__(self) -> None:
        self.kind: Literal["unknown", "scaled", "unscaled"] = "unknown"
        self._unscaled_eagerly = False
        self._scaled_since = False
        self._applied_since = False

    def note_scaled_loss(self) -> None:
        """Note a call of `scale_loss`, which `fit` makes."""
        if self.kind == "unscaled":
            message = (
                "scale_loss was called (fit calls it), but this optimizer is in a loop "
                f"that calls get_unscaled_gradients. {_ADVICE}"
            )
            raise GradientError(message)
        if self.kind == "unknown":
            self.kind = "scaled"

    def note_classic_scaled_loss(self) -> None:
        """Note a call of `get_scaled_loss`; it goes with either kind of `apply`."""
        self._scaled_since = self._scaled_since or not is_traced()

    def note_unscaled_gradients(self) -> None:
        """Note a call of `get_unscaled_gradients`."""
        if self.kind == "scaled":
            message = (
                "get_unscaled_gradients was called, but this optimizer has been given "
                f"scaled gradients, which apply unscales itself. {_ADVICE}"
            )
            raise GradientError(message)
        self.kind = "unscaled"
        self._unscaled_eagerly = not is_traced()
        self._scaled_since = self._applied_since = False

    def note_apply(self, *, stateless: bool = False) -> bool:
        """Note a call of `apply`; return whether its gradients are scaled."""
        if self.kind == "unscaled" and stateless:
            message = (
                "stateless_apply takes scaled gradients, but this optimizer is in a "
                "loop that unscales them with get_unscaled_gradients. "
                f"{_ADVICE}"
            )
            raise GradientError(message)
        if self.kind == "unscaled" and self._forgot_to_unscale():
            message = (
                "apply was called with gradients of a loss from get_scaled_loss, but "
                "this optimizer is in a loop that unscales them with "
                f"get_unscaled_gradients. {_ADVICE}"
            )
            raise GradientError(message)
        self._applied_since = True
        if self.kind == "unknown":
            self.kind = "scaled"
        return self.kind == "scaled"

    def _forgot_to_unscale(self) -> bool:
        """Whether the last unscaled gradients were applied, and then a loss was scaled.

        Only calls that are made at every step count: those inside a `tf.function` are
        made once, when it is traced.
        """
        is_eager = self._unscaled_eagerly and not is_traced()
        return is_eager and self._scaled_since and self._applied_since
