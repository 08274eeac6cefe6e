"""Models side by side: memory, types, error and measured speed, by tensor, role, layer and model;
and charts of these.

Invariant: every row compares the same weights on both sides; a figure that one side lacks is None.
A speed is called faster or slower only if the difference exceeds the noise in the logs. All models
are compared with the first. Errors are relative to one reference, which the report names.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.converters.analyses.clock import machine_notes
from llamacpp_instr.converters.analyses.memory import (
    StoredModel,
    StoredTensor,
    stored_in_log,
    types_of,
)
from llamacpp_instr.converters.analyses.noise import Ratio, compare, describe
from llamacpp_instr.converters.analyses.step_times import (
    MODEL_FACTS,
    PhaseUses,
    StepTimes,
    Use,
    UseTimes,
    compute_use_times,
    differing_facts,
    median_of_sessions,
    took_turns,
    unlike_notes,
    verb,
)
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.converters.analyses.weights import draw_errors, layer_names, layers_of
from llamacpp_instr.lab.weights.figures import Sums, WeightError
from llamacpp_instr.log.schema import Model
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recording.memory.breakdown import Kind, MemoryBreakdown, read_breakdown
from llamacpp_instr.report.charts import Chart, lines_by_layer
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.plain_charts import Group, bars
from llamacpp_instr.report.report import Cell, Report

KINDS: dict[Kind, str] = {"weights": "weights", "cache": "KV cache", "compute": "compute buffer"}

SHOWN_TENSORS = 20
"""rows of the table of tensors on a terminal"""
SHOWN_PHASES = ("decode", "prefill", "encode")
"""in the order in which they are shown: users wait for decodes most of the time"""


def compute_comparison(
    candidates: Sequence[Candidate], reference: str | None = None, every_tensor: bool = True
) -> list[Report]:
    """The tables of two or more candidates; `reference` names the model that errors refer to.

    With `every_tensor` the rows are numbers, one per column, of every tensor. Otherwise they are
    words for a reader, of the most important tensors only. Raises UsageError if two candidates are
    not versions of the same model.
    """
    assert len(candidates) > 1
    pairs = [Pair(candidates[0], other) for other in candidates[1:]]
    for pair in pairs:
        pair.check()
    models = _models(candidates)
    answers = [f"{answer(pair)}." for pair in pairs]
    if len(pairs) == 1:
        models.title = answers[0]
    else:
        models.title = f"{len(pairs)} models against {candidates[0].name}"
        models.notes += answers
    if reference is not None:
        models.notes.append(f"SQNR is relative to {reference}.")
    if all(pair.in_turns for pair in pairs):
        n = len(candidates[0].times)
        models.notes.append(f"The models took turns: their speeds are compared in {n} pairs.")
    if any(pair.disturbed for pair in pairs):
        models.notes.append(
            "On a disturbed machine, steps of more than 100 ms are compared by the CPU time of the"
            " process, shorter ones by the sum of their kernels' lower deciles, which interruptions"
            " do not change."
        )
    models.notes += machine_notes([(of.name, [t.machine for t in of.times]) for of in candidates])
    models.notes += unlike_notes([(of.name, of.sessions) for of in candidates])
    for session in (session for of in candidates for session in of.sessions):
        if ended := session.log_end.sentence():
            models.notes.append(f"{session.path}: {ended}.")
    reports = [models, *_settings(pairs), _by_layer(candidates)]
    for pair in pairs:
        title = f"{pair.b.name} against {pair.a.name}"
        roles, tensors = pair.by(lambda weight: weight.role), pair.tensors()
        if every_tensor:
            layers = [row for row in pair.by(lambda weight: weight.layer) if row.layer >= 0]
            reports.append(_numbers(f"{title}, by role", "role", roles))
            reports.append(_numbers(f"{title}, by layer", "layer", layers))
            reports.append(_numbers(f"{title}, by tensor", "tensor", tensors))
        else:
            reports.append(_in_words(f"{title}, by role", "role", roles))
            reports.append(_largest(title, tensors))
        only = ((name, names) for name, names in pair.only if names)
        reports[-1].notes += [f"Only in {name}: {first_names(names)}." for name, names in only]
    return reports


def answer(pair: Pair) -> str:
    """One line with the result for a pair."""
    row = pair.whole()
    parts = [more_or_fewer(row.change)]
    for phase in pair.phases:
        ratio = pair.step_ratio(phase)
        does = verb(phase, [*pair.a.times, *pair.b.times])
        parts.append(describe(ratio, does, "").strip() or f"{does}: {ratio.verdict}")
    if (error := sqnr_words(row)) is not None:
        parts.append(f"SQNR {error} dB")
    return f"{pair.b.name} against {pair.a.name}: {', '.join(parts)}"


def _models(candidates: Sequence[Candidate]) -> Report:
    first = candidates[0].model
    columns = header(
        "model", ("per_second", *(f"{phase} tokens/s" for phase in SHOWN_PHASES)),
        ("bytes", "file"), ("fraction", "of the first"), ("bits", "bits/weight"),
        ("decibel", "SQNR"), "kind", ("bytes", "weights"),
        ("bytes", *(f"{name} in memory" for name in KINDS.values())),
    )  # fmt: skip
    rows: list[list[Cell]] = [
        [
            of.name, *(of.tokens_per_second(phase) for phase in SHOWN_PHASES), of.model.file_size,
            of.model.n_bytes / first.n_bytes if first.n_bytes else None,
            bits_per_weight(of.model.tensors), of.sqnr_db(of.errors), of.model.description,
            of.model.n_bytes, *(of.memory.of_kind(kind) if of.memory else None for kind in KINDS),
        ]
        for of in candidates
    ]  # fmt: skip
    return Report("", columns, rows, key="models")


def _settings(pairs: Sequence[Pair]) -> Iterator[Report]:
    """The settings that differ between the logs, apart from the model."""
    for pair in pairs:
        if not pair.a.sessions or not pair.b.sessions:
            continue
        facts = differing_facts(pair.a.sessions[0], pair.b.sessions[0], list(pair.phases))
        rows: list[list[Cell]] = [list(row) for row in facts if row[0] not in MODEL_FACTS]
        if rows:
            columns = header("setting", pair.a.name, pair.b.name)
            note = "These differences may explain differences in the times below."
            yield Report("Recorded differently", columns, rows, [note])


def _by_layer(candidates: Sequence[Candidate]) -> Report:
    columns = header(("layer", "layer"))
    for of in candidates:
        columns += header(("bits", f"{of.name}, bits/weight"), f"{of.name}, types")
    rows: list[list[Cell]] = []
    for layer in sorted({layer for of in candidates for layer in of.model.by_layer}):
        rows.append([layer])
        for of in candidates:
            weights = of.model.by_layer.get(layer, [])
            rows[-1] += [bits_per_weight(weights), " ".join(types_of(weights))]
    return Report("Bits per weight and types by layer", columns, rows)


def _numbers(title: str, what: Literal["role", "layer", "tensor"], rows: Sequence[Row]) -> Report:
    phases = [phase for phase in SHOWN_PHASES if any(phase in row.times for row in rows)]
    columns = header(
        ("layer" if what == "layer" else "text", what), "A types", "B types",
        ("fraction", "change of bytes"),
        *(("ratio", f"{of} B / A", f"{of} from", f"{of} to") for of in phases),
        ("decibel", "A SQNR", "B SQNR"), ("bytes", "A bytes", "B bytes"),
    )  # fmt: skip
    for of in phases:
        columns += header(
            ("ns", f"{of} A", f"{of} B"),
            ("bytes_per_second", f"{of} bytes/s A", f"{of} bytes/s B"),
            ("flop_per_second", f"{of} FLOP/s A", f"{of} FLOP/s B"),
        )
    cells: list[list[Cell]] = []
    for row in rows:
        ratios: list[Cell] = []
        timed: list[Cell] = []
        for phase in phases:
            if (times := row.times.get(phase)) is None:
                ratios += [None] * 3
                timed += [None] * 6
            else:
                ratio, (a, b) = times.ratio, times.rates
                ratios += [ratio.value, ratio.low, ratio.high]
                timed += [ratio.a, ratio.b, a.bytes, b.bytes, a.flops, b.flops]
        label = row.layer if what == "layer" else row.name
        sizes = row.a.sqnr_db, row.b.sqnr_db, row.a.n_bytes, row.b.n_bytes
        cells.append([label, row.a.types, row.b.types, row.change, *ratios, *sizes, *timed])
    return Report(title, columns, cells, key=f"by_{what}")


def _in_words(title: str, what: str, rows: Sequence[Row]) -> Report:
    """Rows in words for a reader, with the times of the most important phase."""
    phase = _shown_phase(rows)
    cells: list[list[Cell]] = []
    for row in rows:
        times = row.times.get(phase) if phase else None
        types, n_bytes = arrow(row.a.types, row.b.types), more_or_fewer(row.change)
        speed = faster_or_slower(times.ratio) if times else None
        cells.append([row.name, types, n_bytes.removesuffix(" bytes"), speed, sqnr_words(row)])
    columns = header(what, "type", "bytes", phase or "", "SQNR, dB")
    return Report(title, columns, cells, key=f"by_{what}")


def _shown_phase(rows: Sequence[Row]) -> str | None:
    """The phase whose times are shown in words: decode if there are any, as most steps are."""
    there = {phase for row in rows for phase in row.times}
    return next((phase for phase in SHOWN_PHASES if phase in there), None)


def _largest(title: str, tensors: Sequence[Row]) -> Report:
    """The most important tensors: those whose ops take longest, or those with the most bytes."""
    phase = _shown_phase(tensors)

    def matters(row: Row) -> float:
        if phase is None:
            return row.a.n_bytes
        return row.times[phase].ratio.a if phase in row.times else 0.0

    largest = sorted(tensors, key=matters, reverse=True)[:SHOWN_TENSORS]
    report = _in_words(f"{title}, by tensor", "tensor", largest)
    if len(tensors) > len(largest):
        what = f"take longest in {phase}" if phase else "are largest"
        report.notes.append(
            f"{len(largest)} of {len(tensors)} rows, those that {what}: -o FILE.html has all."
        )
    return report


def draw_comparison(candidates: Sequence[Candidate]) -> list[Chart | Figure]:
    """The speed of each phase, if it was measured, and bits per weight by layer. If errors are
    known, also the SQNR by layer, and the relative error of each model over its size."""
    layers = layers_of(tensor.layer for of in candidates for tensor in of.model.tensors)
    bits: dict[str, list[float | None]] = {}
    # the reference last, so that a model has the same colour in both charts
    for of in sorted(candidates, key=lambda of: of.is_reference):
        tensors = of.model.by_layer
        bits[of.name] = [bits_per_weight(tensors[n]) if n in tensors else None for n in layers]
    speeds = [
        Group(f"{phase}, tokens/s", [of.tokens_per_second(phase) for of in candidates])
        for phase in SHOWN_PHASES
        if any(phase in of.phases() for of in candidates)
    ]
    names = [of.name for of in candidates]
    return [
        *([bars("Speed, median step", names, speeds)] if speeds else []),
        lines_by_layer("Bits per weight by layer", "bits per weight", layer_names(layers), bits),
        *draw_errors({of.name: list(of.errors.values()) for of in candidates if of.errors}),
    ]


# --- the models and pairs of them ---


@dataclass(frozen=True)
class Candidate:
    """A model that is compared. Fields that are None or empty are unknown, and are not shown."""

    name: str
    """short name for tables"""
    model: StoredModel
    file: ModelFile | None = None
    sessions: Sequence[Session] = ()
    memory: MemoryBreakdown | None = None
    """measured if there are sessions, else predicted"""
    errors: Mapping[str, WeightError] = field(default_factory=dict)
    """errors of the weights against the reference, by name"""
    is_reference: bool = False
    """this is the reference, so it has no errors"""

    @cached_property
    def weights(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.model.tensors}

    @cached_property
    def times(self) -> list[StepTimes]:
        """The times of its steps, by session, in order of time."""
        by_time = sorted(self.sessions, key=lambda session: session.start.wall)
        return [StepTimes(session) for session in by_time]

    def sqnr_db(self, names: Iterable[str]) -> float | None:
        """SQNR of these weights together, in dB: infinite if they equal the reference, None if it
        was not computed."""
        sums = sum((self.errors[name].sums for name in names if name in self.errors), Sums())
        return math.inf if self.is_reference else sums.sqnr_db if sums.n else None

    def phases(self) -> set[str]:
        """The phases that have steps in every session."""
        return set.intersection(*(of.phases for of in self.times)) if self.times else set()

    def tokens_per_second(self, phase: str) -> float | None:
        """The median of the sessions' medians; None without steps of the phase."""
        rates = [rate for of in self.times if (rate := of.tokens_per_second(phase)) is not None]
        return statistics.median(rates) if rates else None


