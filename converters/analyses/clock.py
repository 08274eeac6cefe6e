"""The time of a session by the clock: what passed inside llama.cpp, on devices, and outside of it,
and what other processes took of it, as `llamacpp_instr.log.machine` defines that.

Invariant: time in which several contexts work counts once, so steps, sampling and the rest add up
to the time by the clock. All times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.graph.kernels import untimed_backends
from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import DISTURBED, taken_in_all
from llamacpp_instr.report.report import Cell, Figures, Report, shown

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Clock:
    """From the start of the first step that counts to the end of the last, or of its sampling."""

    total: int
    steps: int
    """with at least one step"""
    sampling: int
    """with a sampler and no step"""
    outside: int
    """with neither: the application, and waiting for requests"""
    n_tokens: int
    """sampled, or those of decodes if the application samples by itself"""
    gaps: Int64
    """between the end of a step and the start of the next, where no other step runs"""

    @property
    def rate(self) -> float | None:
        """Tokens per second; None without any."""
        return self.n_tokens / self.total * 1e9 if self.n_tokens and self.total else None


def compute_clock(session: Session, steps: Table) -> Clock:
    """The time by the clock of `steps`, which are those that count."""
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    step_begin, step_end = _merged(steps["begin"], steps["end"])
    in_steps = int((step_end - step_begin).sum())
    begin, end = _merged(
        np.concatenate([step_begin, tokens["t"]]),
        np.concatenate([step_end, tokens["t"] + tokens["dur"]]),
    )
    busy = int((end - begin).sum())
    total = int(end[-1] - begin[0]) if len(begin) else 0
    return Clock(
        total=total,
        steps=in_steps,
        sampling=busy - in_steps,
        outside=total - busy,
        n_tokens=len(tokens) or int(steps["n_tokens"][steps["phase"] == "decode"].sum()),
        gaps=step_begin[1:] - step_end[:-1],
    )


def _merged(begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The union of intervals as disjoint ones, in order."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    first = np.ones(len(begin), np.bool_)
    first[1:] = begin[1:] > reach[:-1]
    last = np.roll(first, -1)
    return begin[first], reach[last]


def clock_report(clock: Clock, requests: Sequence[Request]) -> Report:
    """Where the time by the clock went; the notes have gaps and, with requests, latencies."""
    parts = {
        "steps": clock.steps,
        "sampling": clock.sampling,
        "outside of llama.cpp": clock.outside,
    }
    rows: list[list[Cell]] = []
    if clock.total:
        rows = [[what, ns, ns / clock.total] for what, ns in parts.items()]
    figures: Figures = {
        "time": (clock.total, "ns"),
        "tokens": (clock.n_tokens, "count"),
        "tokens/s": (clock.rate, "per_second"),
    }
    notes = []
    if len(clock.gaps) > 1:
        median, p90, p99 = np.quantile(clock.gaps, (0.5, 0.9, 0.99)).tolist()
        longest = int(clock.gaps.max())
        figures |= {
            "gap, median": (median, "ns"),
            "gap, p90": (p90, "ns"),
            "gap, p99": (p99, "ns"),
            "gap, longest": (longest, "ns"),
        }
        notes.append(
            f"From one step to the next passed {shown(median, 'ns')} (median), {shown(p90, 'ns')}"
            f" (p90), {shown(p99, 'ns')} (p99), at most {shown(longest, 'ns')}: the sampler, the"
            " application, and waiting for requests."
        )
    first = [r.to_first_token for r in requests if r.to_first_token is not None]
    between = np.concatenate([np.zeros(0, np.int64), *(r.between_tokens for r in requests)])
    if first:
        figures["to the first token, median"] = (float(np.median(first)), "ns")
    if len(between):
        figures["between tokens, median"] = (float(np.median(between)), "ns")
    columns = header("By the clock", ("ns", "time"), ("share", "share"))
    return Report("Time by the clock", columns, rows, notes, figures=figures)


def clock_sentences(report: Report, n_requests: int) -> list[list[Cell]]:
    """Wall-clock speed and latencies, from `clock_report`, as rows of an overview."""
    rows: list[list[Cell]] = []
    words = {name: shown(*figure) for name, figure in report.figures.items()}
    if words["tokens/s"]:
        n = f"{words['tokens']} in {words['time']}"
        rows.append(["speed", f"{words['tokens/s']} tokens/s by the clock ({n})"])
    if "to the first token, median" in words:
        text = f"first token after {words['to the first token, median']}"
        if "between tokens, median" in words:
            text += f", then {words['between tokens, median']} each"
        of = f"medians of {n_requests:,} requests" if n_requests > 1 else "one request"
        rows.append(["waiting", f"{text} ({of})"])
    return rows


def untimed_note(session: Session) -> list[str]:
    """A sentence for tables of kernels; none if all kernels are timed."""
    found = {name for graph in session.graphs.values() for name in untimed_backends(graph)}
    names = ", ".join(sorted(found))
    return [f"Kernels on {names} are not timed, so no row has them."] if found else []


# --- the machine ---


@dataclass(frozen=True)
class Machine:
    """What the machine did during the steps of a session, or of several."""

    cpus: int
    switches: int
    """involuntary context switches of the process"""
    taken: int
    """time that its threads waited for a CPU, and their part of the stolen time; ns"""
    cpu: int
    """its CPU time in ns"""
    load: float | None
    """the largest load average"""
    steal: int
    """ns of all CPUs"""

    @property
    def share(self) -> float:
        """The part of the process's time that was taken from it."""
        return self.taken / max(self.taken + self.cpu, 1)

    @property
    def is_disturbed(self) -> bool:
        return self.share > DISTURBED

    def sentence(self) -> str:
        """What happened, for a reader who believes that the model is slow."""
        load = "" if self.load is None else f"; load {self.load:.3g} on {self.cpus} CPUs"
        steal = ", some of it to the hypervisor" if self.steal > self.taken / 20 else ""
        return (
            f"the process was descheduled {counted(self.switches, 'time')} and lost"
            f" {100 * self.share:.0f} % of its CPU time to other work{steal}{load}"
        )


