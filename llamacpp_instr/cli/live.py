"""`instr live LOG`: shows a session in the browser while it is recorded."""

from __future__ import annotations

import threading

import click


@click.command(
    "live",
    epilog="\b\nExamples:\n  instr live session.log\n"
    "  instr live server.log --port 8123 --no-browser",
)
@click.argument("log", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port.  [default: any free]")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
def live(log: str, port: int, no_browser: bool) -> None:
    """Watch a log while it is written.

    Serves a page on 127.0.0.1 until Ctrl-C: the text of every request as it is generated, with its
    times; tokens per second; layers and blocks of the latest step; the KV cache and memory. It
    follows the log into its next parts if it rotates. The recorded program does not notice.

    Prometheus can read the same figures at /metrics of that port.
    """
    show(log, port, not no_browser)


def show(log: str, port: int = 0, browser: bool = True) -> None:
    """Serve the page of a log until Ctrl-C or SIGTERM. Raises UsageError if a part is not installed
    or the port is taken, LogError for a file that is not a log, NotWritten if nobody writes it."""
    import webbrowser

    from converters.live.installed import check_installed

    check_installed()
    from converters.live.hub import Hub
    from converters.live.server import LiveServer
    from llamacpp_instr.log.follow import FollowedLog
    from llamacpp_instr.terminal import print_line

    stop = threading.Event()
    hub = Hub(FollowedLog(log, stop))
    server = LiveServer(hub, port)
    hub.start()

    def started() -> None:
        print_line(server.address)
        print_line(f"metrics: {server.metrics}")
        if browser:
            # some browsers are waited for, and they wait for the page
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()

    try:
        server.run(started)
    finally:
        stop.set()
        hub.join()