def check_recorded(session: Session, model: StoredModel) -> None:
    """Raises UsageError, which names a tensor, unless the session ran the model."""
    there = {tensor.name: tensor for tensor in model.tensors}
    for tensor in stored_in_log(session, recorded_model(session), None).tensors:
        same = there.get(tensor.name)
        if same is None or (same.type, same.n_bytes) != (tensor.type, tensor.n_bytes):
            has = same.type if same else "missing"
            raise UsageError(
                f"{session.path} recorded a model other than {model.name}: {tensor.name} is "
                f"{tensor.type} in the log, {has} in the file"
            )


def recorded_model(session: Session) -> Model:
    """The only model that a session ran. Raises UsageError if it ran several, or none."""
    if len(session.models) != 1:
        raise UsageError(
            f"{session.path} recorded {len(session.models)} models; a comparison needs a log of one"
        )
    return next(iter(session.models.values()))


def recorded_memory(session: Session) -> MemoryBreakdown | None:
    """The recorded memory of the session's last context; None if the log has none."""
    if not session.memory:
        return None
    last = session.memory[-1]
    context = session.contexts[last.ctx]
    return read_breakdown(context, last.buffers, session.tensors_of.get(context.model, []))


def short_names(paths: Sequence[Path], otherwise: Sequence[Path]) -> list[str]:
    """A short name for each model: its file name without the common prefix, up to a hyphen. Equal
    names are replaced by those of the files in `otherwise`, such as the logs."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [path.stem for path in otherwise]
    if len(set(names)) < len(names):
        names = [str(path) for path in otherwise]
    parts = [name.split("-") for name in names]
    while all(len(of) > 1 for of in parts) and len({of[0] for of in parts}) == 1:
        parts = [of[1:] for of in parts]
    return ["-".join(of) for of in parts]


def bits_per_weight(tensors: Sequence[StoredTensor]) -> float:
    """Bits per weight of all tensors together; 0 if there are none."""
    elements = sum(tensor.n_elements for tensor in tensors)
    return 8 * sum(tensor.n_bytes for tensor in tensors) / elements if elements else 0.0


@dataclass(frozen=True)
class Side:
    """One model's figures for the weights of a row."""

    types: str
    n_bytes: int
    sqnr_db: float | None
    """infinite if the weights equal the reference; None if it was not computed"""


