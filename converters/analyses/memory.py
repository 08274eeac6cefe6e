"""The memory of a model and its contexts: the size of each tensor, predicted and measured memory,
and why the two differ.

Invariant: rows add up: the tensors of every group to the model, and the uses of memory to their
total. Every tensor is listed once, even if it is loaded twice. Every difference has an explanation.
Bytes are those of the file or of llama.cpp's buffers; shares are from 0 to 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.converters.analyses.tables import grouped, header, layer_order, without
from llamacpp_instr.log.schema import Model, is_of_machine
from llamacpp_instr.model.file import ModelFile, NamedTensor, load_model_file
from llamacpp_instr.model.types import INTERLEAVED
from llamacpp_instr.recording.memory.breakdown import (
    MAPPED,
    PLAIN,
    Kind,
    MemoryBreakdown,
    mapped_bytes,
    read_breakdown,
)
from llamacpp_instr.report.charts import Chart, bar_by_layer
from llamacpp_instr.report.report import Cell, Column, Figures, Report, shown

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session
    from llamacpp_instr.report.page import Figure


LARGEST = 20
"""tensors shown on a terminal"""
MANY_LAYERS = 12
"""layers, or kinds of layers, shown on a terminal"""
MANY_TYPES = 50
MANY_ROLES = 200
"""types and roles shown on a terminal: all that a model can have"""
MOST_LAYERS = 512
"""as in llama.cpp; a chart omits further layers"""
MOST_TYPES = 10
"""types in a chart; those with fewer bytes are omitted"""

_WORDS: dict[Kind, str] = {
    "weights": "weights",
    "cache": "KV cache, state",
    "compute": "compute buffers",
}


@dataclass(frozen=True)
class StoredTensor(NamedTensor):
    """A tensor in a file."""

    name: str
    type: str
    """`Q4_K`"""
    ne: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class StoredModel:
    name: str
    description: str
    """architecture and file type"""
    tensors: list[StoredTensor]
    file_size: int | None = None
    """bytes of all parts; None if the file was not seen"""
    span: int | None = None
    """bytes from each file's first tensor to the end of its last; None if it was not seen"""

    @cached_property
    def n_elements(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @cached_property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def by_layer(self) -> dict[int, list[StoredTensor]]:
        """The tensors of each layer; -1 for those without a layer."""
        return grouped(self.tensors, lambda tensor: tensor.layer)


def types_of(tensors: Iterable[StoredTensor]) -> list[str]:
    """Their storage types, ordered by bytes, the largest first."""
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        n_bytes[tensor.type] += tensor.n_bytes
    return [name for name, _ in n_bytes.most_common()]


def stored_in_file(model: ModelFile) -> StoredModel:
    """The model from the headers of its file."""
    tensors = [StoredTensor(w.name, w.type.name, w.ne, w.n_bytes) for w in model.weights]
    description = ", ".join(filter(None, (model.architecture, model.file_type)))
    span = mapped_bytes(model, model.by_name)
    return StoredModel(model.path.name, description, tensors, model.file_size, span)


def stored_in_log(session: Session, model: Model, file: ModelFile | None) -> StoredModel:
    """The model from a log's events; `file` is the model's file, if it still exists."""
    by_name = {
        event.name: StoredTensor(event.name, event.type.upper(), tuple(event.ne), event.bytes)
        for event in session.tensors_of.get(model.model, [])
    }
    name = model.path.replace("\\", "/").rpartition("/")[2]
    if file:
        return replace(stored_in_file(file), name=name, tensors=list(by_name.values()))
    description = ", ".join(filter(None, (model.arch, model.ftype)))
    return StoredModel(name, description, list(by_name.values()))


def recorded_file(session: Session, model: Model) -> ModelFile:
    """The model's file, at the path in the log, or beside the log.

    Raises `UsageError`, with the reason, if it does not exist or has other tensors.
    """
    file = load_model_file(_where(session, model))
    for tensor in session.tensors_of.get(model.model, []):
        weight = file.by_name.get(tensor.name)
        ne = [n for n in (weight.ne if weight else ()) if n > 1]
        same = weight and weight.type.name == tensor.type.upper() and weight.n_bytes == tensor.bytes
        if not same or ne != [n for n in tensor.ne if n > 1]:
            raise UsageError(
                f"{file.path} is no longer the model of the log: {tensor.name} differs"
            )
    return file


def _where(session: Session, model: Model) -> Path:
    path = Path(model.path)
    beside = Path(session.path).parent / path.name
    try:
        return beside if not path.exists() and beside.is_file() else path
    except (OSError, ValueError):
        return path  # no file can have this name: opening it reports that


# --- tables of sizes ---

_COST = header(("bits", "bits/weight"), ("fraction", "of F16", "of F32"))
_SUMS = header(("count", "tensors", "elements"), ("bytes", "bytes"), ("fraction", "share"), *_COST)


def compute_overview(model: StoredModel) -> Report:
    """The model as a whole, in one row."""
    columns = header(("count", "Tensors", "elements"), ("bytes", "file", "weights"), *_COST)
    row: list[Cell] = [len(model.tensors), model.n_elements, model.file_size, model.n_bytes]
    title = f"{model.name}: {model.description}" if model.description else model.name
    cost = _cost(model.n_elements, model.n_bytes)
    return Report(title, columns, [row + cost], key="model")


def compute_groups(model: StoredModel) -> list[Report]:
    """By storage type, ordered by bytes; by the tensors' role in a layer, in the order of the file;
    by layer, with tensors without a layer last."""
    of_type = grouped(model.tensors, lambda tensor: tensor.type)
    types = [[name, *_sums(model, of_type[name])] for name in types_of(model.tensors)]
    of_role = grouped(model.tensors, lambda tensor: tensor.role)
    in_order = sorted(model.by_layer.items(), key=lambda of: layer_order(of[0]))
    roles, layers = (
        [[key, ", ".join(types_of(of)), *_sums(model, of)] for key, of in groups]
        for groups in (of_role.items(), in_order)
    )
    return [
        Report("Types", header("Type", *_SUMS), types),
        Report("Roles", header("Role", "types", *_SUMS), roles),
        Report("Layers", header(("layer", "Layer"), "types", *_SUMS), layers),
    ]


def compute_tensors(model: StoredModel, breakdown: MemoryBreakdown | None) -> Report:
    """Every tensor, in the order of the file, with its buffers in `breakdown`."""
    buffers = breakdown.buffers_of() if breakdown else {}
    rows: list[list[Cell]] = [
        [
            of.name, of.type, "x".join(map(str, of.ne)), of.n_elements, of.n_bytes,
            *_cost(of.n_elements, of.n_bytes), ", ".join(buffers.get(of.name, ())) or None,
            of.layer, of.role,
        ]
        for of in model.tensors
    ]  # fmt: skip
    columns = header(
        "Tensor", "type", "shape", ("count", "elements"), ("bytes", "bytes"), *_COST, "buffer",
        ("layer", "layer"), "role",
    )  # fmt: skip
    return Report("Tensors", columns, rows)


def _sums(model: StoredModel, tensors: Sequence[StoredTensor]) -> list[Cell]:
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    n_elements = sum(tensor.n_elements for tensor in tensors)
    share = n_bytes / model.n_bytes if model.n_bytes else None
    return [len(tensors), n_elements, n_bytes, share, *_cost(n_elements, n_bytes)]


def _cost(n_elements: int, n_bytes: int) -> list[Cell]:
    """Bits per weight, and the size as a share of F16 and F32."""
    if not n_elements:
        return [None, None, None]
    return [8 * n_bytes / n_elements, n_bytes / (2 * n_elements), n_bytes / (4 * n_elements)]


# --- what is known, and the reports ---


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
    adapters: int = 0
    """bytes of its LoRA adapters, each once; llama.cpp's breakdown lacks them"""
    room: int | None = None
    """bytes of memory into which it must fit; None for no verdict"""
    advice: str = ""
    """for a device that lacks memory: a sentence"""
    notes: list[str] = field(default_factory=list)
    """reasons for missing figures"""

    @property
    def known(self) -> MemoryBreakdown | None:
        return self.measured or self.predicted


def recorded_memory(session: Session) -> dict[int, list[ContextMemory]]:
    """The memory of each model's contexts, by model; equal contexts are combined."""
    rss = max((event.rss for event in session.memory), default=0)
    found: dict[int, dict[tuple[object, ...], ContextMemory]] = defaultdict(dict)
    for ctx, events in grouped(session.memory, lambda event: event.ctx).items():
        context = session.contexts[ctx]
        tensors = session.tensors_of.get(context.model, [])
        first, last = (
            read_breakdown(context, events[i].buffers, tensors, events[i].devices) for i in (0, -1)
        )
        changes = (event.adapters for event in session.adapters if event.ctx == ctx)
        used = {(of.file, of.name): of.bytes for change in changes for of in change}
        adapters = sum(used.values())
        key = last.settings, tuple(first.uses), tuple(last.uses), adapters
        known = ContextMemory(None, last, first, [], rss, adapters)
        memory = found[context.model].setdefault(key, known)
        memory.contexts.append(ctx)
    return {model: list(of_model.values()) for model, of_model in found.items()}


def compression_reports(model: StoredModel, contexts: Sequence[ContextMemory]) -> list[Report]:
    """All reports about one model: its sizes, its memory (one section for each of `contexts`), its
    tensors by type, role and layer, and each tensor with its buffers, measured if these are known,
    otherwise predicted. Sizes are in bytes; shares are from 0 to 1.
    """
    return [
        compute_overview(model),
        *(report for memory in contexts for report in memory_reports(model, memory)),
        *compute_groups(model),
        compute_tensors(model, next((of.known for of in contexts if of.known), None)),
    ]


def joined_tensors(models: Sequence[Sequence[Report]]) -> Report:
    """Every tensor of the models that these reports are about, as one table."""
    first = models[0][-1]
    if len(models) == 1:
        return first
    rows = [[*row, reports[0].title] for reports in models for row in reports[-1].rows]
    return replace(first, columns=[*first.columns, Column("model")], rows=rows)


def shortened(reports: Sequence[Report]) -> list[Report]:
    """The reports of one model, shortened for a terminal: fewer columns, only the largest tensors,
    and each kind of layer once if there are many layers."""
    overview, *memory, types, roles, layers, tensors = reports
    tensors = without(tensors, "elements", "of F16", "of F32", "layer", "role")
    if len(tensors.rows) > LARGEST:
        notes = ["A file (-o) has all tensors.", *tensors.notes]
        tensors = replace(tensors, title="Largest tensors", notes=notes, most=LARGEST)
    return [
        overview,
        *(without(report, "tensors") for report in memory),
        replace(without(types, "elements", "of F32"), most=MANY_TYPES),
        replace(without(roles, "tensors", "elements", "of F32"), most=MANY_ROLES),
        replace(without(layers, "elements", "of F32"), most=MANY_LAYERS + 1),
        tensors,
    ]


# --- the memory of a context ---


def memory_reports(model: StoredModel, memory: ContextMemory) -> Iterator[Report]:
    """The memory of a context by kind and buffer; then by device, if there are any."""
    yield memory_report(model, memory)
    if memory.known is not None and memory.known.devices:
        yield devices_report(memory, memory.known)


def devices_report(memory: ContextMemory, known: MemoryBreakdown) -> Report:
    """A row for each device: what a context holds there, or would, and the memory of the device."""
    rows: list[list[Cell]] = []
    for device in known.devices:
        uses = [use for use in known.uses if use.device == device.device]
        held = [sum(use.n_bytes for use in uses if use.kind == kind) for kind in _WORDS]
        rows.append([device.device, *held, sum(held), device.free, device.total])
    notes = []
    if memory.measured is None:
        for device, needed in known.too_large():
            sizes = f"{shown(needed, 'bytes')}, {shown(device.free, 'bytes')} are free"
            notes.append(f"Does not fit into {device.device}: {sizes}.{memory.advice}")
        when = "reports now"
    else:
        when = "reported while the context existed"
    notes.append(f"Free is what the driver {when}; some drivers report all memory as free.")
    columns = header(
        "Device", *(("bytes", word) for word in (*_WORDS.values(), "in all", "free", "memory"))
    )
    return Report("Devices", columns, rows, notes, key="devices")


def memory_report(model: StoredModel, memory: ContextMemory) -> Report:
    """A row for each kind of memory and each buffer, and their sum."""
    columns = header(
        "Memory", "buffer", ("count", "tensors"),
        ("bytes", "in file", "predicted", "measured", "difference"),
    )  # fmt: skip
    known = memory.known
    if known is None:
        row: list[Cell] = ["weights, mapped", MAPPED, len(model.tensors), model.n_bytes]
        return Report("Memory", columns, [[*row, model.span, None, None]], memory.notes)
    sides = memory.predicted, memory.measured
    rows: list[list[Cell]] = []
    for kind in _WORDS:
        uses = (use for side in sides if side for use in side.uses)
        for buffer in dict.fromkeys(use.buffer for use in uses if use.kind == kind):
            stored = _stored(known, buffer) if kind == "weights" else (None, None)
            sizes = [of.of(kind, buffer) if of else None for of in sides]
            rows.append([_words(kind, buffer), buffer, *stored, *sizes, _difference(*sizes)])
    total = [of.n_bytes if of else None for of in sides]
    rows.append(["total", None, None, None, *total, _difference(*total)])
    notes = [*_verdict(known, memory.room), _settings_note(known), *_mapping_notes(known)]
    notes += explain_difference(memory)
    if memory.adapters:
        size = shown(memory.adapters, "bytes")
        notes.append(f"LoRA adapters took another {size}, which llama.cpp does not count.")
    if memory.rss:
        notes.append(
            f"The whole process had up to {shown(memory.rss, 'bytes')} resident. This includes "
            "the program's own memory, but only the used pages of mapped and reserved memory."
        )
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
        "adapters": (memory.adapters or None, "bytes"),
    }
    title = "Memory"
    if of_contexts := memory.contexts:
        numbers = ", ".join(map(str, of_contexts[:8])) + ", …" * (len(of_contexts) > 8)
        title += f" of context{'s' * (len(of_contexts) > 1)} {numbers}"
    return Report(title, columns, rows, notes, figures=figures, key="memory")


