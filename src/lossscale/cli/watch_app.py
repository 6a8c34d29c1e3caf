# SPDX-License-Identifier: Apache-2.0
"""The live view of `lossscale watch`. Imports Textual, so it is imported late."""

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from lossscale.diagnostics.live import render_run
from lossscale.diagnostics.records.follower import RunFollower
from lossscale.errors import StateError

_SECONDS = 1.0
_MARGIN = 6


class WatchApp(App[None]):
    """Shows a run, and what is appended to it."""

    CSS = "#run { padding: 1 2; width: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, run: RunFollower) -> None:
        """Choose the run."""
        super().__init__()
        self._run = run
        self._message = ""
        self._width = 80

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        with VerticalScroll():
            # Text, not markup: a tensor's name may have brackets.
            yield Static(id="run", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Show the run, and look again every second."""
        self.title = self._run.title
        self._width = self.size.width
        self._show()
        self.set_interval(_SECONDS, self.follow)

    def on_resize(self, event: Resize) -> None:
        """Draw for the new width."""
        self._width = event.size.width
        self._show()

    def follow(self) -> None:
        """Read what was appended."""
        try:
            self._run.update()
            self._message = ""
        except StateError as error:
            self._message = str(error)
        self._show()

    def _show(self) -> None:
        lines = render_run(self._run, max(0, self._width - _MARGIN))
        if self._message:
            lines += ["", self._message]
        self.query_one("#run", Static).update("\n".join(lines))
