"""What is compared between sessions: the settings that differ, and the times of their steps:
whole, by the units of work of their kernels, and by the weights that these read.

Invariant: every fact that affects the measurement is compared; equal ones are not listed. Columns
of times are steps in order of time, in ns of thread 0. A step that lacks a unit has NaN there,
never 0. Failed steps and warm-up runs are left out. A use is a weight and an op that reads it. So a
matrix that is both looked up and multiplied (tied embeddings) has two uses, and each is compared
only with the same use.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses import noise
from llamacpp_instr.converters.analyses.clock import compute_machine
from llamacpp_instr.converters.analyses.noise import Float64, Int64, Median, Ratio, SampleBlocks
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.graph.kernels import kernel_nodes, weight_read
from llamacpp_instr.log.session import Session, Table, Timings
from llamacpp_instr.log.steps import Account, counted_steps, steps_inside
from llamacpp_instr.report.report import Cell, Report

_CONTEXT = {
    "n_threads": "threads",
    "n_threads_batch": "threads of prefill",
    "n_ctx": "context, tokens",
    "n_batch": "batch, tokens",
    "n_ubatch": "ubatch, tokens",
    "n_seq_max": "sequences",
    "type_k": "K cache",
    "type_v": "V cache",
    "flash_attn": "flash attention",
    "kv_unified": "unified KV cache",
    "offload_kqv": "KV cache offloaded",
    "causal": "causal attention",
    "embeddings": "embeddings",
    "backends": "backends",
}
_MODEL = {
    "name": "model",
    "arch": "architecture",
    "ftype": "file type",
    "params": "parameters",
    "bytes": "weights, bytes",
}
MODEL_FACTS = frozenset(_MODEL.values())
"""the facts that identify the model, which a comparison of models is about"""
ALIKE = "Recorded alike: same model, build, host, level and settings."


def compute_settings(a: Sequence[Session], b: Sequence[Session], phases: Sequence[str]) -> Report:
    """The facts that differ between the first sessions of two sides, with their values in A and B;
    a note if there are none."""
    differing = differing_facts(a[0], b[0], phases)
    logs = [log_names([session.path for session in side]) for side in (a, b)]
    notes = [] if differing else [f"A is {logs[0]}, B is {logs[1]}.", ALIKE]
    rows: list[list[Cell]] = [[*row] for row in (["log", *logs], *differing) if differing]
    return Report("", header("setting", "A", "B"), rows, notes, key="settings")


def differing_facts(a: Session, b: Session, phases: Sequence[str]) -> list[list[str]]:
    """[fact, value in A, value in B] of every fact that differs."""
    of_a, of_b = (dict(facts(session, phases)) for session in (a, b))
    return [[what, of_a[what], of_b[what]] for what in of_a if of_a[what] != of_b[what]]


def log_names(paths: Sequence[str]) -> str:
    """The logs of a side: `a.log and 2 more`."""
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def unlike_notes(sides: Sequence[tuple[str, Sequence[Session]]]) -> list[str]:
    """A sentence for each side of a comparison, by its name, whose own logs differ in settings."""
    notes = []
    for name, sessions in sides:
        others = sessions[1:]
        rows = (row for other in others for row in differing_facts(sessions[0], other, []))
        if found := dict.fromkeys(fact for fact, _, _ in rows):
            notes.append(f"{name}: its logs differ in their settings: {', '.join(found)}.")
    return notes


def facts(session: Session, phases: Sequence[str]) -> Iterator[tuple[str, str]]:
    """[fact, value] of everything that affects a measurement, and the ranges of `phases`."""
    start = session.start
    yield "level", start.level
    yield "earlier fork's dialect", str(start.args.get("dialect", "no"))
    for key, what in _MODEL.items():
        yield what, _values(session.models.values(), key)
    yield "llama-cpp-python", start.producer.llama_cpp
    yield "llama.cpp commit", start.producer.commit
    yield "patches", start.producer.patches
    yield "CPU", start.host.cpu
    yield "CPU features", " ".join(start.host.features)
    yield "processors", str(start.host.cores)
    yield "system", start.host.os
    yield "clock", start.clock
    for key, what in _CONTEXT.items():
        yield what, _values(session.contexts.values(), key)
    yield "LoRA adapters", _adapters(session)
    steps, _ = counted_steps(session)
    for phase in phases:
        of_phase = steps.rows(steps["phase"] == phase)
        yield f"tokens of a {phase} step", _range(of_phase["n_tokens"])
        yield f"positions of {phase}", _range(of_phase["pos"])


def _values(owners: Any, key: str) -> str:
    """The distinct values of a session, in order."""
    return ", ".join(dict.fromkeys(_word(getattr(owner, key)) for owner in owners))


def adapter_names(session: Session) -> list[str]:
    """The adapters that contexts of a session used, each once with each of its scales:
    `story.gguf (Story), rank 8, alpha 16, scale 0.5`."""
    found = []
    for of in dict.fromkeys(of for event in session.adapters for of in event.adapters):
        known = {"alpha": of.alpha or None, "scale": of.scale}
        numbers = (f", {name} {value:g}" for name, value in known.items() if value is not None)
        name = f" ({of.name})" if of.name else ""
        found.append(f"{of.file or 'unnamed'}{name}, rank {of.rank}{''.join(numbers)}")
    return found


def _adapters(session: Session) -> str:
    """The names of the adapters, and what the graphs show of them: products with their matrices."""
    computed = {graph: session.graphs[graph] for graph in session.computes["graph"].tolist()}
    ranks = {
        leaf.name: leaf.ne[1]
        for graph in computed.values()
        for leaf in graph.leafs
        if leaf.name.endswith(".lora_a") and len(leaf.ne) > 1
    }
    names = adapter_names(session)
    if not names and not any(graph.nodes for graph in computed.values()):
        return "not recorded"
    if ranks:
        different = ", ".join(map(str, sorted(set(ranks.values()))))
        names.insert(0, f"on {len(ranks)} weights, rank {different}")
    return "; ".join(names) or "none"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _range(numbers: Any) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


# --- the times of steps ---

FEW_CELLS = 10_000_000
MOST_EMPTY = 50
"""maximum ratio of cells to filled cells of a table; most steps run all units"""


class StepTimes:
    """One session's steps that count, and their runs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        steps, notes = counted_steps(session)
        ended = session.log_end.sentence()
        self.notes = [f"{session.path}: {note}" for note in [*notes, *[f"{ended}."] * bool(ended)]]
        self.steps = steps.rows(np.argsort(steps["begin"], kind="stable"))
        self.run = _runs(session, self.steps)
        self.machine = machine = compute_machine(session, self.steps)
        """what the machine did during these steps; None if the log does not record it"""
        self.taken = machine.share if machine and machine.is_disturbed else 0.0
        """share of the process's time that a disturbed machine took"""
        self.phases = set(self.steps["phase"].tolist())
        self.account = Account(session, self.steps)
        self.plans = list(dict.fromkeys(of.plan for of in self.account.kernels))
        """the plans that ran in these steps, in order"""

    @property
    def clock(self) -> tuple[int, int]:
        """When the session began, and when its last step ended, by the wall clock; ns."""
        start = self.session.start
        return start.wall, start.wall + int(self.steps["end"].max(initial=start.t)) - start.t

    def of(self, phase: str) -> NDArray[np.bool_]:
        selected: NDArray[np.bool_] = self.steps["phase"] == phase
        return selected

    def runs(self, phase: str) -> Int64:
        return self.run[self.of(phase)]

    def blocks(self, phase: str) -> SampleBlocks:
        return noise.cut_blocks(self.runs(phase))

    def whole_steps(self, phase: str) -> Float64:
        steps = self.steps.rows(self.of(phase))
        seen: Int64 = steps["end"] - steps["begin"] - steps["recorder"]
        return seen.astype(np.float64)

    def last_intervals(self, phase: str) -> bool:
        """Whether the steps of a phase last at least as long as the intervals of the machine's
        counts, so that the counts give the steps' CPU time."""
        whole, intervals = self.whole_steps(phase), self.session.machine["dur"]
        return len(intervals) > 0 and bool(np.median(whole) >= np.median(intervals))

    def cpu_times(self, phase: str) -> Float64:
        """The CPU time in ns of the process, all threads, in each step of a phase. An interval of
        the machine's counts is spread evenly."""
        machine, steps = self.session.machine, self.steps.rows(self.of(phase))
        t = np.append(machine["t"][:1] - machine["dur"][:1], machine["t"])
        cpu = np.append(0, np.cumsum(machine["cpu"]))
        begin, end = (np.interp(steps[name], t, cpu) for name in ("begin", "end"))
        spent: Float64 = end - begin
        return spent

    def tokens_per_second(self, phase: str) -> float | None:
        """The median over the steps of a phase; None if there are none."""
        steps = self.steps.rows(self.of(phase))
        if not len(steps):
            return None
        rates = steps["n_tokens"] / np.maximum(steps["end"] - steps["begin"], 1)
        return float(np.median(rates)) * 1e9

    def by_unit(self, of_kernel: dict[int, Int64], n_units: int) -> Float64:
        """ns of thread 0 and of devices, (units, steps); `of_kernel` has the unit of each kernel of
        each plan."""
        ops = self.account.kernels
        return self._added(ops, [of_kernel[of.plan] for of in ops], n_units)

    def by_layer(self) -> dict[Hashable, Float64]:
        layers = self.account.layers
        labels = [of.label.tolist() for of in layers]
        number = {layer: i for i, layer in enumerate(dict.fromkeys(chain(*labels)))}
        units = [np.array([number[layer] for layer in of], np.int64) for of in labels]
        return dict(zip(number, self._added(layers, units, len(number)), strict=True))

    def _added(self, timed: Sequence[Timings], units: Sequence[Int64], n_units: int) -> Float64:
        """ns of the columns of each unit, (units, steps)."""
        self._check_cells(n_units, timed)
        total: Float64 = np.zeros((len(self.steps), n_units))
        present = np.zeros((len(self.steps), n_units), np.bool_)
        for of, of_column in zip(timed, units, strict=True):
            if not len(of_column):
                continue
            order = np.argsort(of_column, kind="stable")
            there, first = np.unique(of_column[order], return_index=True)
            sums = np.add.reduceat(of.dur[:, order].astype(np.float64), first, axis=1)
            places = self.account.rows_of(of)[:, None], there
            np.add.at(total, places, sums)
            present[places] = True
        total[~present] = np.nan
        return np.transpose(total)

    def work_by_unit(self, work: Mapping[int, NDArray[np.number[Any]]], n_units: int) -> Float64:
        """The work of each step, (units, steps); `work` has one compute of each plan, by unit."""
        total: Float64 = np.zeros((n_units, len(self.steps)))
        for ops in self.account.kernels:
            np.add.at(total.T, self.account.rows_of(ops), work[ops.plan])
        return total

    def _check_cells(self, n_rows: int, measured: Sequence[Timings]) -> None:
        """Raise UsageError if a table of all steps would be nearly empty: otherwise a log with few
        measurements could take any amount of memory."""
        n_measured = sum(of.dur.size for of in measured)
        if n_rows * len(self.steps) > FEW_CELLS + MOST_EMPTY * n_measured:
            raise UsageError(
                f"{self.session.path}: its {len(self.steps):,} steps share too few of"
                f" {n_rows:,} parts to be compared"
            )