def compute_machine(session: Session, steps: Table) -> Machine | None:
    """What happened during `steps`; None if the log does not record it (it is an older one, or
    the system has no such count)."""
    machine = session.machine
    machine = machine.rows(np.array([delay is not None for delay in machine["delay"]], np.bool_))
    # the intervals that have a part of a step
    begins, ends = np.sort(steps["begin"]), np.sort(steps["end"])
    before = np.searchsorted(begins, machine["t"])
    over = np.searchsorted(ends, machine["t"] - machine["dur"], side="right")
    machine = machine.rows(before > over)
    if not len(machine):
        return None
    return Machine(
        cpus=session.start.host.cores,
        switches=int(machine["nivcsw"].sum()),
        taken=taken_in_all(session, machine),
        cpu=int(machine["cpu"].sum()),
        load=max((load for load in machine["load"] if load is not None), default=None),
        steal=sum(steal or 0 for steal in machine["steal"]),
    )


def machine_notes(sides: Sequence[tuple[str, Sequence[Machine | None]]]) -> list[str]:
    """A sentence for each side of a comparison that has sessions on a disturbed machine; a side is
    its name, and what is known of each of its sessions."""
    notes = []
    for name, machines in sides:
        if disturbed := [machine for machine in machines if machine and machine.is_disturbed]:
            of = f", {len(disturbed)} of {len(machines)} logs" if len(machines) > 1 else ""
            notes.append(
                f"{name}{of}: {_together(disturbed).sentence()}. Its noise includes that; record it"
                " again on an idle machine."
            )
    return notes


def _together(machines: Sequence[Machine]) -> Machine:
    return Machine(
        cpus=max(of.cpus for of in machines),
        switches=sum(of.switches for of in machines),
        taken=sum(of.taken for of in machines),
        cpu=sum(of.cpu for of in machines),
        load=max((of.load for of in machines if of.load is not None), default=None),
        steal=sum(of.steal for of in machines),
    )
