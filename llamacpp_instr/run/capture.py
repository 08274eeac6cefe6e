"""What `instr run --capture` adds to a run: the values of chosen nodes, written to a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llamacpp_instr.debugger.capture import Capture
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.stop import Go
from llamacpp_instr.terminal import counted


@contextmanager
def capturing(
    pattern: str, folder: Path, force: bool, notice: Callable[[str], None]
) -> Iterator[Debugger]:
    """A debugger for `run` that never stops: the values of all nodes of `pattern` go to `folder`.
    `notice` is told at the end what was captured, also if an error ended the run.

    Raises `UsageError` as `Capture` does, and if a node has no row for each token.
    """
    capture = Capture(pattern, folder, force)
    debugger = Debugger(lambda _stop: Go.ON)
    debugger.followers.append(capture)
    complete = False
    try:
        yield debugger
        complete = True
    finally:
        capture.close(complete)
        if capture.n_tokens:
            notice(f"captured: {folder}, {counted(capture.n_tokens, 'token')}")
