# SPDX-License-Identifier: Apache-2.0
"""`Iteration` and `OptimizerStep`: the stages of a step, their guards and transitions.

torch keeps, for each optimizer, a dict with a `stage` and a `found_inf_per_device`; the
subclasses of others read and replace them. `OptimizerStep` is a view of that dict
together with what torch has no key for, and the only writer of both. Replacing
`_per_optimizer_states`, as `update()` and some subclasses do, starts a new iteration.

A call that raises or is interrupted half-way leaves its mark, because the marks are set
before anything changes and cleared when all is recorded: `is_unscaling`, `stepping` and
`is_accumulating`. The next call recovers, or refuses.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias
from weakref import ref

import torch
from torch.amp.grad_scaler import OptState

from lossscale.torch.distributed.dtensor import full_tensor
from lossscale.torch.inspection.groups import FoundInf, any_flag
from lossscale.torch.inspection.summary import GradientSummary
from lossscale.torch.scaler.wrapped_optimizers import unwrap
from lossscale.torch.torch_internals import version_of

if TYPE_CHECKING:
    from lossscale.torch.inspection.inspector import Inspection
    from lossscale.torch.scaler.accumulation import GradientAccumulator

TorchState: TypeAlias = dict[str, Any]
"""torch's state of one optimizer: `stage` and `found_inf_per_device`."""

HOW_TO_RECOVER = (
    "To recover, call optimizer.zero_grad() and scaler.discard(), on every rank if "
    "there are several, then run a new backward pass."
)


class MicroBatch(NamedTuple):
    """The flags of a micro-batch that `accumulate` has taken."""

    overflowed: torch.Tensor
    """1.0 if its gradients overflowed: it lowers the scale, and skips nothing."""
    loss_nonfinite: torch.Tensor | None
    """1.0 if its loss was not finite, which leaves the scale; `None` if not checked."""


