"""The terminal view of a live session, with Textual: the figures of the page, drawn as text."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static

from llamacpp_instr.converters.live.frames import glance
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.screen import draw, usual_phase

REDRAW_S = 0.2

HELP = """\
[b]tokens/s[/b]      generated in the last second; a token is a word or a part of one
[b]prompt tok/s[/b]  tokens of prompts that were read in the last second
[b]cache cells[/b]   what the model remembers of the texts: a cell for a token
[b]first token[/b]   from a request to its first token, median
[b]then each[/b]     from a token of a request to the next, median
[b]CPUs[/b]          that the program uses, of those of the machine
[b]wait for CPU[/b]  threads that were ready to run and could not
[b]threads work[/b]  share of the latest step in which they did not wait
[b]requests[/b]      under way, of all that began

In a small chart each character is a second; now is on the right.

A request is ▸ under way, ✓ done, or · without a new token for a while.
Tokens on [white on #8a3a10] orange [/] came later than usual.

[b]Layers × blocks[/b] shows where the time goes: a model is a stack of layers
with blocks such as attention. The stronger, the longer it took; the
latest step is on the left, the average on the right.

[b]p[/b] pause, go on   [b]h[/b] prefill, decode   [b]q[/b] quit   any key closes this"""


class LiveApp(App[None]):
    """Draws the state of a session until one quits. `p` stops the drawing, not the counting."""

    CSS = """
    #view { height: 1fr }
    Help { align: center middle }
    #help { width: auto; max-width: 100%; height: auto; max-height: 100%; border: round $primary;
            padding: 0 1; background: $surface }
    #help Static { width: auto }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("h", "phase", "Phase"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, session: LiveSession) -> None:
        super().__init__()
        self.frame: dict[str, Any] | None = None
        """what is shown"""
        self.phase: str | None = None
        self.paused = False
        self._session = session
        self._view = View(id="view")

    def compose(self) -> ComposeResult:
        yield self._view
        yield Footer()

    def on_mount(self) -> None:
        # without this the terminal would stay as it is
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.look()
        self.set_interval(REDRAW_S, self.look)

    def look(self) -> None:
        """Take the latest figures, unless it is paused."""
        if self.paused:
            return
        width, height = self.size
        session = self._session
        frame = session.look(lambda state: glance(state, session.is_catching_up, height, width))
        self.frame = {**frame, "over": session.over}
        self._view.refresh()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.look()
        self._view.refresh()

    def action_phase(self) -> None:
        phases = list(self.frame["heat"]) if self.frame else []
        if self.frame and phases:
            now = phases.index(self.phase or usual_phase(self.frame))
            self.phase = phases[(now + 1) % len(phases)]
            self._view.refresh()

    def action_help(self) -> None:
        self.push_screen(Help())


class View(Widget):
    """The whole screen but its last line."""

    app: LiveApp

    def render(self) -> Text:
        frame = self.app.frame
        if frame is None:
            return Text()
        lines = draw(frame, *self.size, self.app.phase, self.app.paused)
        return Text("\n", no_wrap=True).join(lines)


class Help(ModalScreen[None]):
    """What the figures mean."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(HELP)

    def on_key(self) -> None:
        self.dismiss()
