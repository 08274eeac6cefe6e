"""The memory of a model and a context: predicted, measured, and why the two differ.

Invariant: the rows of a section add up to its total, and every difference has an explanation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.converters.analyses.stored_weights import StoredModel
from llamacpp_instr.log.schema import Memory
from llamacpp_instr.recording.memory.breakdown import (
    MAPPED,
    PLAIN,
    Kind,
    MemoryBreakdown,
    read_breakdown,
)
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of, shown

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session

_WORDS = {"weights": "weights", "cache": "KV cache, state", "compute": "compute buffers"}


@dataclass(frozen=True)
class ContextMemory:
    """The known memory of a context, or of several equal contexts."""

    predicted: MemoryBreakdown | None = None
    measured: MemoryBreakdown | None = None
    """of the last one that was recorded"""
    at_first: MemoryBreakdown | None = None
    """of the first one that was recorded"""
    contexts: list[int] = field(default_factory=list)
    """their numbers in the log"""
    rss: int = 0
    """peak resident bytes of the whole process; 0 if unknown"""
    room: int | None = None
    """bytes of memory into which it must fit; None for no verdict"""
    notes: list[str] = field(default_factory=list)
    """reasons for missing figures"""


def memory_report(model: StoredModel, memory: ContextMemory) -> Report:
    """A row for each kind of memory and each buffer, and their sum."""
    columns = [
        *columns_of("text", "Memory", "buffer"),
        Column("tensors", "count"),
        *columns_of("bytes", "in file", "predicted", "measured", "difference"),
    ]
    known = memory.measured or memory.predicted
    rows: list[list[Cell]] = []
    if known is None:
        row: list[Cell] = ["weights, mapped", MAPPED, len(model.tensors), model.n_bytes]
        return Report("Memory", columns, [[*row, model.span, None, None]], memory.notes)
    sides = memory.predicted, memory.measured
    for kind, buffer in _keys(memory):
        row = [_words(kind, buffer), buffer]
        row += _stored(known, buffer) if kind == "weights" else [None, None]
        sizes = [of.of(kind, buffer) if of else None for of in sides]
        rows.append([*row, *sizes, _difference(*sizes)])
    total = [of.n_bytes if of else None for of in sides]
    rows.append(["total", None, None, None, *total, _difference(*total)])
    notes = [*_verdict(known, memory), _settings_note(known)]
    notes += [*_mapping_notes(known), *explain_difference(memory), *_process_notes(memory)]
    notes += memory.notes
    of = known.settings
    figures: Figures = {
        "context": (of.n_ctx, "count"),
        "sequences": (of.n_seq_max, "count"),
        "batch": (of.n_batch, "count"),
        "ubatch": (of.n_ubatch, "count"),
        "mapped, not read": (_between(known), "bytes"),
        "stays in use": (known.n_bytes - _between(known), "bytes"),
        "memory to fit into": (memory.room, "bytes"),
        "resident": (memory.rss or None, "bytes"),
    }
    return Report(_title(memory), columns, rows, notes, figures=figures, key="memory")


def explain_difference(memory: ContextMemory) -> list[str]:
    """Why the measurement differs from the prediction, or that it does not."""
    predicted, measured = memory.predicted, memory.measured
    if predicted is None or measured is None:
        return []
    if predicted.uses == measured.uses:
        return ["Predicted for the settings of the log. The measurement is equal to the byte."]
    notes = ["Predicted for the settings of the log."]
    moved = _moved(predicted, measured)
    if moved:
        notes.append(
            f"In other buffers than this library would use: {counted(len(moved), 'tensor')}, "
            f"first {moved[0]}. Which tensors are repacked depends on the processor and the build."
        )
    elif predicted.of_kind("weights") != measured.of_kind("weights"):
        notes.append(
            "The weights were in the same buffers; the layout of the file may have changed."
        )
    if predicted.of_kind("cache") != measured.of_kind("cache"):
        notes.append(
            "The cache differs although its size and types are the same: the program set "
            "an option that the log does not record, such as states kept for a rollback."
        )
    notes += _compute_notes(memory)
    return notes


def _compute_notes(memory: ContextMemory) -> list[str]:
    assert memory.predicted is not None
    assert memory.measured is not None
    predicted, measured = memory.predicted.of_kind("compute"), memory.measured.of_kind("compute")
    if predicted == measured:
        return []
    at_first = memory.at_first.of_kind("compute") if memory.at_first else measured
    if at_first != measured:
        return [
            f"The compute buffers grew from {shown(at_first, 'bytes')} to "
            f"{shown(measured, 'bytes')} while the session ran: a graph needed more than "
            "llama.cpp had reserved."
        ]
    return [
        "The compute buffers differ although batches and flash attention are the same: the "
        "program set an option that the log does not record, such as the number of outputs in a "
        "batch, or another build made different graphs."
    ]


def _moved(predicted: MemoryBreakdown, measured: MemoryBreakdown) -> list[str]:
    """Names of the weights that are not in the predicted buffers, with both places."""
    here, there = predicted.buffers_of(), measured.buffers_of()
    return [
        f"{name} ({', '.join(places)}, not {', '.join(here[name])})"
        for name, places in there.items()
        if name in here and set(places) != set(here[name])
    ]


def _settings_note(known: MemoryBreakdown) -> str:
    of = known.settings
    parts = [f"For {counted(of.n_ctx, 'token')}"]
    if of.n_seq_max > 1:
        how = "sharing one cache" if of.kv_unified else "with a cache each"
        parts[0] += f" of {of.n_seq_max} sequences {how}"
    parts.append(f"batches of {of.n_batch:,} computed {of.n_ubatch:,} at a time")
    if known.of_kind("cache"):
        parts.append(f"{of.type_k} keys and {of.type_v} values in the cache")
    parts.append(f"flash attention {'on' if of.flash_attn else 'off'}")
    if of.embeddings:
        parts.append("embeddings")
    if of.swa_full:
        parts.append("the whole context kept for sliding windows")
    parts.append("the file mapped" if of.mmap else "the file read, not mapped")
    return f"{', '.join(parts)}."


def _verdict(known: MemoryBreakdown, memory: ContextMemory) -> list[str]:
    """Whether it fits: what stays in use, of buffers in the machine's own memory."""
    if memory.room is None:
        return []
    here = [use for use in known.uses if use.buffer.startswith(("CPU", "AMX"))]
    total, dropped = sum(use.n_bytes for use in here), _between(known)
    room, in_use, whole = (shown(n, "bytes") for n in (memory.room, total - dropped, total))
    fits = "Fits" if total - dropped <= memory.room else "Does not fit"
    notes = [f"{fits} into {room}: {in_use} of {whole} stay in use."]
    if memory.room < total - dropped <= memory.room + known.of("weights", MAPPED) - dropped:
        notes.append("Each token would read mapped weights from the file again.")
    return notes


