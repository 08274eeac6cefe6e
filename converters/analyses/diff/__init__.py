"""The differences of two sides: first their settings, then what was faster or slower.

Invariant: differences in the settings come before all figures. A part is called faster or slower
only if the difference exceeds the noise in the logs. A side compared with itself has a ratio of
exactly 1 everywhere. Figures are medians of the steps that count, in ns. Every kernel belongs to
exactly one unit of work; work that is fused on one side and computed in parts on the other is one.

A side of one session has the noise within it, and an assumed one between processes. In a side of
several sessions, each of a process of its own, the median of every part is taken in each session,
and `noise.median_of_group` estimates how much processes differ.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, product
from string import ascii_uppercase
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses import noise
from llamacpp_instr.converters.analyses.clock import machine_notes
from llamacpp_instr.converters.analyses.noise import MIN_BLOCKS, Float64, Int64, Median, Ratio
from llamacpp_instr.converters.analyses.step_times import (
    ALIKE,
    StepTimes,
    compute_settings,
    took_turns,
    unlike_notes,
    verb,
)
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.graph.kernels import kernel_nodes
from llamacpp_instr.log.graph.ops import BLOCKS, Block, blocks_of
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.report import Cell, Column, Figures, Report

VIEWS = ("phase", "block", "layer", "op", "tensor")
KEYS = ("block", "op", "layer")
"""the views that a trend also has"""
EXCLUDED = "The steps exclude the time that the recorder itself took."
TOO_FEW = f"Fewer than {MIN_BLOCKS} blocks do not show the noise: record with --repeat 11."
ASSUMED = f"{100 * noise.PROCESS:g} % for the difference between processes"

Side = list[StepTimes]
Samples = Mapping[Hashable, tuple[Float64, int]]
"""key of a row -> ns of each step of a phase (NaN in steps that lack it), and the number of timed
intervals in a step"""


@dataclass(frozen=True)
class Diff:
    """The differences of sessions, the last from the first; the first report's title is the
    answer, the second has the times of whole steps."""

    reports: list[Report]
    steps: dict[str, Ratio]
    """ratio of whole steps as their caller saw them, by phase; compared with a threshold"""
    charts: list[Figure] = field(default_factory=list)

    def slower_by(self, threshold: float) -> list[str]:
        """The phases in which the last steps are slower than the first by more than `threshold`
        (0.05 is 5 %) beyond the noise: the lower end of the interval exceeds 1 + threshold."""
        lows = ((phase, ratio.low) for phase, ratio in self.steps.items())
        return [phase for phase, low in lows if low is not None and low > 1 + threshold]


def compute_diff(
    before: Sequence[Session],
    after: Sequence[Session],
    by: str | None = None,
    phase: str | None = None,
) -> Diff:
    """The differences of the sessions `after` from those `before`, one or several of each: steps by
    phase, and parts `by` one of VIEWS (default: blocks and ops). Raises UsageError as `Sides`
    does."""
    found = Sides((before, after), by, phase, VIEWS)
    work = _Work(found) if found.has_ops else None
    a, b = found.sides
    whole = {
        p: noise.compare(
            step_median(a, p), step_median(b, p), len(found.phases), in_turns=found.in_turns
        )
        for p in found.phases
    }
    # a table of a phase with too few steps is shown only on request
    shown_phases = [p for p in found.phases if phase or whole[p].low is not None]
    parts = [_part_report(found, work, view, p) for p in shown_phases for view in found.views]
    first = _first_report(found)
    first.title = answer(whole, parts, found.every, found.few)
    reports = [first, _step_report(found, whole), *(of for of in parts if of.rows or of.notes)]
    return Diff([*reports, *(_only_reports(found, work) if work else [])], whole)


# --- the sides ---


class Sides:
    """What can be compared of groups of sessions, each in order of time."""

    def __init__(
        self,
        groups: Sequence[Sequence[Session]],
        by: str | None,
        phase: str | None,
        keys: Sequence[str] = KEYS,
    ) -> None:
        """Raises UsageError for groups of one session beside larger ones, for a perturbed session,
        for a key other than `keys` and `phase`, and if nothing can be compared."""
        if len({min(len(group), 2) for group in groups}) != 1 or not groups[0]:
            raise UsageError(
                "give sides of one log each, or all of at least two logs, to show how much"
                " processes differ"
            )
        if by not in (None, "phase", *keys):
            raise UsageError(f"--by {by} compares two sides; a trend has {', '.join(keys)}")
        for session in chain(*groups):
            if session.start.perturbed:
                raise UsageError(
                    f"{session.path}: tensor values were read during the session, so its times must"
                    " not be compared; record it without --stats"
                )
            if by not in (None, "phase", "layer") and not session.has_ops:
                raise UsageError(
                    f"{session.path}: no ops were recorded; --by {by} needs the level detailed"
                )
        by_time = [sorted(group, key=lambda session: session.start.wall) for group in groups]
        self.names = letters(len(groups))
        self.sides: list[Side] = [[StepTimes(of) for of in group] for group in by_time]
        self.every = every = list(chain(*self.sides))
        self.phases = [
            p for p in PHASES if all(p in t.phases for t in every) and phase in (None, p)
        ]
        """those that every session has"""
        if not self.phases:
            what = f"{phase} steps" if phase else "steps of one phase"
            raise UsageError(f"not all of the {len(every)} logs have {what} that count")
        self.has_ops = all(times.session.has_ops for times in every)
        views = [by] if by else ["block", "op"] if self.has_ops else ["layer"]
        self.views = [view for view in views if view != "phase"]
        """the keys of the breakdowns"""
        self.several = len(every) > len(groups)
        """whether a side has several sessions"""
        self.in_turns = len(groups) == 2 and took_turns(*self.sides)
        """whether the sessions of both sides were recorded alternately, often enough for pairs"""
        lacking = zip((MIN_BLOCKS - len(side) for side in self.sides), self.names, strict=True)
        few = ", ".join(f"{n} more of {name}" for n, name in lacking if n > 0)
        self.few = few if self.several else None
        """how many logs are needed to show how much processes differ; empty if there are enough,
        None if each side is one log"""

    @property
    def notes(self) -> list[str]:
        """What the sessions' steps leave out, and how their logs ended; a sentence that holds for
        several logs comes once."""
        given = [
            (note.removeprefix(f"{times.session.path}: "), times.session.path)
            for times in self.every
            for note in times.notes
        ]
        n = len(self.every)
        notes = []
        for note, pairs in grouped(given, lambda of: of[0]).items():
            logs = dict.fromkeys(path for _, path in pairs)
            some = next(iter(logs)) if len(logs) == 1 else f"{len(logs)} of {n} logs"
            notes.append(f"{'Each log' if len(pairs) == n else some}: {note}")
        return notes

    @property
    def record_notes(self) -> tuple[list[str], list[str]]:
        """Notes on disturbed machines, and on sides whose own logs differ in settings."""
        machines = [[times.machine for times in side] for side in self.sides]
        sessions = [[times.session for times in side] for side in self.sides]
        return (
            machine_notes(list(zip(self.names, machines, strict=True))),
            unlike_notes(list(zip(self.names, sessions, strict=True))),
        )

    @property
    def interval_note(self) -> str:
        """Which noise the intervals include."""
        if not self.several:
            return f"It includes the noise within each log, and {ASSUMED}."
        if self.in_turns:
            return f"The logs took turns: it comes from the ratios of {len(self.sides[0])} pairs."
        if few := self.few:
            return (
                "It comes from the difference between processes. Fewer than"
                f" {MIN_BLOCKS} logs do not show that, so it includes at least the noise within"
                f" them, and {ASSUMED}: record {few}."
            )
        return "It comes from the difference between processes."


def letters(n: int) -> list[str]:
    """The names of n sides: A to Z, then AA, AB and so on."""
    words = chain.from_iterable(product(ascii_uppercase, repeat=length) for length in count(1))
    return ["".join(word) for word in islice(words, n)]


def step_median(side: Side, phase: str) -> Median:
    return medians(side, phase, [{"": (times.whole_steps(phase), 1)} for times in side])[""]


def layer_samples(times: StepTimes, phase: str) -> Samples:
    selected = times.of(phase)
    return {key: (ns[selected], 1) for key, ns in times.by_layer().items()}


def medians(side: Side, phase: str, samples: Sequence[Samples]) -> dict[Hashable, Median]:
    """The medians of the rows that a step has; `samples` has those of each session."""
    found = [
        _of_session(times, phase, {k: of for k, of in table.items() if not np.isnan(of[0]).all()},
                    has_error=len(side) < MIN_BLOCKS)
        for times, table in zip(side, samples, strict=True)
    ]  # fmt: skip
    if len(side) == 1:
        return found[0]
    keys = dict.fromkeys(key for table in found for key in table)
    none = Median(np.nan, None, 0, 0)
    return {key: noise.median_of_group([table.get(key, none) for table in found]) for key in keys}


def _of_session(
    times: StepTimes, phase: str, samples: Samples, *, has_error: bool
) -> dict[Hashable, Median]:
    """The medians of one session; their errors take time, and many sessions need none."""
    if not samples:
        return {}
    if not has_error:
        return {k: Median(float(np.nanmedian(ns)), None, 1, 0) for k, (ns, _) in samples.items()}
    rows, counts = zip(*samples.values(), strict=True)
    found = noise.compute_medians(np.array(rows), times.blocks(phase), counts)
    return {key: noise.disturb(of, times.taken) for key, of in zip(samples, found, strict=True)}


# --- the units of work ---


@dataclass(frozen=True)
class Role:
    """The identity of a node in its model, independent of the graph."""

    layer: int
    block: Block
    op: str
    name: str
    """the weight's base name (`attn_q`), else the tensor's (`Qcur`); empty for `node_21`"""
    occurrence: int
    """number among nodes that are equal in all of the above, in the graph's order"""