@dataclass(frozen=True)
class Row:
    """Some weights, or one weight and one op that reads it, on both sides."""

    name: str
    layer: int
    a: Side
    b: Side
    times: Mapping[str, UseTimes]
    """by phase"""

    @property
    def change(self) -> float:
        """The difference of the bytes, B - A, as a share of A's."""
        return self.b.n_bytes / self.a.n_bytes - 1 if self.a.n_bytes else 0.0


class Pair:
    """Two candidates and the weights that both have."""

    def __init__(self, a: Candidate, b: Candidate) -> None:
        self.a, self.b = a, b
        self.names = [name for name in a.weights if name in b.weights]
        self.only = [
            (of.name, [name for name in of.weights if name not in other.weights])
            for of, other in ((a, b), (b, a))
        ]
        self.in_turns = took_turns(a.times, b.times)
        """whether the runs of both are pairs"""
        self.disturbed = self.in_turns and any(of.taken for of in (*a.times, *b.times))
        """whether the times of whole steps mean nothing, because other processes took CPU time"""
        self.phases: dict[str, tuple[PhaseUses, PhaseUses]] = {}
        for phase in PHASES:
            if phase in a.phases() & b.phases():
                self.phases[phase] = PhaseUses(a.times, phase), PhaseUses(b.times, phase)

    def check(self) -> None:
        """Raises UsageError unless both have weights in common, with equal shapes."""
        what = f"{self.a.name} and {self.b.name} are not versions of the same model"
        if not self.names:
            raise UsageError(f"{what}: they have no tensor in common")
        for name in self.names:
            a, b = ([n for n in of.weights[name].ne if n > 1] for of in (self.a, self.b))
            if a != b:
                raise UsageError(f"{what}: {name} has the shape {a} in one, {b} in the other")

    def tensors(self) -> list[Row]:
        """A row for each weight, or for each op if several ops read a weight."""
        groups: list[tuple[str, list[str], list[Use]]] = []
        for name in self.names:
            uses = self._uses({name})
            if len({use.op for use in uses}) > 1:
                groups += [(f"{short(name)} {use.op}", [name], [use]) for use in uses]
            else:
                groups.append((short(name), [name], uses))
        return self._rows(groups)

    def by(self, key: Callable[[StoredTensor], str | int]) -> list[Row]:
        """A row for all weights of each role, or of each layer, in the order of the file."""
        members = grouped(self.names, lambda name: key(self.a.weights[name]))
        return self._rows(
            [(str(of), names, self._uses(set(names))) for of, names in members.items()]
        )

    def whole(self) -> Row:
        (row,) = self._rows([("all weights", self.names, self._uses(set(self.names)))])
        return row

    def step_ratio(self, phase: str) -> Ratio:
        """The ratio of whole steps, as their caller saw them. If other processes took time: the
        ratio of the steps' CPU times if they are long enough for that, else of their kernels."""
        sides = self.a.times, self.b.times
        by_cpu = all(of.last_intervals(phase) for sessions in sides for of in sessions)
        medians = []
        for sessions, uses in zip(sides, self.phases[phase], strict=True):
            if not self.disturbed:
                whole = np.concatenate([of.whole_steps(phase) for of in sessions])
                medians += uses.medians(whole[None], [1], in_turns=self.in_turns)
            elif by_cpu:
                cpu = [float(np.median(of.cpu_times(phase))) for of in sessions]
                medians.append(median_of_sessions(cpu))
            else:
                medians.append(uses.kernels())
        return compare(medians[0], medians[1], len(self.phases), in_turns=self.in_turns)

    def _uses(self, names: set[str]) -> list[Use]:
        found: dict[Use, None] = {}
        for sides in self.phases.values():
            in_both = (use for use in sides[0].row if use in sides[1].row)
            found |= dict.fromkeys(use for use in in_both if use.weight in names)
        return list(found)

    def _rows(self, groups: Sequence[tuple[str, list[str], list[Use]]]) -> list[Row]:
        timed: dict[str, list[UseTimes | None]] = {}
        for phase, (a, b) in self.phases.items():
            # the uses that ran in this phase: a prefill without outputs reads no output matrix
            ran = [[of for of in uses if of in a.row and of in b.row] for _, _, uses in groups]
            timed[phase] = compute_use_times(a, b, ran, in_turns=self.in_turns)
        rows = []
        for i, (label, names, _) in enumerate(groups):
            times = {phase: of_row for phase, of in timed.items() if (of_row := of[i]) is not None}
            sides = _side(self.a, names), _side(self.b, names)
            rows.append(Row(label, self.a.weights[names[0]].layer, *sides, times))
        return rows


