"""The terminal view of a live session, with Textual: a frame as the page gets it, drawn as text.

Invariant: `draw` returns exactly `height` lines of at most `width` cells, and no text of a log or a
model can control the terminal.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static

from llamacpp_instr.base.terminal import counted, printable
from llamacpp_instr.converters.live.frames import glance
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.report.charts import placed
from llamacpp_instr.report.report import shown

Json = dict[str, Any]

SPARKS = "▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
FIGURE, MOST_COLUMNS = 40, 3
"""the minimum of cells of a figure, and the maximum of figures in a line"""
LABEL, VALUE = 13, 14
NAME = 14
MOST_MESSAGES = 3
ENDED = {
    "closed": "the session has ended",
    "not closed": "the program ended without closing the log",
}
LONG = 10**9
"""ns, after which a step under way is named"""
TOKENS, PROMPT, CELLS, RSS, CPU, DELAY = 1, 2, 5, 6, 7, 8
"""columns of a second"""
DIM, STRONG, BAD, GOOD = Style(dim=True), Style(bold=True), Style(color="red"), Style(color="green")


def draw(frame: Json, width: int, height: int, phase: str | None, paused: bool) -> list[Text]:
    """The lines of the screen. `phase` selects the steps of the heat map, None the usual ones."""
    messages = frame["messages"][-MOST_MESSAGES:] if height > 20 else []
    lines = [_heading(frame, width, paused), *_figures(frame, width)]
    heat = frame["heat"].get(phase or usual_phase(frame))
    room = height - len(lines) - 1 - bool(messages) - len(messages)
    rows = 0
    if heat is not None:
        wanted = 2 + len(heat["last"])
        rows = min(wanted, max(room // 2, room - len(frame["lanes"]) - 1))
    lines += _lanes(frame, width, room - max(rows, 0))
    if rows > 2:
        lines += _heat(heat, phase or usual_phase(frame), width, rows)
    lines += [Text()] * (height - len(lines) - bool(messages) - len(messages))
    if messages:
        lines.append(_rule("Messages", f"{frame['n_messages']:,} so far", width))
        for _, _, level, words in messages:
            lines.append(Text(printable(words.strip()), BAD if level == "error" else Style.null()))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def usual_phase(frame: Json) -> str:
    """The phase whose steps are shown first: decode, if there is one."""
    return "decode" if "decode" in frame["heat"] else next(iter(frame["heat"]), "")


# --- the first lines ---


def _heading(frame: Json, width: int, paused: bool) -> Text:
    session = frame["session"]
    models = session["models"] if session else []
    name = Text(printable(" ".join(models[-1][1:3])) if models else "instr live", STRONG)
    name.truncate(width // 3, overflow="ellipsis")
    over = frame["over"]
    doing = "catching up with the log …" if frame["late"] else "recording"
    parts = [
        *(["PAUSED"] if paused else []),
        ENDED.get(over, f"reading stopped: {printable(over)}") if over else doing,
        str(timedelta(seconds=frame["t"] // 10**9)),
        counted(frame["n_steps"], "step"),
        counted(frame["n_tokens"], "token"),
    ]
    if frame["n_failed"]:
        parts.append(f"{counted(frame['n_failed'], 'step')} failed")
    if (step := frame["computing"]) and step[2] > LONG:
        parts.append(f"{step[0]} of {step[1]:,} for {shown(step[2], 'ns')}")
    return name.append("  " + " · ".join(parts), BAD if over else DIM)


def _figures(frame: Json, width: int) -> Iterator[Text]:
    """Label, value and the latest seconds, one per character."""
    cells, machine = frame["cells"], frame["machine"]
    used = machine["cpu"] / max(machine["dur"], 1) if machine else 0
    cpus = f"{used:.{2 if used < 1 else 1}f} of {machine['cpus']}" if machine else "-"
    figures: list[tuple[str, str, int | None]] = [
        ("tokens/s", f"{frame['rate']:,}", TOKENS),
        ("prompt tok/s", f"{_series(frame, PROMPT, 1)[0]:,}", PROMPT),
        ("cache cells", f"{cells[0]:,}/{cells[1]:,}" if cells else "-", CELLS),
        ("memory", shown(frame["rss"], "bytes") if frame["rss"] else "-", RSS),
        ("first token", _time(frame["to_first"]), None),
        ("then each", _time(frame["between"]), None),
        ("CPUs", cpus, CPU),
        ("wait for CPU", _share(_series(frame, DELAY, 1)[0] / 1e9), DELAY),
        ("threads work", "-" if frame["working"] is None else _share(frame["working"]), None),
        ("requests", f"{len(frame['active']):,} of {frame['n_requests']:,}", None),
    ]
    if frame["slots"]:
        waits = f", {shown(frame['waits'], 'ns')}" if frame["queued"] else ""
        figures.append(("in the queue", f"{frame['queued']:,}{waits}", None))
        figures.append(("from cache", _share(frame["reused"] or 0), None))
        figures.append(("slots keep", counted(sum(frame["held"]), "token"), None))
    if (copies := frame["copies"]) is not None:
        figures.append(
            ("copies in RAM", f"{copies['prompts']:,}, {shown(copies['bytes'], 'bytes')}", None)
        )
        figures.append(("copied", f"{copies['save']:,} in, {copies['load']:,} out", None))
    for name, ns, held, _ in frame["devices"]:
        busy = _share(ns / max(frame["t"], 1))  # steps of devices last longer than their calls
        label = set_cell_size(printable(name), LABEL - 1)
        figures.append((label, f"{busy}, {shown(held, 'bytes')}", None))
    n = max(1, min(MOST_COLUMNS, width // FIGURE))
    each = width // n
    for i in range(0, len(figures), n):
        line = Text()
        for label, value, column in figures[i : i + n]:
            line.append(f"{label:<{LABEL}}", DIM)
            line.append(f"{value:>{VALUE}} ", STRONG)
            room = each - LABEL - VALUE - 3
            line.append(_sparks(frame, column, room) if column else " " * room, GOOD)
            line.append("  ")
        yield line


def _time(ns: float | None) -> str:
    return shown(ns, "ns") or "-"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %"


def _series(frame: Json, column: int, n: int) -> list[int]:
    """A column of the `n` latest whole seconds; cells and memory stay while nothing happens."""
    now = frame["t"] // 10**9
    known = {second[0]: second[column] for second in frame["seconds"]}
    value = next((known[at] for at in reversed(known) if at < now - n), 0)
    values: list[int] = []
    for at in range(now - n, now):
        value = known.get(at, value if column in (CELLS, RSS) else 0)
        values.append(value)
    return values


def _sparks(frame: Json, column: int, n: int) -> str:
    values = _series(frame, column, max(n, 0))
    most = max(values, default=0) or 1
    return "".join(SPARKS[min(7, 8 * value // most)] for value in values)


# --- requests ---


def _lanes(frame: Json, width: int, height: int) -> Iterator[Text]:
    """A line for each request: what it waited for, and the end of its text."""
    lanes, active = frame["lanes"], set(frame["active"])
    hidden = frame["n_requests"] - min(len(lanes), max(height - 2, 0))
    yield _rule("Requests", f"{hidden:,} more are not shown" if hidden > 0 else "", width)
    if height < 2:
        return
    head = f"  {'':<{NAME}}{'prompt':>7}{'first':>9}{'then each':>10}{'tokens':>7}  "
    yield Text(head + "text", DIM)
    usual = frame["between"] or 1e6
    for lane in lanes[: height - 2]:
        under_way = lane["lane"] in active
        state = "▸" if under_way else "✓" if lane["over"] else "·"
        known = None if lane["task"] is None else f"slot {lane['seq']} #{lane['task']}"
        name = known or printable(lane["name"]) or f"sequence {lane['seq']}"
        facts = (
            f"{lane['prompt']:>7,}{_time(lane['to_first']):>9}{_time(lane['between']):>10}"
            f"{lane['n_tokens']:>7,}  "
        )
        line = Text.assemble(
            (f"{state} ", GOOD if under_way else DIM),
            (set_cell_size(name, NAME - 1) + " ", STRONG if under_way else DIM),
            (facts, Style.null() if under_way else DIM),
        )
        line.append_text(_tail(lane["tokens"], width - line.cell_len, usual, not under_way))
        yield line
    yield from [Text()] * (height - 2 - len(lanes))


def _tail(tokens: list[Any], width: int, usual: float, dim: bool) -> Text:
    """The end of a text; the later a token came, the stronger its background."""
    pieces: list[tuple[str, Style]] = []
    room = width
    for i in range(len(tokens) - 1, -1, -1):
        text = printable(tokens[i][1].replace("\n", " "))
        room -= cell_len(text)
        if room < 0:
            break
        gap = tokens[i][2] - tokens[i - 1][2] if i else 0
        slowness = min(1.0, max(0.0, math.log2(gap / usual) / 4)) if gap > 0 else 0.0
        pieces.append((text, _background(slowness) if slowness > 0.1 else Style(dim=dim)))
    return Text.assemble(*reversed(pieces))


# --- layers × blocks ---


def _heat(heat: Json, phase: str, width: int, height: int) -> Iterator[Text]:
    """The latest step beside the average; the first row is outside of layers."""
    last, mean = np.array(heat["last"], float), np.array(heat["mean"], float)
    rows = list(_row_ranges(len(last), height - 2))
    caption = (
        f"{phase}: latest {shown(last.sum(), 'ns')}, average {shown(mean.sum(), 'ns')} of"
        f" {heat['steps']:,}"
    )
    yield _rule("Layers × blocks", caption, width)
    blocks = heat["blocks"]
    each = max(2, (width - NAME) // 2 // len(blocks))
    names = "".join(f"{name[: each - 1]:<{each}}" for name in blocks)
    half = each * len(blocks) + 2
    yield Text(f"{'':<{NAME - 2}}{names:<{half}}{names}", DIM)
    bands = [
        np.array([heats[first:end].mean(axis=0) for first, end in rows]) for heats in (last, mean)
    ]
    # one scale for both, which a single slow kernel does not change
    shares = [placed(band, bands[1]) for band in bands]
    for i, (first, end) in enumerate(rows):
        label = "outside" if not first else "layer " + _range(first - 1, end - 2)
        halves = [
            Text.assemble(*map(_cell, band[i], share[i], [each] * len(blocks)))
            for band, share in zip(bands, shares, strict=True)
        ]
        yield Text(f"{label:<{NAME - 2}}", DIM).append_text(Text("  ").join(halves))


def _row_ranges(n: int, height: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit, each with its end: the first alone, the others in equal groups."""
    yield 0, 1
    group = math.ceil((n - 1) / max(height - 1, 1))
    for first in range(1, n, max(group, 1)):
        yield first, min(first + group, n)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _cell(value: float, share: float, width: int) -> Text:
    if width >= 9:
        words = shown(value, "ns") if value else ""
        return Text(f"{words:^{width - 1}}", _background(share)).append(" ", Style.null())
    shade = SHADES[min(4, math.ceil(4 * share) or int(value > 0))]
    return Text(shade * (width - 1), Style(color="dark_orange")).append(" ")


