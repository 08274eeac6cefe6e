"""A progress bar on standard error, after two seconds of work and only on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO, TypeAlias

from llamacpp_instr.base.terminal import printable

OnProgress: TypeAlias = "Callable[[int, int], None]"
"""called with (done, total) in one unit; a total of 0 means unknown"""

SILENT_SECONDS = 2.0


@contextlib.contextmanager
def progress_bar(what: str, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """The function to call during the work. The bar appears after two seconds and is erased.

    `what` precedes it, as in `Reading session.log`. `stream` defaults to standard error.
    """
    stream = stream or sys.stderr
    if not _is_terminal(stream):
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


def _is_terminal(stream: TextIO | None) -> bool:
    """False for a stream that a notebook or a service has closed or replaced."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False