@dataclass
class Unit:
    """Work that is compared as one; labels are empty on a side that does not do it."""

    layer: int
    block: Block
    name: str
    labels: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """labels of the kernels of A and of B that do it: [`RMS_NORM+MUL`] or [`RMS_NORM`, `MUL`]"""

    @property
    def label(self) -> str:
        """`MUL_MAT f16`, or `MUL_MAT f16 → MUL_MAT q8_0` if the sides differ."""
        a, b = (", ".join(labels) for labels in self.labels)
        return a if a == b or not b else b if not a else f"{a} → {b}"

    @property
    def is_in_both(self) -> bool:
        return bool(self.labels[0] and self.labels[1])


def align(*sides: Sequence[Session]) -> tuple[list[Unit], list[list[dict[int, Int64]]]]:
    """The units of the kernels of both sides, in order of execution: first A's, then those only in
    B; and by side, session and plan the unit of each kernel, as its number among the units. Two
    kernels, of the same session or not, are of one unit if they compute a node of the same role."""
    roles_of: list[list[dict[int, list[list[Role]]]]] = [
        [
            {plan.plan: _kernel_roles(of.graphs[plan.graph], plan) for plan in of.plans.values()}
            for of in sessions
        ]
        for sessions in sides
    ]
    parent: dict[Role, Role] = {}
    for of_plan in chain.from_iterable(roles_of):
        for roles in chain.from_iterable(of_plan.values()):
            for role in roles:
                parent[_root(parent, role)] = _root(parent, roles[0])
    units: list[Unit] = []
    number: dict[Role, int] = {}
    of_kernel: list[list[dict[int, Int64]]] = [[{} for _ in sessions] for sessions in sides]
    for side, sessions in enumerate(sides):
        labelled: set[int] = set()
        for at, session in enumerate(sessions):
            for plan_number, kernels in roles_of[side][at].items():
                column = np.zeros(len(kernels), np.int64)
                for i, roles in enumerate(kernels):
                    root = _root(parent, roles[0])
                    if root not in number:
                        number[root] = len(units)
                        units.append(Unit(roles[-1].layer, roles[0].block, roles[-1].name))
                    column[i] = number[root]
                # each unit is labelled after the first plan that has it
                labels = session.kernels(plan_number).label
                for unit, label in zip(column.tolist(), labels, strict=True):
                    if unit not in labelled:
                        units[unit].labels[side].append(label)
                labelled.update(column.tolist())
                of_kernel[side][at][plan_number] = column
    return units, of_kernel


