"""Shows a log while it is written: as a page, in the terminal, or beside the recorded program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need, python
from llamacpp_instr.base.terminal import print_line

if TYPE_CHECKING:
    from llamacpp_instr.converters.live.live_session import EndedIn

LOOK_S = 0.1
_ENDS = ((0.5, signal.SIGINT), (5, signal.SIGKILL))
"""what ends a page that still runs after these seconds; the first wait is for its last figures"""


def serve(log: str, port: int, show: Callable[[str], object], ended: EndedIn | None = None) -> None:
    """Serve the page of a log until Ctrl-C or SIGTERM; `show` gets its address, and what `ended`
    makes gets each request that ends. Raises UsageError if a part is not installed or the port is
    taken, LogError for a file that is not a log, NotWritten if no process writes it."""
    need("live")
    from llamacpp_instr.converters.live.live_session import LiveSession
    from llamacpp_instr.converters.live.server import LiveServer, RangeOpener
    from llamacpp_instr.log.runs import FollowedLog

    stop = threading.Event()
    followed = FollowedLog(log, stop)
    session = LiveSession(followed, ended)
    ranges = RangeOpener(session, followed)
    server = LiveServer(session, ranges.open, port)
    session.start()

    def started() -> None:
        show(server.address)
        print_line(f"metrics: {server.metrics}")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # what is under way ends with it
    try:
        with ranges:
            server.run(started)
    finally:
        stop.set()
        session.join()


def draw(log: str, ended: EndedIn | None = None) -> None:
    """Draw a log in the terminal until the user quits; `ended` is as in `serve`. Raises UsageError
    without Textual or a terminal, and what `serve` raises for the log."""
    need("tui")
    from llamacpp_instr.converters.live.live_session import LiveSession
    from llamacpp_instr.converters.live.tui import LiveApp
    from llamacpp_instr.log.runs import FollowedLog

    drawable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if not (sys.stdin.isatty() and sys.stdout.isatty() and drawable):
        raise UsageError("--tui needs a terminal; leave it out for the page")
    stop = threading.Event()
    session = LiveSession(FollowedLog(log, stop), ended)
    session.start()
    try:
        LiveApp(session).run()
    finally:
        stop.set()
        session.join()


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

    def begin() -> None:
        log = find_log()
        while log is None and not over.wait(LOOK_S):
            log = find_log()
        if log is not None:
            server = subprocess.Popen(
                python(_SERVE, str(log)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C is for the recorded program
            )
            servers.append(server)

    watcher = threading.Thread(target=begin, name="live", daemon=True)
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
            for seconds, number in _ENDS:
                with suppress(subprocess.TimeoutExpired):
                    server.wait(seconds)
                    break
                server.send_signal(number)
            server.wait()


# a session may be over before its page is ready; signals of the thread that starts it are blocked
_SERVE = """
import contextlib, signal, sys
with contextlib.suppress(KeyboardInterrupt):
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from llamacpp_instr.cli.options import Serving
    from llamacpp_instr.converters.live.show import serve
    from llamacpp_instr.log.runs import NotWritten
    with contextlib.suppress(NotWritten):
        serve(sys.argv[1], 0, Serving().show)
"""
