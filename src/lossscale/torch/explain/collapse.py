# SPDX-License-Identifier: Apache-2.0
"""`BatchWatch`: explains the batch after the collapse alarm, while it is trained.

Nothing is run again: the user's own forward and backward pass are watched once, from
the `update` that raised the alarm to the next one. It needs nothing but the model. What
takes a second run, such as a lower scale, is left to `explain`.
"""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from lossscale.core.explanation.findings import Explanation
from lossscale.errors import CollapseWarning
from lossscale.torch.calls import stack_level_of_caller
from lossscale.torch.distributed.rank_groups import is_running
from lossscale.torch.explain.explainer import conclude, note_compiled
from lossscale.torch.explain.gradients import GradientWatch
from lossscale.torch.explain.modules import ModuleTracker, Names
from lossscale.torch.explain.watch import OperatorWatch

if TYPE_CHECKING:
    from weakref import ref

    from lossscale.torch.explain.events import Event
    from lossscale.torch.grad_scaler import GradScaler
    from lossscale.torch.scaler.report import StepReport

_NOT_TRIED = "Lower scales were not tried: scaler.explain(step_function) does that."
_STILL_LOWERED = (
    "It is still being lowered; scaler.explain(step_function) tries lower scales at "
    "once."
)


def watch_next_batch(scaler: "ref[GradScaler]", model: "ref[torch.nn.Module]") -> None:
    """Watch the next batch of a scaler, and warn with the explanation."""
    its_scaler, its_model = scaler(), model()
    if its_scaler is not None and its_model is not None:
        BatchWatch(its_scaler, its_model).start()


class BatchWatch:
    """Watches one batch that is being trained."""

    def __init__(self, scaler: "GradScaler", model: torch.nn.Module) -> None:
        self._scaler = scaler
        self._history: Any = scaler._history  # noqa: SLF001  # its add is replaced
        self._names = Names(model)
        self._tracker = ModuleTracker()
        self._watch = OperatorWatch(model, self._names, self._tracker)
        self._gradients = GradientWatch(
            model,
            self._names,
            self._watch.event_of,
            self._watch.losses.note_gradient,
        )
        self._losses: list[Event | None] = []
        self._scale = scaler.scale
        self._modules = list(model.modules())
        self._stack = ExitStack()

    def start(self) -> None:
        """Watch from here on, until the next report."""
        self._stack.enter_context(self._gradients)
        self._stack.enter_context(self._tracker)
        self._stack.enter_context(self._watch)
        # On the objects, and removed after one step: no other step pays for a check.
        self._scaler.__dict__["scale"] = self._note_loss
        self._history.__dict__["add"] = self._finish

    def _note_loss(self, outputs: Any) -> Any:
        """Note losses, and have them scaled."""
        for loss in tree_leaves(outputs):
            if isinstance(loss, torch.Tensor):
                self._losses.append(self._watch.event_of(loss))
                self._watch.losses.note_scaled()
        return self._scale(outputs)

    def _finish(self, report: "StepReport", **options: Any) -> None:
        """Stop watching, warn with the explanation, and take the report as usual."""
        del self._scaler.__dict__["scale"], self._history.__dict__["add"]
        self._gradients.check_all()
        self._stack.close()
        self._history.add(report, **options)
        seen = self._conclude(report.scale)
        self._history.explanation = seen
        warnings.warn(
            f"The batch after the alarm was watched. {seen}",
            CollapseWarning,
            stacklevel=stack_level_of_caller(),
        )

    def _conclude(self, scale: float) -> Explanation:
        parts = [*self._modules, *self._tracker.entered]
        notes = (*note_compiled(parts), *self._watch.notes())
        count = self._watch.losses
        seen = conclude(self._names, self._gradients, self._losses, count, scale, notes)
        if seen.may_depend_on_scale:
            note = _NOT_TRIED
            if seen.is_backward_overflow and self._scaler.get_scale() < scale:
                note = _STILL_LOWERED
            seen = replace(seen, notes=(note, *seen.notes))
        # Every rank speaks for itself: a collective here could wait for ever.
        return replace(
            seen, rank=torch.distributed.get_rank() if is_running() else None
        )