def short(name: str) -> str:
    """A weight's name without `.weight`."""
    return name.removesuffix(".weight")


def _side(of: Candidate, names: Sequence[str]) -> Side:
    weights = [of.weights[name] for name in names]
    n_bytes = sum(weight.n_bytes for weight in weights)
    return Side(" ".join(types_of(weights)), n_bytes, of.sqnr_db(names))


def arrow(a: str, b: str) -> str:
    """`Q8_0 → Q4_K`, or one of them if both are equal."""
    return a if a == b else f"{a} → {b}"


def more_or_fewer(change: float) -> str:
    """`47 % fewer bytes`."""
    if change == 0:
        return "same bytes"
    percent = f"{abs(change) * 100:.0f} %" if abs(change) >= 0.01 else f"{abs(change) * 100:.2f} %"
    return f"{percent} {'fewer' if change < 0 else 'more'} bytes"


def faster_or_slower(ratio: Ratio) -> str:
    """`1.70× faster`, or that the difference is within the noise."""
    if ratio.value is None or not ratio.differs:
        return ratio.verdict
    return f"{1 / ratio.value:.2f}× faster" if ratio.value < 1 else f"{ratio.value:.2f}× slower"


def sqnr_words(row: Row) -> str | None:
    """`46.1 → 22.3` in dB. Only B's value if A equals the reference; `∞` if B also does."""
    if row.a.sqnr_db is None or row.b.sqnr_db is None:
        return None
    a, b = (f"{side.sqnr_db:.1f}".replace("inf", "∞") for side in (row.a, row.b))
    return b if a == "∞" else arrow(a, b)
