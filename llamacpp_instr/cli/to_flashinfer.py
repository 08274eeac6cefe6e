"""`instr to-flashinfer`: Export the ops of a log as workloads of flashinfer-bench."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, Logs


@cli.command(
    "instr to-flashinfer session.log -o dataset",
    "instr to-flashinfer demo.log -o dataset --capture",
    "instr to-flashinfer session.log -o dataset --dataset flashinfer-trace",
)
def to_flashinfer(
    output: str = cli.DATASET,
    capture: bool = cli.flag(
        "Run the first prefill and decode of a log again, and store their tensors."
    ),
    dataset: Path | None = cli.option(
        "Say which definitions this data set has, and for which share of the time.", "DIR", cli.PATH
    ),
    logs: Logs = LOGS,
    report: cli.ReportOutput = cli.FORM,
) -> None:
    """
    Writes a definition for each op, with a reference in PyTorch, and its workloads: the sizes that
    occurred. Prints how often each definition was computed, how long that took, and which ops none
    describes. Inputs are random, but indices are valid. With --capture they are those of a run.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input, recorded with --level
    detailed or verbose. DATASET must not exist; it appears when all its files are complete.
    """
    from llamacpp_instr.base.output import check_output_directory, open_output_directory
    from llamacpp_instr.converters.exports.flashinfer import workloads

    need("tensors")
    check_output_directory(output, ())
    there = workloads.load_definitions(dataset) if dataset else None
    sessions = logs.sessions()
    with progress_bar("Finding workloads") as on_progress:
        found = workloads.find_workloads(sessions, on_progress)
    with open_output_directory(output, ()) as folder:
        if capture:
            from llamacpp_instr.converters.analyses.memory import recorded_file
            from llamacpp_instr.converters.validate import workload_tensors
            from llamacpp_instr.llama.log import captured

            file = recorded_file(sessions[0], workload_tensors.only_model(sessions[0]))
            with captured() as log, progress_bar("Capturing") as on_progress:
                workload_tensors.capture(file, sessions[0], found, folder, log, on_progress)
        workloads.write_dataset(found, folder)
    report.write([workloads.coverage_report(found, there)])
    notice(f"{output}: {len(found.catalog):,} definitions, {len(found.workloads):,} workloads")