def verb(phase: str, sessions: Sequence[StepTimes]) -> str:
    """What the steps of a phase do, with the tokens of a step: `prefills 512 tokens`, `decodes`."""
    word = {"prefill": "prefills", "decode": "decodes", "encode": "encodes"}[phase]
    tokens = [of.steps["n_tokens"][of.steps["phase"] == phase] for of in sessions]
    low, high = min(of.min() for of in tokens), max(of.max() for of in tokens)
    if high == 1:
        return word
    return f"{word} {high:,} tokens" if low == high else f"{word} {low:,} to {high:,} tokens"


def took_turns(a: Sequence[StepTimes], b: Sequence[StepTimes]) -> bool:
    """Whether the sessions of two sides, each in order of time, were recorded alternately, often
    enough for pairs: both i-th sessions ended before the next ones began."""
    rounds = [[of.clock for of in pair] for pair in zip(a, b, strict=False)]
    return len(a) == len(b) >= noise.MIN_BLOCKS and all(
        max(end for _, end in before) < min(begin for begin, _ in after)
        for before, after in pairwise(rounds)
    )


def _runs(session: Session, steps: Table) -> Int64:
    """The run of every step, in order of time: runs are the marks `run 1`, `run 2`, ..."""
    run = np.zeros(len(steps), np.int64)
    inside = steps_inside(session.marks, steps["begin"])
    for name, first, end in zip(session.marks["name"].tolist(), *inside, strict=True):
        if (found := re.fullmatch(r"run (\d{1,9})", name)) is not None:
            run[first:end] = int(found[1])
    return run


