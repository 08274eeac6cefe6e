"""The commands that explain times: two or more sessions or models side by side, the values that a
session read, and what a machine, this or another one, can do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click import Choice, FloatRange, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import (
    LOGS,
    GroupedCommand,
    Logs,
    group,
    is_model,
    load_run,
    several_logs,
)

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session
    from llamacpp_instr.model.file import ModelFile
    from llamacpp_instr.prediction.probe.file import Probe

MOST_SWEPT = 1024


@cli.command(
    "instr diff before.log after.log",
    "instr diff before.log after.log --by tensor --phase decode",
    "instr diff main.log branch.log --fail-above 5%",
    "instr diff --before main-*.log --after branch-*.log",
    "instr diff v1.log v2.log v3.log",
    "instr diff --before v1-*.log --after v2-*.log --after v3-*.log",
    cls=GroupedCommand,
)
def diff(
    logs: tuple[str, ...] = cli.argument(nargs=-1, metavar="[A B...]"),
    before: list[tuple[str, ...]] = group("The logs of group A, two or more.", "A.log..."),
    after: list[tuple[str, ...]] = group(
        "The logs of group B, two or more; repeat for each later group.", "B.log..."
    ),
    by: str | None = cli.option(
        "How to break down the steps.  [default: block and op]",
        type=Choice(["phase", "block", "layer", "op", "tensor"]),
    ),
    phase: str | None = cli.PHASE,
    fail_above: str | None = cli.option(
        "Exit with status 1 if the steps of a phase are slower in B, or in the last group, by more"
        " than this, beyond the noise: the lower end of the interval exceeds it.",
        "PERCENT",
    ),
    lenient: bool = cli.LENIENT,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Compares B with A: first the differences in their settings, then the medians with their
    intervals. A step is called slower or faster only if its interval excludes 1.

    A and B are logs, plain or compressed (.gz, .zst); one of them may be - for standard input.
    Record both with `instr run ... --repeat 11`, because the noise is estimated from the runs.

    With --before and --after, each side is a group of logs of several processes. With at least five
    logs per side, the interval contains the measured variation between processes instead of an
    assumed 2 %. If the logs of both sides were recorded alternately, they are compared in pairs.

    More than two logs or groups form a trend, in the order given: each is compared with the first
    and with the previous one. The parts of a rotated log are one log, unless all logs are parts of
    the same one.
    """
    from llamacpp_instr.converters.analyses.diff import compute_diff
    from llamacpp_instr.converters.analyses.diff.trend import compute_trend

    threshold = _parse_percent(fail_above) if fail_above is not None else None
    if bool(logs) is bool(before or after) or len(before) > 1 or bool(before) is not bool(after):
        raise UsageError("give two or more logs, or groups of them: --before once, then --after")
    groups = (*before, *after)
    named = [*logs, *(log for group in groups for log in group)]
    _check_standard_input(named)
    output.check(*named)
    if logs:
        sides = _of_logs(logs, lenient)
    else:
        sides = [Logs(group, lenient).sessions() for group in groups]
    if len(sides) > 2:
        found = compute_trend(sides, by, phase)
    else:
        found = compute_diff(sides[0], sides[1], by, phase)
    output.write(found.reports, table=found.reports[1], charts=found.charts)
    if threshold is not None and (slower := found.slower_by(threshold)):
        notice(f"slower by more than {100 * threshold:g} %: {', '.join(slower)}")
        sys.exit(1)


def _check_standard_input(logs: Sequence[str]) -> None:
    if logs.count("-") > 1:
        raise UsageError("only one of the logs can be standard input")


def _of_logs(logs: Sequence[str], lenient: bool) -> list[list[Session]]:
    """Each log, or each rotated one with its parts, is a side."""
    from llamacpp_instr.log.runs import Run, find_runs

    runs = find_runs(logs, repeated=True)
    if len(runs) == 1:
        runs = [Run((log,)) for log in logs]
    if len(runs) == 1:
        raise UsageError("only one log is given; give two or more")
    return [[load_run(run, lenient)] for run in runs]


