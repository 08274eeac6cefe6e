"""`instr live LOG`: shows a session in the browser or the terminal while it is recorded."""

from __future__ import annotations

import threading

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.serving import Serving, serving_options


@command(
    "instr live session.log",
    "instr live server.log --port 8123 --no-browser",
    "instr live server.log --tui",
)
@click.argument("log", type=click.Path())
@serving_options()
@click.option("--tui", is_flag=True, help="Show it in this terminal; serve nothing.")
def live(log: str, serving: Serving, tui: bool) -> None:
    """Watch a log while it is written.

    Serves a page on 127.0.0.1 until Ctrl-C: the text of every request as it is generated, with its
    times; tokens per second; layers and blocks of the latest step; the KV cache and memory. It
    follows the log into its next parts if it rotates. The recorded program does not notice.

    Prometheus can read the same figures at /metrics of that port.

    --tui shows the figures in the terminal, for example on a remote machine.
    """
    if not tui:
        show(log, serving)
    elif serving.port or serving.no_browser:
        raise UsageError("--tui serves no page; leave out --port and --no-browser")
    else:
        show_in_terminal(log)


def show(log: str, serving: Serving) -> None:
    """Serve the page of a log until Ctrl-C or SIGTERM. Raises UsageError if a part is not installed
    or the port is taken, LogError for a file that is not a log, NotWritten if no process
    writes it."""
    import signal

    need("live")
    from llamacpp_instr.base.terminal import print_line
    from llamacpp_instr.converters.live.live_session import LiveSession
    from llamacpp_instr.converters.live.ranges import RangeOpener
    from llamacpp_instr.converters.live.server import LiveServer
    from llamacpp_instr.log.runs import FollowedLog

    stop = threading.Event()
    followed = FollowedLog(log, stop)
    session = LiveSession(followed)
    ranges = RangeOpener(session, followed)
    server = LiveServer(session, ranges.open, serving.port or 0)
    session.start()

    def started() -> None:
        serving.show(server.address)
        print_line(f"metrics: {server.metrics}")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # what is under way ends with it
    try:
        with ranges:
            server.run(started)
    finally:
        stop.set()
        session.join()


def show_in_terminal(log: str) -> None:
    """Draw a log until the user quits. Raises UsageError without Textual or a terminal, and what
    `show` raises for the log."""
    import os
    import sys

    need("tui")
    from llamacpp_instr.converters.live.live_session import LiveSession
    from llamacpp_instr.converters.live.tui import LiveApp
    from llamacpp_instr.log.runs import FollowedLog

    drawable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if not (sys.stdin.isatty() and sys.stdout.isatty() and drawable):
        raise UsageError("--tui needs a terminal; leave it out for the page")
    stop = threading.Event()
    session = LiveSession(FollowedLog(log, stop))
    session.start()
    try:
        LiveApp(session).run()
    finally:
        stop.set()
        session.join()