class FirstGradient(NamedTuple):
    """Which gradient an optimizer had first, to distinguish it from a later one.

    A backward pass after `zero_grad()` brings a new tensor; after
    `zero_grad(set_to_none=False)` it writes to the same one.
    """

    reference: Callable[[], torch.Tensor | None]
    version: int | None

    def is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has another tensor now, or none."""
        return self.reference() is not first_gradient_of(optimizer).reference()

    def has_successor(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has another tensor now."""
        grad = first_gradient_of(optimizer).reference()
        return grad is not None and self.reference() is not grad

    def is_rewritten(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has the same tensor with other values."""
        version = first_gradient_of(optimizer).version
        return version is not None and version != self.version


def first_gradient_of(optimizer: torch.optim.Optimizer) -> FirstGradient:
    """Return the first gradient that an optimizer has, and its version."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad: torch.Tensor | None = param.grad
            if grad is not None:
                return FirstGradient(ref(grad), version_of(grad))
    return _NO_GRADIENT


_NO_GRADIENT = FirstGradient(lambda: None, None)


class OptimizerStep:
    """One optimizer in one iteration.

    What most steps never change is declared here, not assigned in each of them.
    """

    summary: "GradientSummary | None" = None
    """The result of the last inspection, for the report."""
    inspection: "Inspection | None" = None
    """The inspection whose factor is not written to the gradients yet."""
    grad_scale: torch.Tensor | None = None
    """What the optimizer divides by, if it clips by itself."""
    accumulator: "GradientAccumulator | None" = None
    clipped = False
    failed = False
    """Unscaling failed part-way; the gradients are in an unknown state."""
    is_unscaling = False
    """Unscaling has begun. Still set in a later call, it was interrupted."""
    stepping: FirstGradient | None = None
    """The first gradient, while the optimizer is being stepped. If a later call still
    finds it, the step raised or was interrupted."""
    raised = False
    """The optimizer's step has raised an ordinary exception."""
    _unscaled: FirstGradient | None = None
    """The first gradient when they were unscaled."""
    losses = 0
    """How many losses had been scaled then."""
    _own_flags: FoundInf | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, state: TorchState) -> None:
        self.optimizer = optimizer
        self.state = state
        """torch's dict. It is kept, so that no other has its id meanwhile."""

    @property
    def reference(self) -> Callable[[], torch.optim.Optimizer | None]:
        """A weak reference to the optimizer."""
        try:
            return ref(self.optimizer)
        except TypeError:  # slots without __weakref__
            optimizer = self.optimizer
            return lambda: optimizer

    @property
    def stage(self) -> OptState:
        """Torch's stage: READY, UNSCALED or STEPPED."""
        stage: OptState = self.state["stage"]
        return stage

    @property
    def found_inf(self) -> FoundInf:
        """Torch's flags, one for each device."""
        flags: FoundInf = self.state["found_inf_per_device"]
        return flags

    @property
    def has_own_flags(self) -> bool:
        """Whether the flags are those that were recorded here: exactly 0 or 1."""
        return self.state["found_inf_per_device"] is self._own_flags

    # -- guards ------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise unless the gradients are still scaled."""
        if self.stage is OptState.UNSCALED:
            message = (
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
            raise RuntimeError(message)
        if self.stage is OptState.STEPPED:
            message = "unscale_() is being called after step()."
            raise RuntimeError(message)

    def refuse_stepped(self) -> NoReturn:
        """Raise, because the optimizer has taken this step already."""
        message = "step() has already been called since the last update()."
        raise RuntimeError(message)

    def refuse_clipped(self) -> NoReturn:
        """Raise, because the gradients were clipped already."""
        message = (
            "clip_grad_norm_() has already been called on this optimizer since the "
            "last update()."
        )
        raise RuntimeError(message)

    def refuse_failed(self) -> NoReturn:
        """Raise, because unscaling the gradients has failed."""
        message = f"No inf checks were recorded for this optimizer. {FAILED}"
        raise AssertionError(message)

    def require_checked(self) -> None:
        """Raise unless the gradients were checked."""
        if not self.found_inf:
            self.stepping = None  # the optimizer was not called
            message = "No inf checks were recorded for this optimizer."
            raise AssertionError(message)

    def recover(self) -> None:
        """Go on after a call that raised or was interrupted, or refuse.

        If `step` broke off and a backward pass has brought new gradients since, these
        are checked and unscaled as usual; if the optimizer raised and its gradients are
        the same, they are stepped again. Anything else is refused: what became of the
        gradients, or of the weights, is not known.
        """
        problem = ""
        if self.is_unscaling and not self.failed:
            problem = "Unscaling the gradients of this optimizer was interrupted."
        elif self.stepping is not None:
            is_unscaled = self.stage is not OptState.READY
            if self.stepping.is_replaced(self.optimizer):
                self.rewind()
            elif not self.raised:
                problem = (
                    "step() of this optimizer was interrupted: whether its gradients "
                    "have been applied is not known."
                )
            elif is_unscaled and self.stepping.is_rewritten(self.optimizer):
                problem = (
                    "step() of this optimizer raised after its gradients were "
                    "unscaled, and they have been written to since: whether they are "
                    "scaled is not known."
                )
        if problem:
            message = f"{problem} {HOW_TO_RECOVER}"
            raise RuntimeError(message)
        self.stepping, self.raised = None, False

    def has_stale_check(self) -> bool:
        """Whether a backward pass may have come after the gradients were unscaled.

        Asked when a loss was scaled since.

        An iteration that was abandoned between `unscale_` and `step` leaves its flags:
        the gradients of the next one would be applied unchecked, and still scaled. They
        are taken for new if `.grad` is another tensor.

        Returns:
            Whether the same tensors were written to, and must be checked as they are.
        """
        unscaled = self._unscaled
        if unscaled is None:
            return False
        if unscaled.has_successor(self.optimizer):
            self.rewind()
            return False
        return unscaled.is_rewritten(self.optimizer)

    # -- transitions -------------------------------------------------------------------

    def record(self, summary: GradientSummary) -> None:
        """Keep the result of an inspection for the report."""
        self.summary = summary
        self.grad_scale, self.clipped, self.inspection = None, False, None

    def mark_checked(self, found_inf: FoundInf) -> None:
        """Record the flags of gradients that stay scaled."""
        self.state["found_inf_per_device"] = self._own_flags = found_inf

    def mark_unscaled(
        self, found_inf: FoundInf, losses: int, *, stepping: bool = False
    ) -> None:
        """Record that the gradients are unscaled, here or later in the optimizer.

        Args:
            found_inf: The flags.
            losses: How many losses have been scaled so far.
            stepping: Whether `step` unscaled them.
        """
        self.state["found_inf_per_device"] = self._own_flags = found_inf
        self.state["stage"] = OptState.UNSCALED
        self._unscaled = first_gradient_of(self.optimizer)
        self.losses = losses
        if stepping:
            self.stepping = self._unscaled
        self.is_unscaling = False

    def write_back(self) -> None:
        """Write unscaled, clipped gradients where they are still scaled."""
        if self.inspection is None:
            return
        self.is_unscaling = True
        self.inspection.rescale_(may_have_moved=True)
        self.inspection = self.grad_scale = None
        self.is_unscaling = False

    def mark_stepping(self) -> None:
        """Record that the optimizer is about to be called."""
        self.stepping = first_gradient_of(self.optimizer)

    def mark_stepped(self) -> None:
        """Record that the optimizer took its step, or skipped it."""
        self.state["stage"] = OptState.STEPPED
        self.stepping = None

    def mark_failed(self) -> None:
        """Never unscale gradients again that may have been, in part or in full.

        Another rank did not answer, or a device failed. There is no flag, so `step` and
        `update` refuse; weights and scale are as before.
        """
        self.state["stage"] = OptState.UNSCALED
        self.state["found_inf_per_device"] = {}
        self.failed = True
        # What is left of the gradients is unknown; a new backward pass brings others.
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def rewind(self) -> None:
        """Treat the next gradients as new: check and unscale them from scratch."""
        self.state["stage"] = OptState.READY
        self.grad_scale, self.inspection, self.clipped = None, None, False
        self.failed = self.is_unscaling = False
        self._unscaled = self.stepping = None


FAILED = (
    "An earlier unscale_() failed and its gradients were discarded. To recover, call "
    "optimizer.zero_grad() and scaler.discard() on every rank."
)


class Iteration:
    """One iteration of a scaler: from the first loss to `update()`."""

    def __init__(self, states: dict[int, TorchState]) -> None:
        self.states = states
        """torch's `_per_optimizer_states`, to which this belongs."""
        self.steps: dict[int, OptimizerStep] = {}
        """By the id of torch's state of the optimizer."""
        self.micro_batches: list[MicroBatch] = []
        self.loss_nonfinite: torch.Tensor | None = None
        """1.0 if a loss was not finite; `None` if the policy does not ask."""
        self._taken_loss: tuple[int, torch.Tensor] | None = None
        """The flag that a micro-batch has taken, and how many losses there were."""
        self.host_loss_nonfinite: bool | None = None
        """Whether a loss that the host could read was not finite."""
        self.raw_losses: list[torch.Tensor] = []
        """Losses on a device, before they were scaled."""
        self.losses = 0
        """How many times `scale` was called."""
        self.is_accumulating = False
        """`accumulate` has begun. Still set in a later call, it was interrupted."""

    def begin(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return the step of an optimizer, for a call that goes on with it.

        A wrapper of a package counts as the optimizer that it wraps.
        """
        step = self.steps.get(id(self.states.get(id(optimizer))))
        if step is None:
            if not type(optimizer).__module__.startswith("torch.optim"):
                optimizer = unwrap(optimizer)
            state = self.states[id(optimizer)]
            step = self.steps.get(id(state))
            if step is None:
                step = self.steps[id(state)] = OptimizerStep(optimizer, state)
        if self.is_accumulating:
            message = f"accumulate() was interrupted. {HOW_TO_RECOVER}"
            raise RuntimeError(message)
        if step.stepping is not None or step.is_unscaling:
            step.recover()
        return step

    def note_loss(self, loss: Any) -> None:
        """Keep for the report whether a loss was finite, where that costs no wait.

        Only a loss of one number: reading a whole vector may take long.
        """
        if type(loss) is torch.Tensor:
            if loss.numel() != 1 or not loss.is_floating_point():
                return
            if loss.is_cpu:
                try:
                    nonfinite = not math.isfinite(loss.item())
                except RuntimeError:  # inside torch.func.vmap a number has no value
                    return
                self.host_loss_nonfinite = nonfinite or bool(self.host_loss_nonfinite)
            else:
                self.raw_losses.append(loss.data)  # half the time of `detach()`
        elif isinstance(loss, (list, tuple)):
            for item in loss:
                self.note_loss(item)

    def take_loss(self) -> torch.Tensor | None:
        """Return whether the loss of a micro-batch was not finite; `None` if unknown.

        The next micro-batch has a loss of its own. Until that is scaled, another
        optimizer's gradients are of the same one.
        """
        flag, self.loss_nonfinite = self.loss_nonfinite, None
        if self._taken_loss is not None and self._taken_loss[0] == self.losses:
            taken = self._taken_loss[1]
            flag = taken if flag is None else torch.maximum(flag, taken.to(flag.device))
        if flag is not None:
            self._taken_loss = self.losses, flag
        return flag

    def check_loss(self, loss: Any, device: torch.device) -> None:
        """Keep on the device whether a loss, before it was scaled, was not finite."""
        if isinstance(loss, (list, tuple)):
            for item in loss:
                self.check_loss(item, device)
        elif isinstance(loss, torch.Tensor):
            with torch.no_grad():
                nonfinite = (~torch.isfinite(loss)).any().to(torch.float32)
            loss_flag = self.loss_nonfinite
            flags = [
                full_tensor(nonfinite),
                *([] if loss_flag is None else [loss_flag]),
            ]
            self.loss_nonfinite = any_flag(flags, device)

    @property
    def has_failed(self) -> bool:
        """Whether unscaling has failed, or was interrupted, for any optimizer."""
        steps = self.steps.values()
        return any([step.failed or step.is_unscaling for step in steps])  # noqa: C419