def _parse_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-above {text}: give a percentage, such as 5% or 2.5")
    return percent / 100


class _Compare(GroupedCommand):
    """Models may follow the logs of --log."""

    def ends(self, value: str) -> bool:
        return is_model(value)


@cli.command(
    "instr compare --types Q8_0,Q4_K_M model-F16.gguf",
    "instr compare a.gguf b.gguf --log a.log --log b.log --reference f16.gguf",
    "instr compare v1.gguf v2.gguf --log v1-*.log --log v2-*.log",
    "instr compare a.log b.log -o comparison.html",
    cls=_Compare,
)
def compare(
    inputs: tuple[str, ...] = cli.argument(nargs=-1, required=True, metavar="MODEL|LOG..."),
    log: list[tuple[str, ...]] = group(
        "One or more logs of a MODEL; repeat for each MODEL, in their order.", "LOG..."
    ),
    lenient: bool = cli.LENIENT,
    reference: str | None = cli.option("Base of the errors.  [default: the first]", "MODEL"),
    types: str | None = cli.option(
        "Quantize MODEL to these types, run and compare.",
        "A,B,...",
        shell_complete=cli.complete_names,
    ),
    prompt: str | None = cli.option(
        "Prompt for --types.  [default: 512 tokens of the vocabulary]", "-p --prompt"
    ),
    n: int = cli.option("Tokens that a run of --types generates.", "-n", default=32),
    rounds: int = cli.option("Rounds of --types; each runs all types once.", default=5),
    threads: int | None = cli.option("Threads for --types.  [default: physical cores]", type=int),
    keep: str | None = cli.option("Keep the models and the logs of --types in DIR.", "DIR"),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints models side by side, by tensor, role, layer and in total: file and run-time memory,
    types, bits per weight, and error of the weights. With logs, also the time and the rates of
    every op.

    MODEL is a GGUF file, or demo. A LOG means the model that it recorded; the parts of a rotated
    log are one LOG. Several logs of a MODEL are several runs of it, whose steps count together; the
    noise is estimated from all of them. Each model is compared with the first.
    """
    from llamacpp_instr.converters.analyses.compare import compute_comparison, draw_comparison
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.run import compare

    if types is None:
        for given in cli.given_options("prompt", "n", "rounds", "threads", "keep"):
            raise UsageError(f"{given} has no effect without --types; leave it out")
    output.check(*inputs, *(name for group in log for name in group), reference)
    against = load_model_file(reference) if reference else None
    with contextlib.ExitStack() as stack:
        if types is None:
            candidates = compare.candidates_of(*_read_sides(inputs, log, lenient))
        else:
            if len(inputs) != 1 or log:
                raise UsageError("--types takes one MODEL and no LOG: it quantizes and records")
            source = load_model_file(inputs[0])
            against = against or source
            directory = stack.enter_context(compare.trial_directory(keep))
            options = compare.trial_options(prompt, n, threads, output.force)
            # a single type is compared with the source
            trials = compare.run_trials(
                source, types.split(","), directory, options, rounds, notice, against.headers
            )
            candidates = compare.candidates_of_trials(trials)
        if len(candidates) < 2:
            raise UsageError("only one model is given; name another, or use --types A,B")
        candidates = compare.with_errors(candidates, against)
        named = against.path.name if against else candidates[0].name
        has_errors = any(of.errors for of in candidates)
        reports = compute_comparison(
            candidates,
            named if has_errors else None,
            every_tensor=output.form in ("csv", "json", "html"),
        )
    # the last table is the one of tensors
    output.write(reports, table=reports[-1], charts=draw_comparison(candidates))


def _read_sides(
    inputs: Sequence[str], logs: Sequence[tuple[str, ...]], lenient: bool
) -> tuple[Sequence[str], list[ModelFile | None], list[list[Session]], list[str]]:
    """What `candidates_of` gets: the name, the file and the sessions of each model, and its log."""
    from llamacpp_instr.log.runs import find_runs
    from llamacpp_instr.model.file import load_model_file

    recorded = [of for of in inputs if not is_model(of)]
    parts = {run.paths[0]: run for run in find_runs(recorded, repeated=True)}
    inputs = [of for of in inputs if of in parts or is_model(of)]
    files = [load_model_file(of) if is_model(of) else None for of in inputs]
    if not logs:
        recorded_by = [[load_run(parts[of], lenient)] if of in parts else [] for of in inputs]
        return inputs, files, recorded_by, inputs
    if not all(files):
        raise UsageError("--log is for models; a LOG argument needs none")
    if len(logs) != len(inputs):
        raise UsageError(
            f"{len(inputs)} models are given, but {len(logs)} --log; each model needs one, with"
            " all its logs"
        )
    _check_standard_input([name for group in logs for name in group])
    recorded_by = [Logs(group, lenient).sessions() for group in logs]
    return inputs, files, recorded_by, [group[0] for group in logs]


@cli.command("instr values f16.log", "instr values f16.log q4.log -o values.html")
def values(logs: Logs = several_logs("LOG [OTHER]"), output: cli.ReportOutput = cli.REPORT) -> None:
    """Prints each tensor that --stats read, by op and layer, over all computes: smallest, largest,
    mean, standard deviation, zeros, and whether there are NaN or infinite values. An HTML page has
    maps of the deviation by layer and token.

    With OTHER, compares the means and the deviations, for example of F16 and Q4_K: by tensor, and
    token by token, as long as the tokens of both logs are the same. Record both with the same
    prompt: `instr run MODEL --stats PATTERN`. LOG is a file, plain or compressed (.gz,
    .zst), or - for standard input; the parts of a rotated log are one.
    """
    from llamacpp_instr.converters.analyses import values as values_of

    output.check(*logs.names)
    sessions = logs.sessions()
    if len(sessions) > 2:
        raise UsageError(f"{len(sessions)} sessions are given; values compares two")
    two = len(sessions) == 2
    reports = values_of.compare_values(*sessions) if two else [values_of.compute_values(*sessions)]
    draw = values_of.map_shifts if two else values_of.map_values
    output.write(reports, charts=draw(*sessions) if output.form == "html" else [])


@cli.command(
    "instr probe",
    "instr probe --device Vulkan0                 # add this device to the file",
    "instr probe --calibrate session.log          # adjust to the machine's speed today",
)
def probe(
    output: str | None = cli.option(
        "Write to FILE, not to the user's cache; - prints the JSON.", "-o --output FILE"
    ),
    device: str | None = cli.option(
        "Measure this device instead, as `instr doctor` names it, and add it to the file.", "NAME"
    ),
    calibrate: str | None = cli.option(
        "Scale the costs in the file to LOG, a short session of this machine.", "LOG"
    ),
    force: bool = cli.FORCE,
) -> None:
    """Measures how fast threads copy memory, by the amount that they copy, how fast ggml multiplies
    weights of each type, and the cost of an op that computes nothing. Then it records small random
    models and fits the cost of each kernel. It does all this with 1, 2, 4 and more threads, up to
    the number that `instr run` uses, and takes minutes. Run it while no other process computes: it
    repeats implausible measurements, and leaves them out if they stay implausible. `instr roofline`
    compares logs of this machine with the result, and `instr predict` predicts models.

    For a device, it measures how fast the device copies its memory, how fast ggml multiplies there,
    and the cost of an op that computes nothing. `instr roofline` then has roofs for its kernels.

    --calibrate measures nothing: it scales the costs in the file to those in the log, by one factor
    for each kind of kernel, and widens the intervals if the log's steps scatter. The log needs a
    few decodes of any model, at level detailed, with the number of threads that you predict for.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.base.system import how_to_install, missing_modules
    from llamacpp_instr.converters.analyses.probe import probe_reports
    from llamacpp_instr.llama.build.wheel import own_cache
    from llamacpp_instr.prediction.probe.file import default_path, probe_json, read_probe
    from llamacpp_instr.prediction.probe.measure import measure, thread_counts
    from llamacpp_instr.report.render import render_text

    if output is None:
        own_cache()
        path, force = str(default_path()), True
    else:
        path = output
        check_output(path, force or device is not None or calibrate is not None)
    if device is not None and calibrate is not None:
        raise UsageError("--device and --calibrate exclude each other")
    if device is not None:
        _probe_device(device, path)
        return
    if calibrate is not None:
        _calibrate_probe(calibrate, path)
        return
    missing = missing_modules("predict")
    if missing:
        notice(
            f"{missing[0]} is not installed, so the costs of kernels, which instr predict needs,"
            f" are not measured: {how_to_install('predict')}"
        )
    with progress_bar("Measuring") as on_progress:
        measured = measure(on_progress)
    if not missing:
        from llamacpp_instr.prediction.recorded import measure_kernels

        with progress_bar("Recording random models") as on_progress:
            measured.kernel_model = measure_kernels(thread_counts(), on_progress)
    with contextlib.suppress(UsageError):  # there is none, or it is damaged
        if (known := read_probe(path)).cpu == measured.cpu:
            measured.devices = known.devices
    with open_output(path, force) as file:
        file.write(probe_json(measured))
    if path != "-":
        click.echo(render_text(probe_reports(measured)), nl=False)
        notice(f"wrote {path}")


def _measured_before(path: str) -> Probe:
    """The probe in the file that is to be changed."""
    from llamacpp_instr.prediction.probe.file import default_path, read_probe

    return read_probe(None if path == str(default_path()) else path)


def _probe_device(name: str, path: str) -> None:
    """Measure a device and add it to the file of this machine."""
    from llamacpp_instr.base.cpus import cpu_name
    from llamacpp_instr.base.output import open_output
    from llamacpp_instr.converters.analyses.probe import device_reports
    from llamacpp_instr.llama import native
    from llamacpp_instr.llama.crashes import last_words
    from llamacpp_instr.llama.devices import device_named
    from llamacpp_instr.prediction.probe.device import measure_device
    from llamacpp_instr.prediction.probe.file import probe_json
    from llamacpp_instr.report.render import render_text

    known = _measured_before(path)
    if known.cpu != cpu_name():
        raise UsageError(f"{path} is for {known.cpu}, but this machine is {cpu_name()}")
    native.load()
    device = device_named(name)
    with (
        progress_bar(f"Measuring {name}") as on_progress,
        last_words(lambda: (f"{name} was not measured", 1)),
    ):
        measured = measure_device(device, on_progress)
    with open_output(path, force=True) as file:
        file.write(probe_json(known.with_device(measured)))
    click.echo(render_text(device_reports(known.with_device(measured), name)), nl=False)
    notice(f"added {name} to {path}")


def _calibrate_probe(log: str, path: str) -> None:
    """Scale the costs in the file of this machine to a log."""
    from llamacpp_instr.base.output import open_output
    from llamacpp_instr.converters.analyses.probe import calibration_report
    from llamacpp_instr.prediction.calibrate import calibrated
    from llamacpp_instr.prediction.model import kernel_model
    from llamacpp_instr.prediction.probe.file import check_machine, probe_json
    from llamacpp_instr.report.render import render_text

    known, [session] = _measured_before(path), Logs((log,)).sessions()
    check_machine(log, session.start.host.cpu, known)
    known.kernel_model, factors = calibrated(kernel_model(known, 1), session)
    with open_output(path, force=True) as file:
        file.write(probe_json(known))
    click.echo(render_text([calibration_report(factors)]), nl=False)
    notice(f"wrote {path}")


@cli.command("instr roofline session.log", "instr roofline session.log -o roof.html")
def roofline(
    machine: str | None = cli.option(
        "A file from `instr probe`.  [default: the one in the user's cache]", "FILE"
    ),
    logs: Logs = LOGS,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints, by op and phase, the rates, the FLOPs per byte, the rate that is attainable at that
    intensity, the share of it that was reached, and the limit: memory or the kernel. `instr probe`
    measures the machine.

    The HTML page draws the ops under the roofs. LOG is a file, plain or compressed (.gz, .zst), or
    - for standard input. The parts of a rotated log are one session; other logs are shown one after
    the other.
    """
    from llamacpp_instr.converters.analyses.probe import roofline as compute_roofline
    from llamacpp_instr.prediction.probe.file import read_probe

    output.check(*logs.names, machine)
    probe = read_probe(machine)
    found = [(session.path, *compute_roofline(session, probe)) for session in logs.sessions()]
    charts = [chart for _, _, charts in found for chart in charts]
    if len(found) > 1:
        charts = [
            replace(chart, title=f"{path}: {chart.title}")
            for path, _, charts in found for chart in charts
        ]  # fmt: skip
    named = [(path, reports, reports[0]) for path, reports, _ in found]
    output.write_several(named, charts=charts, title="Roofline")


@cli.command(
    "instr predict model-F16.gguf --types Q8_0,Q4_K_M --threads 1,2",
    "instr predict model.gguf --machine faster.json --ctx 256",
)
def predict(
    model: str = cli.argument(),
    machine: str | None = cli.option(
        "A file from `instr probe`, or an edited one.  [default: the one in the user's cache]",
        "FILE",
    ),
    types: str | None = cli.option(
        "File types to predict, as llama.cpp would quantize MODEL.  [default: MODEL as it is]",
        "TYPE,...",
        shell_complete=cli.complete_names,
    ),
    threads: list[int] = cli.numbers("Numbers of threads.  [default: all that were measured]"),
    batch: int | None = cli.option(
        "Tokens of the prefill, in one graph.  [default: 512, or as many as the model allows]",
        type=IntRange(1, cli.MOST_TOKENS),
    ),
    ctx: int | None = cli.option(
        "Tokens in the cache before the decode.  [default: 512, or as many as the model allows]",
        type=IntRange(0, 1 << 24),
    ),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Prints the time of a prefill and of a decode, tokens per second, and memory, for each file type
    and number of threads; and for the first of them the time by op, layer and block. llama.cpp
    builds the graphs in a dry run. Their kernels cost what `instr probe` measured; the uncertainty
    is one standard deviation.

    --types quantizes nothing. To predict for another machine, edit a copy of the file that `instr
    probe -o FILE` writes, and name it with --machine.

    MODEL is a GGUF file, the first part of a split model, or demo for the demo model.
    """
    from llamacpp_instr.converters.analyses.probe import predict_reports
    from llamacpp_instr.prediction.probe.file import read_probe
    from llamacpp_instr.prediction.probe.measure import features
    from llamacpp_instr.prediction.steps import predict_cases

    output.check(model, machine)
    probe = read_probe(machine)
    names = types.split(",") if types else []
    cases, past = predict_cases(model, names, probe, threads, batch, ctx)
    output.write(predict_reports(cases, past, probe, features()), title="Prediction")


@cli.command(
    "instr schedule session.log --engines 4",
    "instr schedule session.log --engines 4 --split heads --layers 0 -o heads.html",
    "instr schedule session.log --engines chip.toml --perfetto chip.pftrace",
    "instr schedule session.log --sweep 1-64 --split rows",
    "instr schedule graph.toml --engines 2 --policy optimal --seconds 10",
)
def schedule(
    source: str = cli.argument(metavar="LOG|GRAPH.toml|MODEL"),
    engines: str = cli.option(
        "How many equal engines, or a TOML file that describes them.", "N|FILE", default="4"
    ),
    how: dict[str, Any] = cli.gathered(
        dict,
        split=cli.option(
            "Divide ops into parts that may run at the same time.",
            type=Choice(["none", "heads", "rows", "tiles"]),
            default="none",
        ),
        policy=cli.option(
            "In order, by critical path, or the shortest that can be found.",
            type=Choice(["program", "list", "optimal"]),
            default="list",
        ),
        seconds=cli.option(
            "How long --policy optimal may search.",
            type=FloatRange(min=0, min_open=True, max=86400),
            default=60,
        ),
        phase=cli.option(
            "Steps of this phase: the median of each op.  [default: decode]",
            type=Choice(["prefill", "decode", "encode"]),
        ),
        step=cli.option("Only this step.", type=IntRange(min=0)),
        layers=cli.range_option("Only layers A to B; 0: only the first."),
        sequences=cli.option("Independent sequences in flight.", type=IntRange(1, 1024), default=1),
        tokens=cli.option(
            "Tokens of each sequence, one after the other.", type=IntRange(1, 1024), default=1
        ),
        beside_prefill=cli.flag("Add the log's prefill, independent of it."),
    ),
    machine: str | None = cli.option(
        "For a model: a file from `instr probe`.  [default: the one in the user's cache]", "FILE"
    ),
    sweep: tuple[int, int] | None = cli.range_option("Print a curve: from A to B equal engines."),
    perfetto: str | None = cli.option("Also write the schedule as a Perfetto trace.", "FILE"),
    lenient: bool = cli.LENIENT,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints how long the ops of a decode would take on engines that may not exist, what each of
    them does, the critical path by layer and block, and the lower bound that binds. The times are
    those that a log recorded, the median of each op, divided by the speeds of the engines.

    --split heads makes parts for each head. It divides flash attention into dot products, three
    passes of a soft-max and a weighted sum, and a fused kernel into its ops, each timed on this
    machine. --split rows divides ops as ggml divides them among threads, --split tiles divides
    matrix products into tiles.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. GRAPH.toml has tasks
    written by hand. For a MODEL (a GGUF file or demo) the times are predicted: a decode after 512
    tokens, or a prefill of 512, on one thread.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.scheduling import report, sources
    from llamacpp_instr.converters.scheduling.tasks import equal_engines, parse_engines
    from llamacpp_instr.converters.scheduling.trace import write_trace
    from llamacpp_instr.prediction.probe.file import read_probe
    from llamacpp_instr.prediction.probe.measure import time_all
    from llamacpp_instr.prediction.steps import usual_steps

    if sweep is not None:
        for other in cli.given_options("engines", "perfetto"):
            raise UsageError(f"--sweep has its own numbers of engines; leave out {other}")
        if sweep[0] < 1 or sweep[1] == cli.LAST or sweep[1] - sweep[0] >= MOST_SWEPT:
            last = "" if sweep[1] == cli.LAST else sweep[1]
            raise UsageError(
                f"--sweep {sweep[0]}-{last}: give A-B, from 1, at most {MOST_SWEPT} numbers"
            )
    wanted = sources.Wanted(**how)
    if wanted.step is not None and wanted.phase is not None:
        raise UsageError("give --phase or --step, not both")
    read = engines if not engines.isdecimal() else None
    output.check(source, read, machine)
    if perfetto is not None:
        check_output(perfetto, output.force, source, read, machine)
        if perfetto == "-" and output.path == "-":
            raise UsageError("--perfetto -: name the report with -o, or the trace")
    hardware = parse_engines(engines) if sweep is None else equal_engines(sweep[0])
    if is_model(source):
        if wanted.step is not None or wanted.phase == "encode":
            raise UsageError(f"{source} is a model: choose --phase prefill or decode")
        probe = read_probe(machine)
        steps = usual_steps(source, probe)
        make = sources.tasks_of_model(source, probe, steps, wanted, time_all)
    elif machine is not None:
        raise UsageError(f"{source} is not a GGUF model; --machine is for models")
    elif source.lower().endswith(".toml"):
        make = sources.tasks_by_hand(source, wanted)
    else:
        (session,) = Logs((source,), lenient).sessions()
        make = sources.tasks_of_session(session, wanted, time_all)
    if sweep is not None:
        points, notes = sources.sweep(make, wanted, range(sweep[0], sweep[1] + 1))
        title = f"Schedules of {source}"
        charts = [report.sweep_chart(points, title)]
        output.write(report.sweep_reports(points, notes), charts=charts, title=title)
        return
    tasks, notes = make(hardware)
    made, title = wanted.plan(tasks, hardware), f"Schedule of {source}"
    if perfetto is not None:
        with open_output(perfetto, output.force) as file:
            write_trace(made, file.write, title)
    chart = report.gantt_chart(made, title)
    charts = [chart] if chart is not None else []
    output.write(report.schedule_reports(made, notes), charts=charts, title=title)
