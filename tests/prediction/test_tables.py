"""The tables of `instr predict`, samples of recordings, and models that are only planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.probe import busy_note, predict_reports, probe_reports
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, TensorPlan
from llamacpp_instr.lab.weights.measure import LeafWeights
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.schema import Leaf, Ops, StepEnd
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction import steps
from llamacpp_instr.prediction.fit import samples
from llamacpp_instr.prediction.model import Case, Predicted, Step, predict_kernels
from llamacpp_instr.prediction.probe.file import Bandwidth, Barrier, Kernel
from llamacpp_instr.prediction.steps import (
    MOST_TOKENS,
    PlannedStep,
    planned_steps,
    trained_tokens,
    write_retyped,
)
from llamacpp_instr.recording.memory.plan import UbatchShape, window
from llamacpp_instr.report.report import Cell
from tests.kit.block_models import random_rows, write_blocks
from tests.kit.gguf_files import save
from tests.kit.made_machine import made_machine
from tests.kit.made_probe import probe_of
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch
from tests.prediction.test_model import product_graph

MACHINE = made_machine((1, 2), watts=50.0)


def step(tokens: int, ns: list[float], spread: list[float], source: list[str]) -> Step:
    """A product in layer 0 and an ADD, of these times; 20 µs outside of kernels."""
    graph = product_graph(8, 4, tokens)
    predicted = Predicted(
        np.array(ns), np.array(spread), source, ["IQ1_S"] * (tokens > 1), 20_000.0, 0.1
    )
    return Step(tokens, predicted, plan_timeline(graph, cpu_plan(graph)))


def case(threads: int, watts: float | None) -> Case:
    prefill = step(64, [900_000.0, 80_000.0], [0.1, 0.2], ["F16", "ADD"])
    decode = step(1, [20_000.0, 60_000.0], [0.1, 0.2], ["F16", "ADD, one token"])
    return Case("F16", threads, prefill, decode, 12345, watts)


def test_a_row_for_each_case() -> None:
    """The decode takes 100 µs; its errors are 2, 12 and 10 µs, independent of each other."""
    first, *_ = predict_reports([case(1, 50.0), case(2, None)], 512, MACHINE, [])
    assert first.title == "Predicted: a prefill of 64 tokens, a decode after 512"
    one, two = first.rows
    error = (2_000**2 + 12_000**2 + 10_000**2) ** 0.5
    of_prefill = (90_000**2 + 16_000**2 + 100_000**2) ** 0.5
    factor = np.exp(1.96 * error / 100_000)
    expected: list[Cell] = [
        "F16", 1, 1_000_000, of_prefill / 1e6, 64_000, 100_000, error / 1e5, 10_000,
        10_000 / factor, 10_000 * factor, 12345, 50 * 1e-4,
    ]  # fmt: skip
    for found, wanted in zip(one, expected, strict=True):
        assert found == (wanted if isinstance(wanted, str) else pytest.approx(wanted))
    assert two[1:3] == [2, 1_000_000]
    assert two[-1] is None
    assert "Not measured, so predicted from others: IQ1_S." in first.notes
    assert not any("Energy" in note for note in first.notes)
    without, *_ = predict_reports([case(1, None)], 1512, MACHINE, [])
    assert len(without.columns) == len(without.rows[0]) == len(first.columns) - 1
    assert without.title.endswith("a decode after 1,512")
    assert without.notes[-1].startswith("Energy is left out")


@pytest.mark.parametrize(
    ("measured", "here", "differ"),
    [
        ([], ["NEON"], ""),
        (["NEON", "DOTPROD"], ["DOTPROD", "NEON"], ""),
        (["NEON", "DOTPROD"], ["NEON", "DOTPROD", "MATMUL_INT8"], "MATMUL_INT8"),
        (["NEON", "SVE", "SVE_CNT=16"], ["NEON", "SVE", "SVE_CNT=32"], "SVE_CNT=16, SVE_CNT=32"),
        (["AVX2", "AVX512"], ["AVX2"], "AVX512"),
    ],
)
def test_a_processor_with_other_instruction_sets_is_mentioned(
    measured: list[str], here: list[str], differ: str
) -> None:
    machine = replace(MACHINE, features=measured)
    notes = predict_reports([case(1, None)], 512, machine, here)[0].notes
    found = [note for note in notes if note.startswith("The measured processor and this one")]
    assert len(found) == (differ != "")
    assert all(f"differ in {differ}:" in note for note in found)


def test_the_first_case_by_op_layer_and_block() -> None:
    _, *tables = predict_reports([case(1, None), case(2, None)], 512, MACHINE, [])
    titles = [f"By {by}: {phase}, F16, 1 thread" for phase in ("prefill", "decode")
              for by in ("op", "layer", "block")]  # fmt: skip
    assert [table.title for table in tables] == titles
    of_prefill, _, _, of_decode, layers, blocks = tables
    assert [(row[1], row[2], row[3]) for row in of_prefill.rows] == [
        (1, 900_000, 90 / 98), (1, 80_000, 8 / 98)
    ]  # fmt: skip
    # the largest first
    assert [row[2] for row in of_decode.rows] == [60_000, 20_000]
    assert [str(row[0]).split()[0] for row in of_decode.rows] == ["ADD", "MUL_MAT"]
    assert layers.rows == [[0, 2, 80_000, 1.0]]
    assert blocks.rows == [["feed-forward", 2, 80_000, 1.0]]


def test_a_planned_step_sees_its_tokens_and_those_before() -> None:
    graph = product_graph(1024, 1024, 8)
    planned = PlannedStep(UbatchShape(8, 300), graph, cpu_plan(graph))
    ubatch = planned.ubatch(2)
    (seen,) = ubatch.caches
    assert (ubatch.n_threads, ubatch.n_tokens, seen.used, seen.size) == (2, 8, 308, 512)
    found = planned.predict(MACHINE, 2)
    assert found.ns.tolist() == predict_kernels(graph, planned.plan, MACHINE, 2).ns.tolist()
    for tokens, past, cells in ((1, 0, 256), (1, 255, 256), (1, 256, 512), (256, 1, 512)):
        assert window(UbatchShape(tokens, past)) == cells


def test_steps_are_planned_in_the_graphs_that_llama_cpp_would_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = [product_graph(8, 4, tokens) for tokens in (8, 1)]
    shapes = [UbatchShape(8), UbatchShape(1, 300)]
    monkeypatch.setattr(steps, "dry_graphs", lambda *_: graphs)
    model: Any = SimpleNamespace(path=Path("m.gguf"))
    options = ContextOptions(threads=2)
    found = planned_steps(model, options, shapes)
    assert found == [
        PlannedStep(shape, graph, cpu_plan(graph))
        for shape, graph in zip(shapes, graphs, strict=True)
    ]
    graphs[1].splits[0].backend = "CUDA0"
    with pytest.raises(UsageError, match=r"m\.gguf: parts would run on CUDA0; only the CPU"):
        planned_steps(model, options, shapes)


def test_the_lengths_that_are_used_where_a_model_allows_them() -> None:
    assert (steps.DEFAULT_TOKENS, MOST_TOKENS) == (512, 65_536)


def test_the_length_that_a_model_was_trained_on(tmp_path: Path) -> None:
    for i, (trained, tokens) in enumerate(
        ((None, MOST_TOKENS), (0, MOST_TOKENS), (1, 1), (99, 99))
    ):
        writer = gguf.GGUFWriter(tmp_path / f"{i}.gguf", "llama")
        if trained is not None:
            writer.add_context_length(trained)
        save(writer)
        assert trained_tokens(load_model_file(tmp_path / f"{i}.gguf")) == tokens


# --- samples ---


def test_equal_computes_of_a_recording_are_one_sample(tmp_path: Path) -> None:
    """The median of those with as many tokens at nearby positions, without the first."""
    sketch = Sketch()
    sketch.step(9_000, 6, ops=([5_000, 100], [0, 0]))
    for i in range(40):
        sketch.step(1_000 + 10 * i, ops=([500 + i, 90], [0, 0]), threads=2)
    found = samples(session_of(tmp_path / "a.log", sketch.events))
    assert [(of.threads, of.tokens) for of in found] == [(1, 6), (2, 1), (2, 1)]
    prefill, near, far = found
    assert prefill.ns.tolist() == [5_000, 100]
    assert (prefill.step_ns, prefill.past) == (9_000, 0)
    # the decodes at positions 6 to 31 are the first 26, and those from 32 on are 14
    assert near.steps.tolist() == [1_000 + 10 * i for i in range(1, 26)]
    assert near.ns.tolist() == [500 + 1 + 12, 90]
    assert (near.step_ns, near.past) == (1_000 + 10 * 13, 6 + 13)
    assert far.steps.tolist() == [1_000 + 10 * i for i in range(27, 40)]
    assert far.ns.tolist() == [500 + 27 + 6, 90]
    kinds = [type(kernel).__name__ for kernel in near.features.kernels]
    assert kinds == ["Product", "Other"]


def test_the_kernels_of_a_sample_add_up_to_the_median_of_computes(tmp_path: Path) -> None:
    """One of three kernels is late in each compute: the sum of their medians has no late one."""
    sketch = Sketch()
    for late in (0, 0, 1, 0, 1):
        sketch.step(1_000, ops=([500 + 90 * late, 100 + 90 * (1 - late)], [0, 0]))
    (found,) = samples(session_of(tmp_path / "a.log", sketch.events))
    assert found.ns.tolist() == pytest.approx([500 * 690 / 600, 100 * 690 / 600])


def test_the_barrier_after_a_kernel_belongs_to_it(tmp_path: Path) -> None:
    sketch = Sketch()
    for _ in range(2):
        sketch.step(1_000, ops=([500, 90], [0, 0]))
    for event in sketch.events:
        if hasattr(event, "gap"):
            event.gap = [7, 11]
    (found,) = samples(session_of(tmp_path / "a.log", sketch.events))
    assert found.ns.tolist() == [511, 90]


def test_a_compute_whose_step_has_no_end_counts_with_those_at_the_beginning(
    tmp_path: Path,
) -> None:
    sketch = Sketch()
    for ns in (900, 500, 700):
        sketch.step(ns, ops=([ns - 100, 100], [0, 0]))
    del sketch.events[-1]
    (found,) = samples(session_of(tmp_path / "a.log", sketch.events))
    assert found.steps.tolist() == [500, 0]
    assert (found.step_ns, found.past) == (0, 1)
    assert found.ns.tolist() == [400, 100]
    alone = [event for event in sketch.events if not isinstance(event, StepEnd)]
    (found,) = samples(session_of(tmp_path / "b.log", alone))
    assert (found.step_ns, found.past) == (0, 0)


@pytest.mark.parametrize(("computes", "past"), [(2, 1), (4, 2), (5, 2), (6, 3)])
def test_the_past_of_a_sample_is_that_of_its_median(
    tmp_path: Path, computes: int, past: int
) -> None:
    """The first is left out; of an even number, the earlier one in the middle counts."""
    sketch = Sketch()
    for _ in range(computes):
        sketch.step(900, ops=([800, 100], [0, 0]))
    assert samples(session_of(tmp_path / "a.log", sketch.events))[0].past == past


def test_only_the_first_thread_and_a_compute_that_is_alone_counts(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.step(900, ops=([800, 100], [0, 0]), threads=2)
    *_, ops, end = sketch.events
    assert isinstance(ops, Ops)
    sketch.events[-1:] = [replace(ops, thread=1, dur=[5, 5]), end]
    (found,) = samples(session_of(tmp_path / "a.log", sketch.events))
    assert (found.ns.tolist(), found.threads, found.tokens) == ([800, 100], 2, 1)


# --- models that are only planned ---


def test_a_retyped_model_has_the_tensors_of_the_plan_and_no_data(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    data = {"a": ("Q8_0", random_rows("Q8_0", 3, 8)), "b": ("F32", np.ones((2, 7), np.float32))}
    source = load_model_file(write_blocks(tmp_path / "m.gguf", data))
    first, second = source.weights
    plan = QuantizationPlan(
        tmp_path / "m.gguf", 0, "Q4_K_M",
        [TensorPlan(first, BY_NAME["Q4_K"]), TensorPlan(second, second.type)], 0,
    )  # fmt: skip
    made = write_retyped(source, plan, tmp_path / "to")
    assert [(of.name, of.type.name, of.ne) for of in made.weights] == [
        ("a", "Q4_K", (256, 3)), ("b", "F32", (7, 2))
    ]  # fmt: skip
    assert made.metadata == source.metadata
    one, two = made.weights
    assert two.offset - one.offset == 448, "432 bytes, and up to a multiple of 32"
    assert made.path.stat().st_size == two.offset + 64
    assert not any(made.path.read_bytes()[one.offset :])
    assert made.path.stat().st_blocks * 512 <= 8192


def test_leafs_are_weights_of_the_file(tmp_path: Path) -> None:
    half = np.arange(12, dtype=np.float16).reshape(2, 6)
    blocks = random_rows("Q8_0", 2, 1)
    model = load_model_file(
        write_blocks(tmp_path / "m.gguf", {"half": ("F16", half), "q": ("Q8_0", blocks)})
    )
    weights = LeafWeights(model)
    leaf = Leaf(name="half", type="f16", ne=[6, 2, 1, 1], bytes=24)
    weights.check(leaf)
    found = np.concatenate(list(weights.pieces(leaf)))
    assert found.dtype == np.float16
    assert found.tolist() == half.ravel().tolist()
    quantized = Leaf(name="q", type="q8_0", ne=[32, 2], bytes=68)
    weights.check(quantized)
    values = np.concatenate([piece.ravel() for piece in weights.pieces(quantized)])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (scale * blocks[:, 2:].view(np.int8)).ravel()
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    for name, ne in (("half", [2, 6]), ("half", [6]), ("none", [6, 2])):
        with pytest.raises(UsageError, match=f"has no tensor '{name}' of this shape"):
            weights.check(Leaf(name=name, type="f16", ne=ne, bytes=24))


@pytest.mark.parametrize(
    ("type_", "data"),
    [
        ("F32", np.array([[0.5, -2, 3]], np.float32)),
        ("BF16", (np.array([[0.5, -2, 3]], np.float32).view(np.uint32) >> 16).astype(np.uint16)),
    ],
)
def test_leafs_of_other_types_than_f16_are_float32(
    type_: str, data: np.ndarray, tmp_path: Path
) -> None:
    """A dimension of 1 does not change a shape."""
    path = write_blocks(tmp_path / "m.gguf", {"one": (type_, data.view(np.uint8))})
    weights = LeafWeights(load_model_file(path))
    leaf = Leaf(name="one", type=type_.lower(), ne=[3, 1, 1, 1], bytes=data.nbytes)
    weights.check(leaf)
    weights.check(replace(leaf, ne=[1, 3]))
    (found,) = weights.pieces(leaf)
    assert (found.dtype, found.ravel().tolist()) == (np.float32, [0.5, -2, 3])


# --- what a probe measured ---


def test_a_probe_has_a_column_for_each_number_of_threads() -> None:
    probe = replace(
        probe_of("a CPU"),
        bandwidth=[Bandwidth(2, 100, 5.0), Bandwidth(1, 100, 3.0), Bandwidth(1, 200, 2.0)],
        kernels=[Kernel("F16", 1, 1, 7.0), Kernel("F16", 64, 2, 9.0)],
        barriers=[Barrier(2, 11.0)], cores=4, load=2.0, left_out=0,
    )  # fmt: skip
    memory, kernels, barriers = probe_reports(probe)
    assert [column.name for column in memory.columns] == ["working set", "1 thread", "2 threads"]
    assert memory.rows == [[100, 3.0, 5.0], [200, 2.0, None]]
    assert kernels.rows == [["F16, 1", 7.0, None], ["F16, 64", None, 9.0]]
    assert barriers.rows == [["time", 11.0]]
    assert memory.notes == ["Bytes read and written per second, on a CPU."]
    assert busy_note(probe) is None
    busy = replace(probe, load=2.01)
    assert str(busy_note(busy)).startswith("The machine was busy (load 2.01 on 4 CPUs)")
    assert probe_reports(busy)[0].notes[1] == busy_note(busy)
    assert str(busy_note(replace(busy, left_out=3))).startswith("3 figures were left out")
