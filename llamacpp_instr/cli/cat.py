"""`instr cat LOG...`: prints a log's events, all or selected, unchanged or in the flat form."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import Logs, log_options, notice_ends
from llamacpp_instr.cli.options import command, force_option, range_option


@command("instr cat session.log --expand --event op --layers 0 | jq .dur")
@click.option("--event", "events", metavar="NAME", multiple=True, help="Only events of this name.")
@range_option("--steps", "Only events of steps A to B.")
@range_option("--layers", "Only lines of layers A to B; none: of those outside of layers.")
@click.option("--expand", is_flag=True, help="One line for each op and layer (the flat form).")
@log_options
@click.option("-o", "--output", default="-", metavar="FILE", help="Write to FILE; - is stdout.")
@force_option
def cat(
    logs: Logs,
    events: tuple[str, ...],
    steps: tuple[int, int] | None,
    layers: tuple[int, int] | None,
    expand: bool,
    output: str,
    force: bool,
) -> None:
    """Print the events of a log, all or selected.

    Prints one JSON object per line. LOG is a file, plain or compressed (.gz, .zst), or - for
    standard input. The parts of a rotated log are printed as one log; other logs one after the
    other.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.exports.flat import LineSelection, expand_lines, select_lines
    from llamacpp_instr.log.runs import find_runs, read_run

    check_output(output, force, *logs.names)
    selection = LineSelection(events, steps, layers)
    readers = [read_run(run, logs.lenient) for run in find_runs(logs.names)]
    with open_output(output, force) as file:
        for reader in readers:
            if expand:
                file.writelines(expand_lines(reader, selection, logs.lenient))
            else:
                file.writelines(select_lines(reader, selection))
    notice_ends(readers)
