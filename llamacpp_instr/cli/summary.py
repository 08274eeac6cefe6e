"""`instr summary LOG...`: prints where the time and the memory of a session went."""

from __future__ import annotations

from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command(
    "instr summary session.log",
    "instr summary server.log server.part*.log",
)
@log_options
@report_options
def summary(logs: Logs, output: ReportOutput) -> None:
    """Summarize a log: speed, time, memory.

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
