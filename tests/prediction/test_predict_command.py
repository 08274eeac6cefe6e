"""`instr predict` of a real model: never-made types are those of a real quantization, and a wrong
input is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.prediction.probe.file import probe_json
from llamacpp_instr.prediction.recorded import Run, Shape, Subject, measure_kernels, record_subjects
from llamacpp_instr.prediction.steps import write_retyped
from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs, plan_memory
from tests.conftest import assert_refused
from tests.kit.in_process import instr_here, json_reports
from tests.kit.made_machine import made_machine
from tests.kit.native_kit import DEMO
from tests.kit.quantized_kit import quantized_demo

pytestmark = pytest.mark.native

MACHINE = Path(__file__).parent.parent / "fixtures" / "machine.json"


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_K_M", "Q4_0"])
def test_a_type_that_nobody_made_has_the_graph_and_the_memory_of_a_made_one(
    file_type: str, tmp_path: Path
) -> None:
    source, real = load_model_file(DEMO), load_model_file(quantized_demo(file_type))
    with Quantizer(source, QuantizeOptions()) as quantizer:
        made = write_retyped(source, quantizer.plan(file_type), tmp_path)
    options = ContextOptions(ctx=256)
    assert plan_memory(made, options).uses == plan_memory(real, options).uses
    graphs = [dry_graphs(of, options, [UbatchShape(1, 40)])[0] for of in (made, real)]
    assert graphs[0].nodes == graphs[1].nodes
    assert graphs[0].leafs == graphs[1].leafs
    assert made.path.stat().st_blocks * 512 < real.path.stat().st_size / 10


def test_the_parts_add_up_and_types_and_threads_have_rows() -> None:
    words = ("--machine", MACHINE, "--types", "F16,Q8_0", "--batch", 8, "--ctx", 40)
    tables = json_reports("predict", "demo", *words)
    overview = tables[0]["rows"]
    assert [(row["type"], row["threads"]) for row in overview] == [
        ("F16", 1), ("F16", 2), ("Q8_0", 1), ("Q8_0", 2),
    ]  # fmt: skip
    for i, of in enumerate(("prefill", "decode")):
        for table in tables[1 + 3 * i : 4 + 3 * i]:
            total = sum(row["time"] for row in table["rows"])
            assert total == pytest.approx(overview[0][of] - 20_000), table["title"]
    assert all(row["at least"] < row["tokens"] < row["at most"] for row in overview)


def test_energy_is_shown_if_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(probe_json(made_machine((1,), watts=50.0)))
    tables = json_reports("predict", "demo", "--machine", path, "--batch", 8, "--ctx", 40)
    (row,) = tables[0]["rows"]
    assert row["joules per token"] == pytest.approx(50 * row["decode"] / 1e9)
    assert "RAPL" not in str(tables)


def test_without_energy_a_note_says_why() -> None:
    done = instr_here("predict", "demo", "--machine", MACHINE, "--batch", 8, "--ctx", 40)
    assert "found no counter (RAPL) that it may read" in " ".join(done.stdout.split())
    assert "joules" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--types", "Q9_9"], "unknown file type 'Q9_9'"),
        (["--threads", "two"], "--threads is 'two'"),
        (["--threads", "64000"], "64,000 threads are too many"),
        (["--ctx", "1000000"], "was trained on contexts of"),
        (["--batch", "60000"], "was trained on contexts of"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], message: str) -> None:
    assert_refused(instr_here("predict", "demo", "--machine", MACHINE, *words), message)


def test_costs_are_measured_for_what_a_subject_has(tmp_path: Path) -> None:
    subject = Subject("tiny", Shape(256, 256, 4, 2, 64), ["F16", "Q8_0"], [Run(1, 6), Run(8, 4)])
    (recorded,) = record_subjects(tmp_path, [1], [subject])
    assert recorded.log.is_file()
    model = measure_kernels([1], lambda _done, _total: None, [subject])
    assert model.threads == [1]
    assert {(of.type, of.tokens) for of in model.products} >= {
        ("F16", 1), ("F16", 8), ("Q8_0", 1), ("Q8_0", 8),
    }  # fmt: skip
    assert {"ADD", "ADD, one token", "RMS_NORM+MUL", "FLASH_ATTN_EXT 64 short alone"} <= {
        of.op for of in model.others
    }