def _kernel_roles(graph: Graph, plan: Plan) -> list[list[Role]]:
    """The roles of the executed nodes of each kernel."""
    nodes = graph.whole
    blocks = blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, [f.name for f in graph.leafs])
    seen: Counter[tuple[int, Block, str, str]] = Counter()
    roles = []
    for i, op in enumerate(nodes.op):
        leafs = (graph.leaf(s).name for s in nodes.src[i] if s < 0)
        key = (nodes.layer[i], blocks[i], op, _base_name(nodes.name[i], leafs))
        roles.append(Role(*key, seen[key]))
        seen[key] += 1
    return [[roles[i] for i in inside] for inside in kernel_nodes(graph, plan)]


def _base_name(node: str, leafs: Iterable[str]) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`, else `Qcur-3 (view)` -> `Qcur`."""
    for leaf in leafs:
        if leaf.endswith((".weight", ".bias")):
            return re.sub(r"^.*?blk\.\d+\.|\.weight$", "", leaf)
    plain = re.sub(r"-\d+$", "", node.split(" (", 1)[0])
    plain = re.sub(r"^(cache_\w+)_l\d+$", r"\1", plain)
    return "" if re.fullmatch(r"(node|leaf)_\d+", plain) else plain


def _root(parent: dict[Role, Role], role: Role) -> Role:
    passed = []
    while (above := parent.setdefault(role, role)) != role:
        passed.append(role)
        role = above
    # path compression: later lookups go directly to the root
    parent.update(dict.fromkeys(passed, role))
    return role


class _Work:
    """The units of work of both sides, and their ns in each step, (units, steps), by session."""

    def __init__(self, found: Sides) -> None:
        sessions = [[times.session for times in side] for side in found.sides]
        self.sides = found.sides
        self.units, of_kernel = align(*sessions)
        self.ns = [
            [times.by_unit(of, len(self.units)) for times, of in zip(side, kernels, strict=True)]
            for side, kernels in zip(found.sides, of_kernel, strict=True)
        ]

    def rows(self, by: str) -> dict[Hashable, list[int]]:
        """The units of each row; by op and tensor only what both sides do."""
        members: dict[Hashable, list[int]] = defaultdict(list)
        for n, unit in enumerate(self.units):
            if by == "block":
                members[unit.block].append(n)
            elif unit.is_in_both:
                members[unit.label if by == "op" else n].append(n)
        return members

    def medians(
        self, side: int, phase: str, rows: Mapping[Any, Sequence[int]]
    ) -> dict[Hashable, Median]:
        """The median of each row of units of a side."""
        n_timed = {
            key: sum(len(self.units[n].labels[side]) for n in of) for key, of in rows.items()
        }
        samples = [
            {key: (_sum(ns[of][:, times.of(phase)]), n_timed[key]) for key, of in rows.items()}
            for times, ns in zip(self.sides[side], self.ns[side], strict=True)
        ]
        return medians(self.sides[side], phase, samples)


def _sum(rows: Float64) -> Float64:
    return np.where(np.isnan(rows).all(axis=0), np.nan, np.nansum(rows, axis=0))


# --- reports ---


def ratio_columns(first: str, is_layer: bool, a: str = "A", b: str = "B") -> list[Column]:
    """The columns of a table of `ratio_row`s."""
    return header(
        ("layer" if is_layer else "text", first), ("ns", a, b),
        Column(f"{b} / {a}", "ratio", "ratio"), ("ratio", "from", "to"),
        Column(f"{b} is", key="verdict"),
    )  # fmt: skip


def ratio_row(label: Cell, ratio: Ratio) -> list[Cell]:
    return [label, ratio.a, ratio.b, ratio.value, ratio.low, ratio.high, ratio.verdict]


def answer(
    steps: dict[str, Ratio],
    parts: Sequence[Report],
    sessions: Sequence[StepTimes],
    more_logs: str | None,
) -> str:
    """The first line: which phases are faster or slower, with their ratios and intervals."""
    text = clauses(steps, sessions, more_logs)
    if not any(ratio.differs for ratio in steps.values()):
        seen = [row for part in parts for row in part.rows if row[-1] in ("slower", "faster")]
        if seen:
            text += f"; {len(seen)} of the parts below differ{'s' * (len(seen) == 1)}"
    return text[0].upper() + text[1:] + "."


def clauses(
    steps: dict[str, Ratio], sessions: Sequence[StepTimes], more_logs: str | None, who: str = "B"
) -> str:
    """What every phase of `who` is: faster or slower, within the noise, or unknown for lack of
    steps, or of the logs that `more_logs` names."""
    verdicts = [noise.describe(ratio, verb(phase, sessions), who) for phase, ratio in steps.items()]
    parts = list(filter(None, verdicts))
    few = "steps to tell" if more_logs is None else f"logs to tell ({more_logs})"
    for verdict, what in (
        ("within noise", "no difference beyond the noise"),
        ("too noisy to tell", "too much noise to tell"),
        ("too few to tell", f"too few {few}"),
    ):
        if phases := [phase for phase, ratio in steps.items() if ratio.verdict == verdict]:
            parts.append(f"{what} in {' and '.join(phases)}")
    return "; ".join(parts)


def _first_report(found: Sides) -> Report:
    """The settings, and notes on the logs."""
    sessions = [[times.session for times in side] for side in found.sides]
    first = compute_settings(sessions[0], sessions[1], found.phases)
    machines, unlike = found.record_notes
    alike = (note for note in first.notes if not (unlike and note == ALIKE))
    first.notes = [*machines, *unlike, *alike, *found.notes]
    first.notes += dict.fromkeys(
        f"{session.path} recorded {n} models; their steps and kernels are counted together."
        for session in chain(*sessions)
        if (n := len(session.models)) > 1
    )
    return first


def _step_report(found: Sides, whole: dict[str, Ratio]) -> Report:
    notes: list[str] = []
    figures: Figures = {}
    if found.several:
        a, b = map(len, found.sides)
        figures = {"logs of A": (a, "count"), "logs of B": (b, "count")}
        notes.append(f"A is {a} logs, B is {b}: geometric means of their medians.")
    else:
        for phase in whole:
            counts = []
            for name, (times,) in zip("AB", found.sides, strict=True):
                n, n_blocks = len(times.runs(phase)), len(np.unique(times.blocks(phase).block))
                figures[f"{phase} steps of {name}"] = (n, "count")
                figures[f"{phase} blocks of {name}"] = (n_blocks, "count")
                counts.append(f"{counted(n, 'step')} in {counted(n_blocks, 'block')} of {name}")
            notes.append(f"{phase}: {', '.join(counts)}.")
        if any(ratio.low is None for ratio in whole.values()):
            notes.append(TOO_FEW)
    interval = f"for the whole table at once. {found.interval_note}"
    notes += [EXCLUDED, f'"from" and "to" are the 95 % interval, {interval}']
    rows = [ratio_row(phase, ratio) for phase, ratio in whole.items()]
    columns = ratio_columns("Phase", False)
    return Report("Steps, median time", columns, rows, notes, figures=figures, key="steps")


def _part_report(found: Sides, work: _Work | None, by: str, phase: str) -> Report:
    """One table of the rows that both sides have, in this phase."""
    a, b = (
        medians(side, phase, [layer_samples(times, phase) for times in side])
        if work is None or by == "layer"
        else work.medians(i, phase, work.rows(by))
        for i, side in enumerate(found.sides)
    )
    keys = [key for key in a if key in b]
    ratios = {
        key: noise.compare(a[key], b[key], len(keys), in_turns=found.in_turns) for key in keys
    }
    if by in ("op", "tensor"):
        keys.sort(key=lambda key: -max(ratios[key].a, ratios[key].b))
    elif by == "layer":
        keys.sort(key=lambda key: int(str(key)))
    else:
        keys.sort(key=lambda key: [*BLOCKS, key].index(key))

    def shown(key: Hashable) -> Cell:
        if by == "tensor" and work is not None and isinstance(key, int):
            return _tensor(work.units[key])
        return int(str(key)) if by == "layer" else str(key)

    rows = [ratio_row(shown(key), ratios[key]) for key in keys]
    missing = []
    for name, of, other in (("A", a, b), ("B", b, a)):
        lone = [str(shown(key)) for key in of if key not in other]
        if lone and by in ("block", "layer"):
            missing.append(f"Only in {name}: {', '.join(lone)}.")
    columns = ratio_columns(by.capitalize(), by == "layer")
    title = f"{phase.capitalize()} by {by}, median of a step"
    return Report(title, columns, rows, missing, key=f"{phase}_by_{by}")


def _tensor(unit: Unit) -> str:
    place = f"blk.{unit.layer}." if unit.layer >= 0 else ""
    return f"{place}{unit.name or unit.block} {unit.label}"


def _only_reports(found: Sides, work: _Work) -> list[Report]:
    """The kernels that only one side runs, the slowest first: their number in a graph, and their
    time in a step of each phase."""
    reports = []
    for i, (name, side) in enumerate(zip("AB", found.sides, strict=True)):
        lone: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for n, unit in enumerate(work.units):
            if unit.labels[i] and not unit.is_in_both:
                lone[unit.label, unit.block, unit.name].append(n)
        of_phase = [work.medians(i, p, lone) for p in found.phases]
        rows: list[list[Cell]] = []
        for key, units in lone.items():
            times = [of[key].value if key in of else None for of in of_phase]
            rows.append([*key, len(units), *times])
        rows.sort(key=lambda of: -max((float(ns) for ns in of[4:] if ns is not None), default=0.0))
        if rows:
            columns = header("Op", "block", "tensor", ("count", "times"), ("ns", *found.phases))
            logs = f"{len(side)} logs" if found.several else side[0].session.path
            title = f"Only in {name}, {logs}"
            reports.append(Report(title, columns, rows, key=f"only_in_{name.lower()}"))
    return reports
