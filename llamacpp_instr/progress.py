"""A progress bar on standard error, after two seconds of work and only on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO, TypeAlias

from llamacpp_instr.terminal import printable

OnProgress: TypeAlias = "Callable[[int, int], None]"
"""called with what is done and what there is to do, in one unit; 0 to do means not known"""

SILENT_SECONDS = 2.0


@contextlib.contextmanager
def progress_bar(what: str, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """What to call as the work goes on; the bar appears after two seconds and leaves no trace.

    `what` precedes it, as in `Reading session.log`. `stream` is standard error unless given.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    begun = time.monotonic()
    bar = Progress(console=Console(file=stream), transient=True)
    task = bar.add_task(escape(printable(what)), total=None)

    def on_progress(done: int, total: int) -> None:
        if time.monotonic() - begun >= SILENT_SECONDS:
            bar.start()
            bar.update(task, completed=done, total=total or None)

    try:
        yield on_progress
    finally:
        bar.stop()
