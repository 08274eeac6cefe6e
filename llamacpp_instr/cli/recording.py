"""The options of a recording, and what --live does: it opens the page of a log while this process,
or its child, writes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from llamacpp_instr.base.system import need
from llamacpp_instr.log.schema import LEVELS

LOOK_S = 0.1
LAST_FRAME_S = 0.5
"""for the page, to get the last figures"""
PATIENCE_S = 5

level_option = click.option(
    "--level",
    default="detailed",
    show_default=True,
    type=click.Choice(LEVELS),
    help="How much is recorded.",
)
stats_option = click.option(
    "--stats",
    metavar="PATTERN",
    help="Record the values of tensors whose names match: * is any text, re: begins a regular "
    "expression. "
    "Do not compare the times of such a session.",
)
log_error_option = click.option(
    "--on-log-error",
    default="continue",
    show_default=True,
    type=click.Choice(["continue", "stop"]),
    help="What to do when a log can no longer be written.",
)
live_option = click.option(
    "--live",
    is_flag=True,
    help="Open a page that shows the session while it is recorded (instr live).",
)


@contextmanager
def watched(is_wanted: bool, find_log: Callable[[], Path | None]) -> Iterator[None]:
    """Shows the first log that `find_log` returns while the block runs, if it `is_wanted`.

    The page is served by a process of its own, which ends with the block; its address goes to
    standard error. Raises UsageError if a part of the page is not installed.
    """
    if not is_wanted:
        yield
        return

    need("live")
    over = threading.Event()
    servers: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        log = find_log()
        while log is None and not over.wait(LOOK_S):
            log = find_log()
        if log is not None:
            servers.append(_start(log))

    watcher = threading.Thread(target=serve, name="live", daemon=True)
    # signals are for the block, which may wait for them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        watcher.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for server in servers:
            _stop(server)


# a session may be over before its page is there; signals of the thread that starts it are blocked
_SERVE = """
import contextlib, signal, sys
with contextlib.suppress(KeyboardInterrupt):
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from llamacpp_instr.cli.live import show
    from llamacpp_instr.cli.serving import Serving
    from llamacpp_instr.log.runs import NotWritten
    with contextlib.suppress(NotWritten):
        show(sys.argv[1], Serving())
"""


def _start(log: Path) -> subprocess.Popen[bytes]:
    from llamacpp_instr.base.system import python

    command = python(_SERVE, str(log))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,  # Ctrl-C is for the recorded program
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    try:
        server.wait(LAST_FRAME_S)
        return
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
