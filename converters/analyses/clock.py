"""The wall-clock time of a session: what passed inside llama.cpp, on devices, and outside of it;
what other processes took, as `llamacpp_instr.log.steps` defines that; and how long each request
took, and why.

Invariant: overlapping work of several contexts is counted once, so steps, sampling and the rest
add up to the time by the clock. Times of a request run from its arrival, or from the start of its
first step if the log lacks the arrival. Its parts (queue, its own steps, steps of others, the
rest) add up to its total. All times are in ns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.serving import (
    Missed,
    Predict,
    copies_report,
    cost_by_reason,
    missed_prompts,
    reuse_report,
    speculation_reports,
)
from llamacpp_instr.converters.analyses.tables import header, without
from llamacpp_instr.log.requests import (
    Request,
    find_requests,
    left_requests,
    prompt_copies,
    step_tokens,
)
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.spans import merged
from llamacpp_instr.log.steps import (
    DISTURBED,
    ON_DEVICES,
    Account,
    taken_in_all,
    untimed_splits,
)
from llamacpp_instr.log.waits import Waits, waits_of
from llamacpp_instr.report.report import Cell, Figures, Report, shown

Int64 = NDArray[np.int64]

TOP = 20
"""requests that are shown unless asked otherwise"""
POINTS = (0.5, 0.9, 0.99)
PARTS = 12
"""of the whole time, each with its number of requests at once"""


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
    """output tokens (`step_tokens`)"""
    gaps: Int64
    """between the end of a step and the start of the next, where no other step runs"""

    @property
    def rate(self) -> float | None:
        """Tokens per second; None without any."""
        return self.n_tokens / self.total * 1e9 if self.n_tokens and self.total else None


def compute_clock(session: Session, steps: Table) -> Clock:
    """The time by the clock of `steps`, which are those that count."""
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    step_begin, step_end = merged(steps["begin"], steps["end"])
    in_steps = int((step_end - step_begin).sum())
    begin, end = merged(
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
        n_tokens=int(step_tokens(session, steps)[1].sum()),
        gaps=step_begin[1:] - step_end[:-1],
    )


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
        gaps = [*np.quantile(clock.gaps, POINTS).tolist(), int(clock.gaps.max())]
        for name, ns in zip(("median", "p90", "p99", "longest"), gaps, strict=True):
            figures[f"gap, {name}"] = (ns, "ns")
        median, p90, p99, longest = (shown(ns, "ns") for ns in gaps)
        notes.append(
            f"Between two steps, {median} (median), {p90} (p90), {p99} (p99) and at most {longest}"
            " passed: the sampler, the application, and waiting for requests."
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


def untimed_note(account: Account) -> list[str]:
    """A sentence for tables of kernels; none if all kernels are timed."""
    session = account.session
    graph_of = dict(session.computes.tuples("compute", "graph"))
    found = {
        session.graphs[graph_of[compute]].splits[i].backend
        for compute, splits in untimed_splits(session).items()
        for i in splits
        if compute in account.row
    }
    names = ", ".join(sorted(found))
    if not found:
        return []
    if session.device_ops:
        return [f"Ops on {names} are not timed, so no row has them."]
    ns = sum(int(account.parts[part].sum()) for part in ON_DEVICES)
    share = 100 * ns / max(int(account.total.sum()), 1)
    return [f"{share:.0f} % of the time of the steps was on {names}, whose ops are not timed."]


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

    @staticmethod
    def together(machines: Sequence[Machine]) -> Machine:
        cpus, switches, taken, cpu, loads, steal = zip(*map(astuple, machines), strict=True)
        load = max((load for load in loads if load is not None), default=None)
        return Machine(max(cpus), sum(switches), sum(taken), sum(cpu), load, sum(steal))

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
    the system does not count it)."""
    machine = session.machine
    machine = machine.rows(np.array([delay is not None for delay in machine["delay"]], np.bool_))
    # the intervals that overlap a step
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
    its name, and what is known about each of its sessions."""
    notes = []
    for name, machines in sides:
        if disturbed := [machine for machine in machines if machine and machine.is_disturbed]:
            of = f", {len(disturbed)} of {len(machines)} logs" if len(machines) > 1 else ""
            notes.append(
                f"{name}{of}: {Machine.together(disturbed).sentence()}. Its noise includes that;"
                " record it again on an idle machine."
            )
    return notes


# --- requests ---


def compute_requests(
    session: Session, top: int = TOP, predict: Predict | None = None
) -> list[Report]:
    """The latencies of a session's requests, and the `top` slowest with what they waited for.
    `predict` gives the speed without drafts if the log lacks it."""
    steps, requests = find_requests(session)
    ended = session.log_end.notes()
    if not requests:
        return [Report("Requests", [], [], ["The log has no requests.", *ended])]
    latencies = _latencies(requests)
    latencies.notes.extend([*_ends(requests, left_requests(session)), *ended])
    waits, missed = waits_of(requests, steps), missed_prompts(requests)
    prompt_ns = [wait.prompt for wait in waits]
    reuse = reuse_report(cost_by_reason(requests, missed, prompt_ns), prompt_ns)
    return [
        latencies,
        *_over_time(requests),
        *reuse,
        *copies_report(prompt_copies(session)),
        *speculation_reports(session, steps, predict),
        _slowest(requests, waits, missed, top),
    ]


def _latencies(requests: Sequence[Request]) -> Report:
    between = [np.zeros(0, np.int64), *(request.between_tokens for request in requests)]
    samples = {
        "queued": [request.queued for request in requests],
        "to the first token": [request.to_first_token for request in requests],
        "between tokens": np.concatenate(between).tolist(),
        "total": [request.total for request in requests],
    }
    rows: list[list[Cell]] = []
    for label, values in samples.items():
        known = [value for value in values if value is not None]
        if known:
            rows.append([label, len(known), *np.quantile(known, POINTS).tolist(), max(known)])
    n_tokens = sum(len(request.token_times) for request in requests)
    prompt = sum(request.prompt for request in requests)
    reused = sum(request.reused for request in requests)
    span = max(r.end for r in requests) - min(r.first for r in requests)
    mean, most = concurrency(requests)
    rate = n_tokens / max(span, 1) * 1e9
    figures: Figures = {
        "requests": (len(requests), "count"),
        "output tokens": (n_tokens, "count"),
        "prompt tokens computed": (prompt, "count"),
        "prompt tokens reused": (reused, "count"),
        "tokens/s by the clock": (rate, "per_second"),
        "concurrent, mean": (mean, "number"),
        "concurrent, most": (most, "count"),
    }
    notes = [
        f"{counted(len(requests), 'request')} in {shown(span, 'ns')}:"
        f" {counted(n_tokens, 'output token')} ({shown(rate, 'per_second')}/s by the clock),"
        f" {counted(prompt, 'prompt token')} computed and {reused:,} reused from the cache.",
        f"At most {most} at once, {mean:.3g} on average.",
    ]
    if unknown := sum(request.arrival < 0 for request in requests):
        notes.append(
            f"The log lacks the arrival of {counted(unknown, 'request')}, whose times count from"
            " the first step. docs/reference/requests.md describes how an application marks its"
            " requests."
        )
    points_ns = (f"p{100 * point:.0f}" for point in POINTS)
    columns = header("Time", ("count", "count"), ("ns", *points_ns), ("ns", "longest"))
    return Report("Latency of requests", columns, rows, notes, figures=figures)


def _ends(requests: Sequence[Request], left: Sequence[Request]) -> list[str]:
    """How the requests of a llama-server ended, as far as it noted that; `left` are those that left
    the queue before a slot took them."""
    ends = Counter(of.served.end for of in requests if of.served)
    named = ", ".join(f"{n:,} {end}" for end, n in ends.most_common())
    notes = [f"Ends: {named}."] if ends else []
    if len(left):
        median = shown(float(np.median([of.total for of in left])), "ns")
        what = f"{counted(len(left), 'more request')} left the queue before a slot took"
        notes.append(f"{what} {'it' if len(left) == 1 else 'them'}, after {median} (median).")
    return notes


def concurrency(requests: Sequence[Request]) -> tuple[float, int]:
    """The mean number of requests between the first arrival and the last end, and the largest."""
    times, counts = concurrency_over_time(requests)
    span = int(times[-1] - times[0])
    return float((np.diff(times) * counts[:-1]).sum() / max(span, 1)), int(counts.max())


def concurrency_over_time(requests: Sequence[Request]) -> tuple[Int64, Int64]:
    """Times in ns at which the number of requests changes, and the number from then on; both (n,)
    with n at most twice the number of requests."""
    changes = np.array(
        [(r.first, 1) for r in requests] + [(max(r.end, r.first), -1) for r in requests], np.int64
    )
    times, at = np.unique(changes[:, 0], return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, at, changes[:, 1])
    return times, np.cumsum(change)


def _over_time(requests: Sequence[Request]) -> Iterator[Report]:
    """How many requests there were at once in each of PARTS equal parts of the time."""
    times, counts = concurrency_over_time(requests)
    if len(requests) < 2 or times[-1] - times[0] < PARTS:
        return
    edges = np.linspace(times[0], times[-1], PARTS + 1).astype(np.int64)
    # requests × time until each change; between two changes it grows evenly
    until = np.concatenate([[0], np.cumsum(np.diff(times) * counts[:-1])])
    means = np.diff(np.interp(edges, times, until)) / np.diff(edges)
    first = np.searchsorted(times, edges[:-1], side="right") - 1
    after = np.searchsorted(times, edges[1:])
    rows: list[list[Cell]] = [
        [int(edge - times[0]), float(mean), int(counts[low:high].max())]
        for edge, mean, low, high in zip(edges, means, first, after, strict=False)
    ]
    columns = header(("ns", "from"), ("number", "mean"), ("count", "most"))
    notes = ["Times count from the first request."]
    yield Report("Requests at once, over time", columns, rows, notes)


def _served_cells(request: Request, missed: Missed | None) -> list[Cell]:
    """Drafted and accepted tokens, the server's task, why it computed its prompt, and the reason of
    the end, if known."""
    of = request.served
    why = None if missed is None else missed.reason
    if of is None:
        return [None, None, None, why, None]
    drafts: list[Cell] = [of.drafted, of.accepted] if of.drafted else [None, None]
    return [*drafts, of.task, why, of.end]


def _slowest(
    requests: Sequence[Request], waits: Sequence[Waits], missed: Sequence[Missed | None], top: int
) -> Report:
    order = sorted(range(len(requests)), key=lambda i: -requests[i].total)[:top]
    named = any(request.name for request in requests)
    began = min(request.first for request in requests)
    rows: list[list[Cell]] = []
    for i in order:
        request, wait = requests[i], waits[i]
        between = request.between_tokens
        rows.append([
            i + 1, request.name if named else None, request.ctx, request.seq,
            request.first - began, request.queued, request.prompt, request.reused,
            len(request.token_times), *_served_cells(request, missed[i]), request.to_first_token,
            float(np.median(between)) if len(between) else None, request.total,
            wait.longest, *wait,
        ])  # fmt: skip
    columns = header(
        ("id", "Request"), "name", ("id", "context", "sequence"), ("ns", "from", "queued"),
        ("count", "prompt", "reused", "output", "drafted", "accepted"), ("id", "task"),
        "not reused", "end",
        ("ns", "first token", "between", "total"),
        "waited for",
        ("ns", "queue", "its prompt", "its tokens", "other requests", "the rest", "encoder"),
    )  # fmt: skip
    title = "Requests, the slowest first"
    notes = [
        "A request waits in the queue, then for its own steps, for steps that serve only others,"
        " and for the sampler and the application (the rest)."
    ]
    if len(order) < len(requests):
        title = "The slowest requests"
        notes.append(
            f"{len(order)} of {len(requests):,}; `instr requests --top {len(requests)}` shows all."
        )
    report = Report(title, columns, rows, notes, key="requests")
    unknown = [] if any(of.served for of in requests) else ["drafted", "accepted", "task", "end"]
    if not any(missed):
        unknown.append("not reused")
    unknown += [] if any(of.encoded for of in requests) else ["encoder"]
    return without(report, *unknown)
