# SPDX-License-Identifier: Apache-2.0
"""`SteppedSchedulers`: steps a scheduler once for every step that was applied."""

from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from lossscale.errors import SettingTypeError
from lossscale.torch.scaler.history import StepHistory
from lossscale.torch.scaler.wrapped_optimizers import unwrap


class SteppedSchedulers:
    """The schedulers that a scaler steps, and how far each of them has come."""

    def __init__(self) -> None:
        self._last_reports: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        """The last report that each scheduler was stepped for."""

    def step(
        self,
        scheduler: Any,
        arguments: tuple[Any, ...],
        history: StepHistory,
        reports: int,
    ) -> None:
        """Step a scheduler for the steps that its optimizer took since the last call.

        Args:
            scheduler: A scheduler of a stepped optimizer.
            arguments: What its `step` takes.
            history: Knows the steps whose outcome has reached the host.
            reports: How many steps there were. A scheduler that is new here starts
                with the last of them.
        """
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:  # Accelerate's prepared scheduler has several
            several = getattr(scheduler, "optimizers", None)
            if not several:
                _refuse(scheduler)
            optimizer = several[0]
        last = self._last_reports.get(scheduler, reports - 1)
        count, last = history.count_applied_since(last, unwrap(optimizer))
        self._last_reports[scheduler] = last
        for _ in range(count):
            scheduler.step(*arguments)


def _refuse(scheduler: object) -> NoReturn:
    """Raise, because a scheduler has an optimizer, by whose steps it goes."""
    message = (
        "step_scheduler() takes a scheduler with an optimizer, got a "
        f"{type(scheduler).__name__}. Write scaler.step_scheduler(scheduler)."
    )
    raise SettingTypeError(message)