def _mapping_notes(known: MemoryBreakdown) -> list[str]:
    notes = []
    if (between := _between(known)) > 0:
        notes.append(
            "A file is mapped from the first to the last tensor that is read in place. "
            f"{shown(between, 'bytes')} of that are read only while the model is loaded. The "
            f"system can drop them: {shown(known.n_bytes - between, 'bytes')} stay in use."
        )
    if any("REPACK" in use.buffer for use in known.uses):
        notes.append(
            "Repacked tensors have their rows interleaved for this processor's kernels, in memory "
            "of their own."
        )
    twice = [name for name, places in known.buffers_of().items() if len(places) > 1]
    if twice:
        notes.append(f"Stored twice, for two uses: {first_names(twice)}.")
    return notes


def _between(known: MemoryBreakdown) -> int:
    """Mapped bytes of tensors that are not read in place."""
    mapped = known.of("weights", MAPPED)
    return max(0, mapped - int(_stored(known, MAPPED)[1] or 0))


def _process_notes(memory: ContextMemory) -> list[str]:
    if not memory.rss:
        return []
    return [
        f"The whole process had up to {shown(memory.rss, 'bytes')} resident. This includes "
        "the program's own memory, but of mapped and reserved memory only pages that were used."
    ]


def _title(memory: ContextMemory) -> str:
    if not memory.contexts:
        return "Memory"
    numbers = ", ".join(map(str, memory.contexts[:8])) + (", …" if len(memory.contexts) > 8 else "")
    return f"Memory of context{'s' * (len(memory.contexts) > 1)} {numbers}"


def _keys(memory: ContextMemory) -> list[tuple[Kind, str]]:
    """Kinds and buffers of both sides, in order."""
    keys: dict[tuple[Kind, str], None] = {}
    for kind in ("weights", "cache", "compute"):
        for side in (memory.predicted, memory.measured):
            keys |= {(u.kind, u.buffer): None for u in side.uses if u.kind == kind} if side else {}
    return list(keys)


def _difference(predicted: int | None, measured: int | None) -> int | None:
    return None if predicted is None or measured is None else measured - predicted


def _stored(known: MemoryBreakdown, buffer: str) -> list[Cell]:
    """The number of weights in a buffer, and their bytes in the file."""
    placed = [p.n_bytes for p in known.placements if p.buffer == buffer]
    return [len(placed), sum(placed)]


def _words(kind: Kind, buffer: str) -> str:
    if kind != "weights":
        return _WORDS[kind]
    if buffer == MAPPED:
        return "weights, mapped"
    if buffer == PLAIN:
        return "weights, read"
    return f"weights, {'repacked' if 'REPACK' in buffer or 'AMX' in buffer else 'copied'}"


def recorded_memory(session: Session) -> dict[int, list[ContextMemory]]:
    """The memory of each model's contexts, by model; equal contexts are combined."""
    events: dict[int, list[Memory]] = defaultdict(list)
    for event in session.memory:
        events[event.ctx].append(event)
    rss = max((event.rss for event in session.memory), default=0)
    found: dict[int, dict[tuple[object, ...], ContextMemory]] = defaultdict(dict)
    for ctx, of_context in events.items():
        context = session.contexts[ctx]
        tensors = session.tensors_of.get(context.model, [])
        first, last = (read_breakdown(context, of_context[i].buffers, tensors) for i in (0, -1))
        key = last.settings, tuple(first.uses), tuple(last.uses)
        memory = found[context.model].setdefault(key, ContextMemory(None, last, first, [], rss))
        memory.contexts.append(ctx)
    return {model: list(of_model.values()) for model, of_model in found.items()}
