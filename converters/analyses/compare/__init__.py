"""Models side by side: memory, types, error and measured speed, by tensor, role, layer and model.

Invariant: every row compares the same weights on both sides. A speed is called faster or slower
only if the difference exceeds the noise in the logs. All models are compared with the first. Errors
are relative to one reference, which the report names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.converters.analyses.compare.candidate import (
    SHOWN_PHASES,
    Candidate,
    bits_per_weight,
)
from llamacpp_instr.converters.analyses.compare.rows import (
    Pair,
    Row,
    arrow,
    faster_or_slower,
    more_or_fewer,
    sqnr_words,
)
from llamacpp_instr.converters.analyses.machine import machine_notes
from llamacpp_instr.converters.analyses.noise import describe
from llamacpp_instr.converters.analyses.settings import MODEL_FACTS, differing_facts, unlike_notes
from llamacpp_instr.converters.analyses.step_times import verb
from llamacpp_instr.converters.analyses.stored_weights import types_of
from llamacpp_instr.recording.memory.breakdown import Kind
from llamacpp_instr.report.report import Cell, Column, Report, columns_of

KINDS: dict[Kind, str] = {"weights": "weights", "cache": "KV cache", "compute": "compute buffer"}

SHOWN_TENSORS = 20
"""rows of the table of tensors on a terminal"""


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
    parts = [more_or_fewer(row.change), *_step_words(pair)]
    if (error := sqnr_words(row)) is not None:
        parts.append(f"SQNR {error} dB")
    return f"{pair.b.name} against {pair.a.name}: {', '.join(parts)}"


def _step_words(pair: Pair) -> Iterator[str]:
    for phase in pair.phases:
        ratio = pair.step_ratio(phase)
        does = verb(phase, [*pair.a.times, *pair.b.times])
        if not (text := describe(ratio, does, "").strip()):
            text = f"{does}: {ratio.verdict}"
        yield text


def _models(candidates: Sequence[Candidate]) -> Report:
    first = candidates[0]
    columns = [
        Column("model"),
        *(Column(f"{phase} tokens/s", "per_second") for phase in SHOWN_PHASES),
        Column("file", "bytes"),
        Column("of the first", "fraction"),
        Column("bits/weight", "bits"),
        Column("SQNR", "decibel"),
        Column("kind"),
        Column("weights", "bytes"),
        *(Column(f"{name} in memory", "bytes") for name in KINDS.values()),
    ]
    rows: list[list[Cell]] = []
    for of in candidates:
        rows.append(
            [
                of.name,
                *(of.tokens_per_second(phase) for phase in SHOWN_PHASES),
                of.model.file_size,
                of.model.n_bytes / first.model.n_bytes if first.model.n_bytes else None,
                bits_per_weight(of.model.tensors),
                of.sqnr_db(of.errors),
                of.model.description,
                of.model.n_bytes,
                *(of.memory.of_kind(kind) if of.memory else None for kind in KINDS),
            ]
        )
    return Report("", columns, rows, key="models")


def _settings(pairs: Sequence[Pair]) -> Iterator[Report]:
    """The settings that differ between the logs, apart from the model."""
    for pair in pairs:
        if not pair.a.sessions or not pair.b.sessions:
            continue
        facts = differing_facts(pair.a.sessions[0], pair.b.sessions[0], list(pair.phases))
        rows: list[list[Cell]] = [list(row) for row in facts if row[0] not in MODEL_FACTS]
        if rows:
            columns = [Column("setting"), Column(pair.a.name), Column(pair.b.name)]
            note = "These differences may explain differences in the times below."
            yield Report("Recorded differently", columns, rows, [note])


def _by_layer(candidates: Sequence[Candidate]) -> Report:
    layers = sorted({layer for of in candidates for layer in of.model.by_layer})
    rows: list[list[Cell]] = []
    for layer in layers:
        row: list[Cell] = [layer]
        for of in candidates:
            weights = of.model.by_layer.get(layer, [])
            row += [bits_per_weight(weights), " ".join(types_of(weights))]
        rows.append(row)
    columns = [Column("layer", "layer")]
    for of in candidates:
        columns += [Column(f"{of.name}, bits/weight", "bits"), Column(f"{of.name}, types")]
    return Report("Bits per weight and types by layer", columns, rows)


def _numbers(title: str, what: Literal["role", "layer", "tensor"], rows: Sequence[Row]) -> Report:
    phases = [phase for phase in SHOWN_PHASES if any(phase in row.times for row in rows)]
    columns = [Column(what, "layer" if what == "layer" else "text")]
    columns += [Column("A types"), Column("B types"), Column("change of bytes", "fraction")]
    for phase in phases:
        columns += [Column(f"{phase} {name}", "ratio") for name in ("B / A", "from", "to")]
    columns += [Column(f"{side} SQNR", "decibel") for side in "AB"]
    columns += [Column(f"{side} bytes", "bytes") for side in "AB"]
    for phase in phases:
        columns += [Column(f"{phase} {side}", "ns") for side in "AB"]
        columns += [Column(f"{phase} bytes/s {side}", "bytes_per_second") for side in "AB"]
        columns += [Column(f"{phase} FLOP/s {side}", "flop_per_second") for side in "AB"]
    cells: list[list[Cell]] = []
    for row in rows:
        cell: list[Cell] = [row.layer if what == "layer" else row.name]
        cell += [row.a.types, row.b.types, row.change]
        for phase in phases:
            times = row.times.get(phase)
            ratio = times.ratio if times else None
            cell += [ratio.value, ratio.low, ratio.high] if ratio else [None] * 3
        cell += [row.a.sqnr_db, row.b.sqnr_db, row.a.n_bytes, row.b.n_bytes]
        for phase in phases:
            cell += _timed(row, phase)
        cells.append(cell)
    return Report(title, columns, cells, key=f"by_{what}")


def _timed(row: Row, phase: str) -> list[Cell]:
    times = row.times.get(phase)
    if times is None:
        return [None] * 6
    ratio, (a, b) = times.ratio, times.rates
    return [ratio.a, ratio.b, a.bytes, b.bytes, a.flops, b.flops]


def _in_words(title: str, what: str, rows: Sequence[Row]) -> Report:
    """Rows in words for a reader, with the times of the most important phase."""
    phase = _told_phase(rows)
    columns = columns_of("text", what, "type", "bytes", phase or "", "SQNR, dB")
    cells: list[list[Cell]] = []
    for row in rows:
        times = row.times.get(phase) if phase else None
        cells.append(
            [
                row.name,
                arrow(row.a.types, row.b.types),
                more_or_fewer(row.change).removesuffix(" bytes"),
                faster_or_slower(times.ratio) if times else None,
                sqnr_words(row),
            ]
        )
    return Report(title, columns, cells, key=f"by_{what}")


def _told_phase(rows: Sequence[Row]) -> str | None:
    """The phase whose times are shown in words: decode if there is one, as most steps are."""
    there = {phase for row in rows for phase in row.times}
    return next((phase for phase in SHOWN_PHASES if phase in there), None)


def _largest(title: str, tensors: Sequence[Row]) -> Report:
    """The most important tensors: those whose ops take longest, or those with the most bytes."""
    phase = _told_phase(tensors)

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