# --- the times of weights ---


class Use(NamedTuple):
    """A weight and an op that reads it."""

    weight: str
    op: str


class Rates(NamedTuple):
    """The rates of one side: medians over its steps of work by time, in units per second."""

    bytes: float | None
    flops: float | None


class UseTimes(NamedTuple):
    """Median times of a step in ns, their ratio with its noise, and the rates of both sides."""

    ratio: Ratio
    rates: tuple[Rates, Rates]


def compute_use_times(
    a: PhaseUses, b: PhaseUses, groups: Sequence[Sequence[Use]], *, in_turns: bool = False
) -> list[UseTimes | None]:
    """For each group of uses: the sum of their times, or None if a side lacks the group. The
    intervals hold simultaneously, as a family; those of alternating sessions are those of pairs."""
    both = {
        i: (one, other)
        for i, group in enumerate(groups)
        if (one := a.group(group)) is not None and (other := b.group(group)) is not None
    }
    found: list[UseTimes | None] = [None] * len(groups)
    if not both:
        return found
    n_timed = [len(groups[i]) for i in both]
    medians = [
        side.medians(np.array([sums[0] for sums in of]), n_timed, in_turns=in_turns)
        for side, of in zip((a, b), zip(*both.values(), strict=True), strict=True)
    ]
    for i, one, other in zip(both, *medians, strict=True):
        ratio = noise.compare(one, other, len(both), in_turns=in_turns)
        found[i] = UseTimes(ratio, (rates_of(both[i][0]), rates_of(both[i][1])))
    return found


