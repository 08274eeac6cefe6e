"""The tables of `instr memory`, for models and contexts whose bytes are written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from llamacpp_instr.converters.analyses.memory import (
    LARGEST,
    MANY_LAYERS,
    MOST_LAYERS,
    MOST_TYPES,
    ContextMemory,
    StoredModel,
    StoredTensor,
    chart_bits_by_layer,
    compression_reports,
    explain_difference,
    joined_tensors,
    memory_report,
    recorded_memory,
    shortened,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.recording.memory.breakdown import (
    ContextSettings,
    MemoryBreakdown,
    MemoryUse,
    Placement,
    read_breakdown,
)
from tests.kit.reports import rows, session_of
from tests.kit.sketched_log import Sketch

MIB = 1 << 20
TENSORS = [
    StoredTensor("token_embd.weight", "F16", (8, 4), 64),
    StoredTensor("blk.0.ffn_up.weight", "Q8_0", (32, 2), 68),
    StoredTensor("blk.1.ffn_up.weight", "Q4_0", (32, 2), 36),
    StoredTensor("blk.1.ffn_up.bias", "F32", (2,), 8),
]
MODEL = StoredModel("m.gguf", "llama, Q8_0", TENSORS, 500, 200)
SETTINGS = ContextSettings(
    n_ctx=512, n_batch=2048, n_ubatch=64, n_seq_max=1, type_k="f16", type_v="q8_0",
    flash_attn=True, embeddings=False, kv_unified=False, swa_full=False, mmap=True,
)  # fmt: skip


def breakdown(
    *uses: tuple[str, str, int], placed: dict[str, str] | None = None, **settings: object
) -> MemoryBreakdown:
    placements = [Placement(name, buffer, MIB) for name, buffer in (placed or {}).items()]
    made = [MemoryUse(kind, buffer, n) for kind, buffer, n in uses]  # type: ignore[arg-type]
    return MemoryBreakdown(replace(SETTINGS, **settings), made, placements)  # type: ignore[arg-type]


PLACED = {"a": "CPU_Mapped", "b": "CPU_Mapped", "c": "CPU_REPACK"}
WHOLE = breakdown(
    ("weights", "CPU_Mapped", 5 * MIB), ("weights", "CPU_REPACK", MIB), ("cache", "CPU", 3 * MIB),
    ("compute", "CPU", 2 * MIB), placed=PLACED,
)  # fmt: skip


def test_sizes_by_type_role_layer_and_tensor() -> None:
    overview, types, roles, layers, tensors = compression_reports(MODEL, [])
    assert overview.title == "m.gguf: llama, Q8_0"
    assert overview.rows == [[4, 162, 500, 176, 8 * 176 / 162, 176 / 324, 176 / 648]]

    def sums(n: int, elements: int, n_bytes: int) -> list[float]:
        cost = [8 * n_bytes / elements, n_bytes / (2 * elements), n_bytes / (4 * elements)]
        return [n, elements, n_bytes, n_bytes / 176, *cost]

    assert types.rows == [
        ["Q8_0", *sums(1, 64, 68)], ["F16", *sums(1, 32, 64)], ["Q4_0", *sums(1, 64, 36)],
        ["F32", *sums(1, 2, 8)],
    ]  # fmt: skip
    assert roles.rows == [
        ["token_embd", "F16", *sums(1, 32, 64)], ["ffn_up", "Q8_0, Q4_0", *sums(2, 128, 104)],
        ["ffn_up.bias", "F32", *sums(1, 2, 8)],
    ]  # fmt: skip
    assert layers.rows == [
        [0, "Q8_0", *sums(1, 64, 68)], [1, "Q4_0, F32", *sums(2, 66, 44)],
        [-1, "F16", *sums(1, 32, 64)],
    ]  # fmt: skip
    assert [row[:5] for row in tensors.rows] == [
        ["token_embd.weight", "F16", "8x4", 32, 64],
        ["blk.0.ffn_up.weight", "Q8_0", "32x2", 64, 68],
        ["blk.1.ffn_up.weight", "Q4_0", "32x2", 64, 36], ["blk.1.ffn_up.bias", "F32", "2", 2, 8],
    ]  # fmt: skip
    assert [row[8:] for row in tensors.rows] == [
        [None, -1, "token_embd"], [None, 0, "ffn_up"], [None, 1, "ffn_up"], [None, 1, "ffn_up.bias"]
    ]  # fmt: skip
    nothing = StoredModel("v.gguf", "", [])
    assert compression_reports(nothing, [])[0].rows == [[0, 0, None, 0, None, None, None]]
    assert compression_reports(nothing, [])[0].title == "v.gguf"


def test_the_buffer_of_a_tensor_is_the_measured_one() -> None:
    name = "blk.0.ffn_up.weight"
    one, two = (breakdown(placed={name: buffer}) for buffer in ("CPU", "CPU_REPACK"))
    twice = MemoryBreakdown(SETTINGS, [], [*one.placements, *two.placements])
    for held, buffer in (
        ([ContextMemory(one)], "CPU"), ([ContextMemory(one, two)], "CPU_REPACK"),
        ([ContextMemory(), ContextMemory(two)], "CPU_REPACK"),
        ([ContextMemory(twice)], "CPU, CPU_REPACK"),
    ):  # fmt: skip
        tensors = rows(compression_reports(MODEL, held)[-1])
        assert [row["buffer"] for row in tensors] == [None, buffer, None, None]


def test_a_terminal_gets_the_largest() -> None:
    many = StoredModel("m", "", [replace(TENSORS[1], name=f"t{i}") for i in range(LARGEST + 1)])
    few = replace(many, tensors=many.tensors[1:])
    for model, title in ((many, "Largest tensors"), (few, "Tensors")):
        reports = shortened(compression_reports(model, [ContextMemory(WHOLE)]))
        assert (reports[-1].title, reports[-1].most == LARGEST) == (title, model is many)
        assert [column.name for column in reports[-1].columns] == [
            "Tensor", "type", "shape", "bytes", "bits/weight", "buffer"
        ]  # fmt: skip
        assert "tensors" not in [column.name for column in reports[1].columns]
        assert reports[-2].most == MANY_LAYERS + 1
    both = joined_tensors([compression_reports(MODEL, [])] * 2)
    assert len(both.rows) == 8
    assert {row[-1] for row in both.rows} == {"m.gguf: llama, Q8_0"}
    assert len(joined_tensors([compression_reports(MODEL, [])]).rows) == 4


def test_a_row_for_each_buffer_and_their_sum() -> None:
    measured = replace(WHOLE, uses=[*WHOLE.uses[:3], MemoryUse("compute", "CPU", 4 * MIB),
                                    MemoryUse("compute", "GPU", 7)])  # fmt: skip
    report = memory_report(MODEL, ContextMemory(WHOLE, measured, contexts=[0, 3], rss=9 * MIB))
    assert report.title == "Memory of contexts 0, 3"
    assert report.rows == [
        ["weights, mapped", "CPU_Mapped", 2, 2 * MIB, 5 * MIB, 5 * MIB, 0],
        ["weights, repacked", "CPU_REPACK", 1, MIB, MIB, MIB, 0],
        ["KV cache, state", "CPU", None, None, 3 * MIB, 3 * MIB, 0],
        ["compute buffers", "CPU", None, None, 2 * MIB, 4 * MIB, 2 * MIB],
        ["compute buffers", "GPU", None, None, 0, 7, 7],
        ["total", None, None, None, 11 * MIB, 13 * MIB + 7, 2 * MIB + 7],
    ]
    assert [figure[0] for figure in report.figures.values()] == [
        512, 1, 2048, 64, 3 * MIB, 10 * MIB + 7, None, 9 * MIB, None
    ]  # fmt: skip
    alone = memory_report(MODEL, ContextMemory(WHOLE))
    assert alone.title == "Memory"
    assert [row[4:] for row in alone.rows] == [
        [n * MIB, None, None] for n in (5, 1, 3, 2, 11)
    ]  # fmt: skip
    numbers = ContextMemory(None, WHOLE, contexts=list(range(9)))
    assert memory_report(MODEL, numbers).title == "Memory of contexts 0, 1, 2, 3, 4, 5, 6, 7, …"
    assert (
        memory_report(MODEL, ContextMemory(None, WHOLE, contexts=[2])).title
        == "Memory of context 2"
    )
    unknown = memory_report(MODEL, ContextMemory(notes=["no library"]))
    assert unknown.rows == [["weights, mapped", "CPU_Mapped", 4, 176, 200, None, None]]
    assert unknown.notes == ["no library"]
    plain = breakdown(("weights", "CPU", 5), ("weights", "AMX", 6), ("weights", "GPU", 7))
    assert [row[0] for row in memory_report(MODEL, ContextMemory(plain)).rows[:-1]] == [
        "weights, read", "weights, repacked", "weights, copied"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("room", "verdict", "again"),
    [
        (11 * MIB, "Fits into 11.0 MiB: 8.00 MiB of 11.0 MiB stay in use.", False),
        (8 * MIB, "Fits into 8.00 MiB: 8.00 MiB of 11.0 MiB stay in use.", False),
        (8 * MIB - 1, "Does not fit into 8.00 MiB: 8.00 MiB of 11.0 MiB stay in use.", True),
        (6 * MIB, "Does not fit into 6.00 MiB: 8.00 MiB of 11.0 MiB stay in use.", True),
        (6 * MIB - 1, "Does not fit into 6.00 MiB: 8.00 MiB of 11.0 MiB stay in use.", False),
    ],
)
def test_what_stays_in_use_fits_or_not(room: int, verdict: str, again: bool) -> None:
    """5 MiB are mapped: 3 are read only while loading, 2 can be read from the file again."""
    with_gpu = replace(WHOLE, uses=[*WHOLE.uses, MemoryUse("compute", "GPU", 99 * MIB)])
    for held in (WHOLE, with_gpu):
        notes = memory_report(MODEL, ContextMemory(held, room=room)).notes
        assert notes[0] == verdict
        assert ("Each token would read" in notes[1]) == again


def test_notes_say_for_what_it_holds() -> None:
    notes = memory_report(MODEL, ContextMemory(WHOLE, rss=9 * MIB)).notes
    settings, mapping, repacked, process = notes
    assert settings == (
        "For 512 tokens, batches of 2,048 computed 64 at a time, f16 keys and q8_0 values in the"
        " cache, flash attention on, the file mapped."
    )
    assert "3.00 MiB of that are read only" in mapping
    assert "8.00 MiB stay in use" in mapping
    assert repacked.startswith("Repacked tensors have")
    assert process.startswith("The whole process had up to 9.00 MiB resident.")
    other = breakdown(
        ("weights", "CPU", 5), n_seq_max=4, kv_unified=True, embeddings=True, swa_full=True,
        flash_attn=False, mmap=False, placed={"a": "CPU"},
    )  # fmt: skip
    assert memory_report(MODEL, ContextMemory(other)).notes == [
        "For 512 tokens of 4 sequences sharing one cache, batches of 2,048 computed 64 at a time,"
        " flash attention off, embeddings, the whole context kept for sliding windows,"
        " the file read, not mapped."
    ]
    each = replace(other, settings=replace(other.settings, kv_unified=False))
    assert "4 sequences with a cache each" in memory_report(MODEL, ContextMemory(each)).notes[0]
    twice = MemoryBreakdown(
        SETTINGS, [MemoryUse("weights", "CPU", 2)],
        [Placement("a", "CPU", 1), Placement("a", "GPU", 1), Placement("b", "CPU", 1)],
    )  # fmt: skip
    assert memory_report(MODEL, ContextMemory(twice)).notes[-1] == "Stored twice, for two uses: a."


def changed(at: int, n_bytes: int, of: MemoryBreakdown = WHOLE) -> MemoryBreakdown:
    uses = list(of.uses)
    uses[at] = replace(uses[at], n_bytes=n_bytes)
    return replace(of, uses=uses)


def test_every_difference_has_a_reason() -> None:
    first = "Predicted for the settings of the log."
    assert explain_difference(ContextMemory(WHOLE)) == []
    assert explain_difference(ContextMemory(WHOLE, WHOLE)) == [
        f"{first} The measurement matches to the byte."
    ]
    reason, weights = explain_difference(ContextMemory(WHOLE, changed(0, 6 * MIB)))
    assert (reason, weights.partition(";")[0]) == (first, "The weights were in the same buffers")
    _, cache = explain_difference(ContextMemory(WHOLE, changed(2, 4 * MIB)))
    assert cache.startswith("The cache differs although")
    _, compute = explain_difference(ContextMemory(WHOLE, changed(3, MIB)))
    assert compute.startswith("The compute buffers differ although")
    grown = ContextMemory(WHOLE, changed(3, 4 * MIB), at_first=WHOLE)
    _, grew = explain_difference(grown)
    assert grew.startswith("The compute buffers grew from 2.00 MiB to 4.00 MiB while")
    same = ContextMemory(WHOLE, changed(3, 4 * MIB), at_first=changed(3, 4 * MIB))
    assert explain_difference(same)[1] == compute
    placements = [Placement("a", "CPU_Mapped", MIB), Placement("b", "CPU_REPACK", MIB),
                  Placement("c", "CPU_REPACK", MIB), Placement("new", "CPU", 1)]  # fmt: skip
    _, moved = explain_difference(
        ContextMemory(WHOLE, replace(changed(0, 4 * MIB), placements=placements))
    )
    assert moved.startswith(
        "In buffers other than this library would use: 1 tensor, first b (CPU_REPACK, not"
        " CPU_Mapped)."
    )


def test_equal_contexts_of_a_log_are_one(tmp_path: Path) -> None:
    """The second of three contexts is like the first, the third is larger."""
    events = list(Sketch().events)
    (context,) = (event for event in events if isinstance(event, s.Context))
    for ctx in (1, 2):
        more = {f.encode_name: getattr(context, f.name) for f in _fields(context)}
        events.append(s.Context(**{**more, "ctx": ctx}))
    for ctx, rss, uses in (
        (0, 50, (10, 20, 30)), (1, 70, (10, 20, 30)), (2, 60, (10, 20, 31)), (0, 0, (10, 20, 40)),
        (1, 5, (10, 20, 40)),
    ):  # fmt: skip
        model, cache, compute = uses
        use = s.BufferUse(buffer="CPU", model=model, context=cache, compute=compute)
        events.append(s.Memory(t=1, ctx=ctx, buffers=[use], rss=rss))
    session = session_of(tmp_path / "a.log", events)
    ((one, other),) = recorded_memory(session).values()
    assert (one.contexts, other.contexts) == ([0, 1], [2])
    assert one.rss == other.rss == 70
    for held, first, last in ((one, 30, 40), (other, 31, 31)):
        assert held.at_first is not None
        assert held.measured is not None
        assert (held.at_first.of_kind("compute"), held.measured.of_kind("compute")) == (first, last)
        assert (
            held.measured.uses
            == read_breakdown(
                context, [s.BufferUse(buffer="CPU", model=10, context=20, compute=last)], []
            ).uses
        )


def _fields(event: s.Event) -> tuple[object, ...]:
    import msgspec

    return msgspec.structs.fields(event)


def stacked(tensors: list[StoredTensor]) -> list[list[float]]:
    """The heights of the bars of each type, a bar for each layer."""
    figure = Figure()
    chart_bits_by_layer(tensors).draw(figure)
    (axes,) = figure.axes
    return [[bar.get_height() for bar in container] for container in axes.containers]


def test_the_bars_of_a_layer_add_up_to_its_bits() -> None:
    """The type with the most bytes is the lowest; what has no layer is last."""
    assert stacked(TENSORS) == [
        pytest.approx(of) for of in (
            [8 * 68 / 64, 0, 0], [0, 0, 8 * 64 / 32], [0, 8 * 36 / 66, 0], [0, 8 * 8 / 66, 0]
        )
    ]  # fmt: skip
    deep = [StoredTensor(f"blk.{i}.w", "F32", (8,), 32) for i in range(513)]
    assert len(stacked(deep)[0]) == MOST_LAYERS == 512
    mixed = [StoredTensor("blk.0.w", f"T{i}", (8,), 8 + i) for i in range(11)]
    heights = [height for (height,) in stacked(mixed)]
    # of 11 types, 8 elements each
    assert heights == pytest.approx([8 * (18 - i) / 88 for i in range(10)])
    assert MOST_TYPES == 10
