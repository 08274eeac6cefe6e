"""What `instr probe` measured, as tables."""

from __future__ import annotations

from collections.abc import Mapping

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.report import Cell, Column, Report, Unit

BUSY = 0.5
"""load by core beyond which the figures are doubtful"""


def probe_reports(probe: Probe) -> list[Report]:
    """Memory, kernels and barriers, a column for each number of threads."""
    memory = _table(
        "Copying memory",
        Column("working set", "bytes"),
        {(b.bytes, b.threads): b.bytes_per_second for b in probe.bandwidth},
        "bytes_per_second",
    )
    memory.notes.append(f"Bytes read and written per second, on {probe.cpu or 'this machine'}.")
    if note := busy_note(probe):
        memory.notes.append(note)
    kernels = _table(
        "Multiplying",
        Column("weight, tokens"),
        {(f"{k.type}, {k.tokens}", k.threads): k.flops_per_second for k in probe.kernels},
        "flop_per_second",
    )
    kernels.notes.append("FLOP/s of ggml's kernels, with weights that stay in the caches.")
    barriers = _table(
        "An op that computes nothing",
        Column("", key="what"),
        {("time", b.threads): b.ns for b in probe.barriers},
        "ns",
    )
    return [memory, kernels, barriers]


def busy_note(probe: Probe) -> str | None:
    """A sentence if the machine was busy when it was measured."""
    if probe.left_out:
        return (
            f"{probe.left_out} figures were left out: more threads, or less memory, were less than"
            " half as fast. Run `instr probe` again while no other process computes."
        )
    if probe.load <= BUSY * probe.cores:
        return None
    return (
        f"The machine was busy (load {probe.load:g} on {probe.cores} CPUs): these are less than it"
        " can do."
    )


def _table(
    title: str, first: Column, values: Mapping[tuple[str | int, int], float], unit: Unit
) -> Report:
    threads = sorted({n for _, n in values})
    keys = dict.fromkeys(key for key, _ in values)
    columns = [first, *(Column(counted(n, "thread"), unit) for n in threads)]
    rows: list[list[Cell]] = [[key, *(values.get((key, n)) for n in threads)] for key in keys]
    return Report(title, columns, rows)