def rates_of(sums: Float64) -> Rates:
    """The rates from ns, bytes and floating point operations, (3, steps)."""
    ran = sums[0] > 0  # NaN is not
    if not ran.any():
        return Rates(None, None)
    return Rates(*(float(np.median(work[ran] / sums[0, ran])) * 1e9 or None for work in sums[1:]))


class PhaseUses:
    """The steps of one phase in some sessions of one model, by use."""

    def __init__(self, sessions: Sequence[StepTimes], phase: str) -> None:
        every = (use for of in sessions for plan in of.plans for use in _plan_uses(of, plan))
        found = dict.fromkeys(use for use in every if use)
        self.row = {use: i for i, use in enumerate(found)}
        """in the order of execution"""
        self.blocks = noise.join_blocks([times.runs(phase) for times in sessions])
        n_steps = [len(times.runs(phase)) for times in sessions]
        self.begins = np.cumsum(n_steps)[:-1]
        """the first column of each later session"""
        self.taken = float(np.average([times.taken for times in sessions], weights=n_steps))
        """share of the time that a disturbed machine took, over all sessions"""
        self.work = np.concatenate([self._of_session(of, phase) for of in sessions], axis=2)
        """ns, bytes and floating point operations, (3, uses, steps)"""
        self.time: Float64 = self.work[0]

    def _of_session(self, times: StepTimes, phase: str) -> Float64:
        n = len(self.row) + 1  # the last row is for kernels that read no weight
        unit: dict[int, Int64] = {}
        for plan in times.plans:
            rows = [self.row[use] if use else n - 1 for use in _plan_uses(times, plan)]
            unit[plan] = np.array(rows, np.int64)
        kernels = {plan: times.session.kernels(plan) for plan in unit}
        n_bytes = {plan: np.bincount(unit[plan], of.bytes, n) for plan, of in kernels.items()}
        flops = {plan: np.bincount(unit[plan], of.flops, n) for plan, of in kernels.items()}
        work = times.by_unit(unit, n), times.work_by_unit(n_bytes, n), times.work_by_unit(flops, n)
        return np.stack(work)[:, :, times.of(phase)]

    def medians(self, times: Float64, n_timed: Sequence[int], *, in_turns: bool) -> list[Median]:
        """The median of each row of `times`: over all steps, or over alternating sessions."""
        if not in_turns:
            found = noise.compute_medians(times, self.blocks, n_timed)
            return [noise.disturb(median, self.taken) for median in found]
        parts = np.split(times, self.begins, axis=1)
        return [
            median_of_sessions([_quantile(part[i], 0.5) for part in parts])
            for i in range(len(times))
        ]

    def kernels(self) -> Median:
        """The lower deciles of all uses and of the other kernels, added up, over the sessions:
        interruptions of a kernel do not change them, even in most of the steps."""
        parts = np.split(self.time, self.begins, axis=1)
        return median_of_sessions(
            [float(np.nansum([_quantile(row, 0.1) for row in part])) for part in parts]
        )

    def group(self, uses: Sequence[Use]) -> Float64 | None:
        """`work` of all uses, (3, steps); None if one of them is missing or ran in no step."""
        if not uses or not all(use in self.row for use in uses):
            return None
        sums: Float64 = self.work[:, [self.row[use] for use in uses]].sum(axis=1)
        return None if np.isnan(sums[0]).all() else sums


def median_of_sessions(values: Sequence[float]) -> Median:
    """The median of a side of alternating sessions, which have these times in ns."""
    return noise.median_of_group([Median(value, None, 1, 0) for value in values])


def _quantile(row: Float64, share: float) -> float:
    """The quantile of the steps that ran; NaN if none did."""
    ran = row[~np.isnan(row)]
    return float(np.quantile(ran, share)) if len(ran) else np.nan


def _plan_uses(times: StepTimes, plan: int) -> list[Use | None]:
    """The use of every kernel of a plan; None for kernels that read no weight."""
    of = times.session.plans[plan]
    graph = times.session.graphs[of.graph]
    op = graph.whole.op
    return [
        next((Use(name, op[i]) for i in inside if (name := weight_read(graph, [i])[0])), None)
        for inside in kernel_nodes(graph, of)
    ]