def explain_difference(memory: ContextMemory) -> list[str]:
    """Why the measurement differs from the prediction, or that it does not."""
    predicted, measured = memory.predicted, memory.measured
    if predicted is None or measured is None:
        return []
    if predicted.uses == measured.uses:
        return ["Predicted for the settings of the log. The measurement matches to the byte."]
    notes = ["Predicted for the settings of the log."]
    here = predicted.buffers_of()
    moved = [
        f"{name} ({', '.join(places)}, not {', '.join(here[name])})"
        for name, places in measured.buffers_of().items()
        if name in here and set(places) != set(here[name])
    ]
    if moved:
        notes.append(
            f"In buffers other than this library would use: {counted(len(moved), 'tensor')}, "
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
    now = measured.of_kind("compute")
    at_first = memory.at_first.of_kind("compute") if memory.at_first else now
    if predicted.of_kind("compute") == now:
        return notes
    if at_first != now:
        notes.append(
            f"The compute buffers grew from {shown(at_first, 'bytes')} to {shown(now, 'bytes')} "
            "while the session ran: a graph needed more than llama.cpp had reserved."
        )
    else:
        notes.append(
            "The compute buffers differ although batches and flash attention are the same: the "
            "program set an option that the log does not record, such as the number of outputs in "
            "a batch, or another build made different graphs."
        )
    return notes


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


def _verdict(known: MemoryBreakdown, room: int | None) -> Iterator[str]:
    """Whether it fits: what stays in use, of buffers in the machine's own memory."""
    if room is None:
        return
    whole = sum(use.n_bytes for use in known.uses if is_of_machine(use.buffer))
    dropped = _between(known)
    in_use = whole - dropped
    fits = "Fits" if in_use <= room else "Does not fit"
    sizes = f"{shown(in_use, 'bytes')} of {shown(whole, 'bytes')}"
    yield f"{fits} into {shown(room, 'bytes')}: {sizes} stay in use."
    if room < in_use <= room + known.of("weights", MAPPED) - dropped:
        yield "Each token would read mapped weights from the file again."


def _mapping_notes(known: MemoryBreakdown) -> Iterator[str]:
    if (between := _between(known)) > 0:
        yield (
            "A file is mapped from the first to the last tensor that is read in place. "
            f"{shown(between, 'bytes')} of that are read only while the model is loaded. The "
            f"system can drop them: {shown(known.n_bytes - between, 'bytes')} stay in use."
        )
    if any(use.buffer.startswith(INTERLEAVED) for use in known.uses):
        yield (
            "Repacked tensors have their rows interleaved for this processor's kernels, in memory "
            "of their own."
        )
    if twice := [name for name, places in known.buffers_of().items() if len(places) > 1]:
        yield f"Stored twice, for two uses: {first_names(twice)}."


def _between(known: MemoryBreakdown) -> int:
    """Mapped bytes of tensors that are not read in place."""
    return max(0, known.of("weights", MAPPED) - _stored(known, MAPPED)[1])


def _difference(predicted: int | None, measured: int | None) -> int | None:
    return None if predicted is None or measured is None else measured - predicted


def _stored(known: MemoryBreakdown, buffer: str) -> tuple[int, int]:
    """The number of weights in a buffer, and their bytes in the file."""
    placed = [p.n_bytes for p in known.placements if p.buffer == buffer]
    return len(placed), sum(placed)


def _words(kind: Kind, buffer: str) -> str:
    if kind != "weights":
        return _WORDS[kind]
    if buffer in (MAPPED, PLAIN):
        return "weights, mapped" if buffer == MAPPED else "weights, read"
    return f"weights, {'repacked' if buffer.startswith(INTERLEAVED) else 'copied'}"


# --- charts ---


def draw_memory(reports: Sequence[Report]) -> Iterator[Figure]:
    """Bars of each report of a context's memory: what was measured, else predicted, by kind."""
    # with numpy, which tables do not need
    from llamacpp_instr.report.plain_charts import Group, bars

    for report in reports:
        at = {column.name: i for i, column in enumerate(report.columns)}
        if not report.title.startswith("Memory") or "measured" not in at:
            continue
        rows = [row for row in report.rows if row[0] != "total"]
        for what in ("measured", "predicted"):
            values = [value for row in rows if isinstance(value := row[at[what]], int)]
            if values and len(values) == len(rows):
                names = [f"{row[0]}, {row[1]}" for row in rows]
                yield bars(f"{report.title} by kind", names, [Group(what, values, "bytes")])
                break


def chart_bits_by_layer(tensors: Sequence[StoredTensor]) -> Chart:
    """Bits per weight of every layer, stacked by storage type. Tensors without a layer come
    last."""
    n_elements: Counter[int] = Counter()
    of_type: dict[str, Counter[int]] = defaultdict(Counter)
    for tensor in tensors:
        n_elements[tensor.layer] += tensor.n_elements
        of_type[tensor.type][tensor.layer] += tensor.n_bytes
    layers = sorted(n_elements, key=layer_order)[:MOST_LAYERS]
    types = sorted(of_type, key=lambda type_: -of_type[type_].total())[:MOST_TYPES]
    parts = {
        type_: [8 * of_type[type_][layer] / max(n_elements[layer], 1) for layer in layers]
        for type_ in types
    }
    names = [shown(layer, "layer") for layer in layers]
    return bar_by_layer("Bits per weight by layer", "bits per weight", names, parts)
