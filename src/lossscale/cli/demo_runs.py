# SPDX-License-Identifier: Apache-2.0
"""Records the runs of the demonstration, for its report page."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lossscale.demo import Step
    from lossscale.diagnostics import Recorder

_STATISTICS_EVERY = 10


class DemoRuns:
    """Writes every run of the demonstration to a file of its own."""

    def __init__(self, folder: Path, on_step: Callable[[], object]) -> None:
        """Choose the folder, which must exist, and what is called for every step."""
        self._folder = folder
        self._on_step = on_step
        self._recorders: dict[str, Recorder] = {}

    @property
    def paths(self) -> list[Path]:
        """The files, in the order in which the runs were made."""
        return [recorder.path for recorder in self._recorders.values()]

    def add(self, step: "Step") -> None:
        """Record a step."""
        import numpy as np

        from lossscale.diagnostics import measure_tensors

        recorder = self._recorder_of(step)
        by_name = {f"layer{i}.weight": g for i, g in enumerate(step.gradients)}
        nonfinite = {}
        if not step.signal.finite:
            for name, gradient in by_name.items():
                if not np.isfinite(gradient).all():
                    nonfinite[name] = "nan" if np.isnan(gradient).any() else "inf"
        recorder.record_signal(
            step.state,
            step.signal,
            step=step.number,
            loss=step.loss,
            lr=step.rate,
            nonfinite=nonfinite,
        )
        if recorder.wants_statistics(step.number):
            recorder.record_statistics(measure_tensors(by_name), scale=step.state.scale)
        self._on_step()

    def _recorder_of(self, step: "Step") -> "Recorder":
        from lossscale.diagnostics import Recorder

        if step.run not in self._recorders:
            file = step.run.replace(",", "").replace(" ", "-")
            self._recorders[step.run] = Recorder(
                self._folder / f"{file}.jsonl",
                name=step.run,
                policy=step.policy,
                dtype=step.gradients[0].dtype.name,
                names=[f"layer{i}.weight" for i in range(len(step.gradients))],
                statistics_every=_STATISTICS_EVERY,
                if_exists="overwrite",
                rank=0,
                writers=(),
            )
        return self._recorders[step.run]

    def __enter__(self) -> "DemoRuns":  # noqa: PYI034  # Self needs Python 3.11
        """Return the runs."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every file."""
        for recorder in self._recorders.values():
            recorder.close()
