"""`instr live LOG`: shows a session in the browser or the terminal while it is recorded."""

from __future__ import annotations

import threading

import click

from llamacpp_instr.cli.options import command
from llamacpp_instr.errors import UsageError
from llamacpp_instr.extras import need


@command(
    "instr live session.log",
    "instr live server.log --port 8123 --no-browser",
    "instr live server.log --tui",
)
@click.argument("log", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port.  [default: any free]")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--tui", is_flag=True, help="Show it in this terminal; serve nothing.")
def live(log: str, port: int, no_browser: bool, tui: bool) -> None:
    """Watch a log while it is written.

    Serves a page on 127.0.0.1 until Ctrl-C: the text of every request as it is generated, with its
    times; tokens per second; layers and blocks of the latest step; the KV cache and memory. It
    follows the log into its next parts if it rotates. The recorded program does not notice.

    Prometheus can read the same figures at /metrics of that port.

    --tui shows the figures in the terminal, for a machine that one is logged into.
    """
    if not tui:
        show(log, port, not no_browser)
    elif port or no_browser:
        raise UsageError("--tui serves no page; leave out --port and --no-browser")
    else:
        show_in_terminal(log)


def show(log: str, port: int = 0, browser: bool = True) -> None:
    """Serve the page of a log until Ctrl-C or SIGTERM. Raises UsageError if a part is not installed
    or the port is taken, LogError for a file that is not a log, NotWritten if nobody writes it."""
    import signal
    import webbrowser

    need("live")
    from converters.live.hub import Hub
    from converters.live.server import LiveServer
    from llamacpp_instr.cli.live_range import RangeOpener
    from llamacpp_instr.log.follow import FollowedLog
    from llamacpp_instr.terminal import print_line

    stop = threading.Event()
    followed = FollowedLog(log, stop)
    hub = Hub(followed)
    ranges = RangeOpener(hub, followed)
    server = LiveServer(hub, ranges.open, port)
    hub.start()

    def started() -> None:
        print_line(server.address)
        print_line(f"metrics: {server.metrics}")
        if browser:
            # some browsers are waited for, and they wait for the page
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # what is under way ends with it
    try:
        with ranges:
            server.run(started)
    finally:
        stop.set()
        hub.join()


def show_in_terminal(log: str) -> None:
    """Draw a log until somebody quits. Raises UsageError without Textual or a terminal, and what
    `show` raises for the log."""
    import os
    import sys

    need("tui")
    from converters.live.hub import Hub
    from converters.live.tui import LiveApp
    from llamacpp_instr.log.follow import FollowedLog

    drawable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if not (sys.stdin.isatty() and sys.stdout.isatty() and drawable):
        raise UsageError("--tui needs a terminal; leave it out for the page")
    stop = threading.Event()
    hub = Hub(FollowedLog(log, stop))
    hub.start()
    try:
        LiveApp(hub).run()
    finally:
        stop.set()
        hub.join()
