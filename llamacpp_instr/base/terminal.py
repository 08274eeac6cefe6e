"""Prints text from models, logs and file names so that it cannot control a terminal; also shows a
progress bar and handles signals.

Invariant: text printed to a terminal contains no control characters except newlines and tabs, so
it can neither start an escape sequence nor change the direction of the text around it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TextIO, TypeAlias

PIPE, NARROWEST = 160, 40
"""characters of a line: in a pipe or a file, and at least on a terminal"""


def printable(text: str) -> str:
    """The text as part of one line, with control characters escaped as `\\x1b`."""
    return _UNPRINTABLE.sub(_written_out, text)


def printable_text(text: str) -> str:
    """The same for text of several lines: newlines and tabs are kept."""
    return _UNPRINTABLE_IN_TEXT.sub(_written_out, text)


def counted(n: int, what: str) -> str:
    """`1 token`, `1,748 tokens`."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def write_text(out: BinaryIO, text: str) -> None:
    """Write text to a binary stream: escaped to a terminal, else as its reader expects it."""
    out.write((printable_text(text) if out.isatty() else text).encode(errors="surrogateescape"))
    out.flush()


def print_line(line: object) -> None:
    """Print a line with a file name to standard output, like `write_text`: a script gets the
    original bytes of a name that is not UTF-8. Ignores a closed pipe."""
    try:
        sys.stdout.flush()
        write_text(sys.stdout.buffer, f"{line}\n")
    except BrokenPipeError:
        abandon_standard_output()


def line_width() -> int:
    """The width of a report in characters: the terminal's or COLUMNS; PIPE in a pipe or a file."""
    return max(shutil.get_terminal_size((PIPE, 0)).columns, NARROWEST)


def abandon_standard_output() -> None:
    """Discard what is printed from now on: flushing it at exit would be reported as an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render_json(value: object) -> str:
    """Indented JSON, for a script or a terminal."""
    import json

    # of the characters that can control a terminal, ASCII JSON leaves only this one unescaped
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f") + "\n"


MOST = 1000
"""maximum length in characters of a line that quotes a file"""


def shortened(line: str) -> str:
    """The line, without its middle if it is longer than MOST: quoted text may be megabytes long."""
    return line if len(line) <= MOST else f"{line[: MOST * 2 // 3]}…{line[-MOST // 3 :]}"


def first_names(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def notice(line: str) -> None:
    """Print a line to standard error, escaped and shortened."""
    print(printable(shortened(line)), file=sys.stderr, flush=True)


def replace_what_cannot_be_shown() -> None:
    """Print `?` for each character that the encoding of standard output lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def handled(
    handler: Callable[[int, Any], object],
    *names: str,
    only: Callable[[Any], bool] = lambda before: before is not None,
) -> Iterator[None]:
    """Inside, `handler` handles those of the named signals that this system has and whose previous
    handler `only` accepts; by default any that Python has installed. Does nothing outside the main
    thread, which alone receives signals."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in names):  # Windows lacks some
            if number is not None and only(signal.getsignal(number)):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _written_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


# C0, DEL, C1; marks and overrides of direction; line separators; surrogates and noncharacters
_STEERING = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_STEERING}]")
_UNPRINTABLE_IN_TEXT = re.compile(f"[\x00-\x08\x0b-\x1f{_STEERING}]")


OnProgress: TypeAlias = "Callable[[int, int], None]"
"""called with (done, total) in one unit; a total of 0 means unknown"""

SILENT_SECONDS = 2.0


@contextlib.contextmanager
def progress_bar(what: str, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Yields the function to call during the work. The bar appears after two seconds and is erased
    afterwards. `what` precedes it, as in `Reading session.log`. `stream` defaults to stderr."""
    stream = stream or sys.stderr
    is_terminal = False
    with contextlib.suppress(AttributeError, ValueError):  # a notebook or a service replaced it
        is_terminal = stream.isatty()
    if not is_terminal:
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(file=stream)
    if console.is_dumb_terminal:  # cannot erase a bar
        yield lambda _done, _total: None
        return
    started = time.monotonic()
    bar = Progress(console=console, transient=True)
    task = bar.add_task(escape(printable(what)), total=None)

    def on_progress(done: int, total: int) -> None:
        if time.monotonic() - started >= SILENT_SECONDS:
            bar.start()
            bar.update(task, completed=done, total=total or None)

    try:
        yield on_progress
    finally:
        bar.stop()