def _background(share: float) -> Style:
    """From hardly visible to a strong orange, with letters that stay readable."""
    low, high = (40, 34, 30), (232, 93, 20)
    mixed: Sequence[float] = [a + (b - a) * share for a, b in zip(low, high, strict=True)]
    ink = "black" if share > 0.6 else "white"
    return Style(color=ink, bgcolor=Color.from_rgb(*mixed))


def _rule(title: str, caption: str, width: int) -> Text:
    line = Text.assemble((f"── {title} ", STRONG), (caption and f"{caption} ", DIM))
    return line.append("─" * max(0, width - line.cell_len), DIM)


# --- the application ---

REDRAW_S = 0.2

HELP = """\
[b]tokens/s[/b]      generated in the last second; a token is a word or a part of one
[b]prompt tok/s[/b]  tokens of prompts that were read in the last second
[b]cache cells[/b]   what the model remembers of the texts: one cell per token
[b]first token[/b]   from a request to its first token, median
[b]then each[/b]     from one token of a request to the next, median
[b]CPUs[/b]          used by the program, of those of the machine
[b]wait for CPU[/b]  threads that were ready to run and could not
[b]threads work[/b]  share of the latest step in which they did not wait
[b]requests[/b]      under way, of all that arrived
[b]in the queue[/b]  requests that wait for a slot, and how long the first has waited
[b]from cache[/b]    share of the tokens of prompts that were not read again

In a small chart each character is a second; now is on the right.

llama-server's requests have the numbers of their slot and task.
A request is ▸ under way, ✓ done, or · without a new token for a while.
Tokens on [white on #8a3a10] orange [/] came later than usual.

[b]Layers × blocks[/b] shows where the time goes: a model is a stack of layers
with blocks such as attention. The stronger a cell, the longer it took;
the latest step is on the left, the average on the right.

[b]p[/b] pause, resume   [b]h[/b] prefill, decode   [b]q[/b] quit   any key closes this"""


class LiveApp(App[None]):
    """Draws the state of a session until the user quits. `p` pauses drawing, not counting."""

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
        self.frame: Json | None = None
        """what is shown"""
        self.phase: str | None = None
        self.paused = False
        self._session = session
        self._view = View(id="view")

    def compose(self) -> ComposeResult:
        yield self._view
        yield Footer()

    def on_mount(self) -> None:
        # without this the terminal would not be restored
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
    """The whole screen except its last line."""

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
