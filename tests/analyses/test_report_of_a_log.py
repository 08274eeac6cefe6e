"""`instr memory LOG`: measured and predicted memory, and explanations of differences."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from llamacpp_instr.base.machine import machine_memory
from llamacpp_instr.converters.analyses.memory import (
    ContextMemory,
    StoredModel,
    compression_reports,
    memory_report,
    recorded_memory,
    stored_in_log,
)
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import captured
from llamacpp_instr.log import schema
from llamacpp_instr.recording.memory.breakdown import (
    ContextSettings,
    MemoryBreakdown,
    MemoryUse,
    Placement,
)
from llamacpp_instr.recording.session import record
from llamacpp_instr.report.report import shown
from tests.conftest import ROOT, Instr, assert_refused, read_events
from tests.kit.in_process import titled
from tests.kit.native_kit import random_model
from tests.kit.quantized_kit import quantized_demo
from tests.kit.report_kit import edited, memory_of, report, reported, without_library
from tests.kit.reports import column, session_of
from tests.kit.strategies import logs

pytestmark = pytest.mark.native

FIXTURE = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of the demo model in Q4_K_M, with a copy of the model beside the log."""
    directory = tmp_path_factory.mktemp("session")
    model = shutil.copy(quantized_demo("Q4_K_M"), directory / "tiny.gguf")
    args = ["-p", "Once", "-n", "4", "--ctx", "384", "--cache-type-k", "q8_0", "--threads", "2"]
    command = [sys.executable, "-m", "llamacpp_instr", "run", model, *args]
    subprocess.run(
        [*command, "--log", directory / "session.log"], cwd=ROOT, check=True, capture_output=True
    )
    return directory / "session.log"


def with_path(log: Path, path: str) -> Path:
    """The log, with another path of its model, beside it."""
    return edited(log, lambda event: event.update(path=path) if "arch" in event else None)


def test_what_was_measured_is_what_was_predicted(log: Path) -> None:
    memory = memory_of(reported(log))
    logged = read_events(log, "memory")[-1]["buffers"]
    assert sum(row["measured"] for row in memory["rows"][:-1]) == sum(
        use.get(kind, 0) for use in logged for kind in ("model", "context", "compute")
    )
    assert [row["difference"] for row in memory["rows"]] == [0] * len(memory["rows"])
    notes = " ".join(memory["notes"])
    assert "measurement matches to the byte" in notes
    assert "For 512 tokens" in notes, "the log's, in whole blocks of 256"
    assert "q8_0 keys and f16 values" in notes


def test_the_page_draws_what_was_measured(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "memory.html"
    report(log, "-o", page)
    bars = re.findall(r'<i style="width:([\d.]+)%', page.read_text())
    measured = [row["measured"] for row in memory_of(reported(log))["rows"][:-1]]
    assert [float(bar) for bar in bars] == pytest.approx(
        [100 * amount / max(measured) for amount in measured], abs=0.05
    )


def test_a_log_alone_is_enough(log: Path, tmp_path: Path) -> None:
    with_file, copy = reported(log), shutil.copy(log, tmp_path / "alone.log")
    alone = reported(with_path(copy, "gone.gguf"))
    assert [r["rows"] for r in alone[2:]] == [r["rows"] for r in with_file[2:]]
    memory = memory_of(alone)
    assert all(row["predicted"] is None for row in memory["rows"])
    assert [row["measured"] for row in memory["rows"]] == [
        row["measured"] for row in memory_of(with_file)["rows"]
    ]
    assert any("Nothing was predicted: gone.gguf does not exist" in n for n in memory["notes"])


def test_another_model_in_its_place_is_not_predicted(log: Path, tmp_path: Path) -> None:
    shutil.copy(log, tmp_path / "session.log")
    shutil.copy(quantized_demo("Q8_0"), tmp_path / "tiny.gguf")
    moved = with_path(tmp_path / "session.log", "/gone/tiny.gguf")
    notes = " ".join(memory_of(reported(moved))["notes"])
    assert "tiny.gguf is no longer the model of the log: " in notes


def test_the_model_is_found_beside_the_log(log: Path) -> None:
    moved = with_path(log, "/gone/tiny.gguf")
    assert "measurement matches to the byte" in " ".join(memory_of(reported(moved))["notes"])


def test_a_whole_cache_for_sliding_windows_is_recognized(tmp_path: Path) -> None:
    """Programs that keep the default of `swa_full` create it; llama.cpp's tools and ours do not."""
    path = random_model("gemma3-dense")
    with captured() as llama_log, record(tmp_path / "a.log", level="minimal"):  # noqa: SIM117
        with LoadedModel(path, llama_log) as model:
            params = model.api.llama_context_default_params()
            params.n_ctx = 4096
            model.api.llama_free(model.api.llama_init_from_model(model.handle, params))
    memory = memory_of(reported(tmp_path / "a.log"))
    assert "measurement matches to the byte" in " ".join(memory["notes"])
    small = memory_of(reported(path, "--ctx", 4096))
    assert small["rows"][-1]["predicted"] < memory["rows"][-1]["measured"]


def test_weights_in_other_buffers_are_named(log: Path) -> None:
    def elsewhere(event: dict[str, Any]) -> None:
        if event.get("buffer") == "CPU_REPACK":
            event["buffer"] = "AMX"
        for use in event.get("buffers", []) if event["event"] == "memory" else []:
            use["buffer"] = use["buffer"].replace("CPU_REPACK", "AMX")

    memory = memory_of(reported(edited(log, elsewhere)))
    notes = " ".join(memory["notes"])
    assert "In buffers other than this library would use: " in notes
    assert "blk.0." in notes
    assert {row["buffer"] for row in memory["rows"]} >= {"AMX", "CPU_REPACK"}


def test_a_compute_buffer_that_grew_is_explained(log: Path) -> None:
    events = read_events(log)
    (at,) = (i for i, event in enumerate(events) if event["event"] == "memory")
    later = json.loads(json.dumps(events[at]))
    for use in later["buffers"]:
        use["compute"] = use.get("compute", 0) * 2
    events.insert(at + 1, later)
    path = log.with_name("grown.log")
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    notes = " ".join(memory_of(reported(path))["notes"])
    assert "grew from" in notes
    assert "measurement matches to the byte" not in notes


def test_contexts_that_are_alike_are_one_section(tmp_path: Path) -> None:
    with captured() as llama_log, record(tmp_path / "a.log", level="minimal"):  # noqa: SIM117
        with LoadedModel(quantized_demo("Q8_0"), llama_log) as model:
            for ctx in (256, 512, 256):
                with ModelContext(model, ContextOptions(ctx=ctx)):
                    pass
    titles = [r["title"] for r in reported(tmp_path / "a.log") if r["title"].startswith("Memory")]
    assert titles == ["Memory of contexts 0, 2", "Memory of context 1"]


def test_an_old_log_of_another_machine() -> None:
    overview, memory, *_, tensors = reported(FIXTURE)
    assert overview["title"].startswith("demo")
    assert len(tensors["rows"]) == overview["rows"][0]["Tensors"] > 0
    assert memory["rows"][-1]["measured"] > 0


@settings(max_examples=30)
@given(events=logs())
def test_sums_of_any_log(events: list[schema.Event], tmp_path_factory: Any) -> None:
    session = session_of(tmp_path_factory.mktemp("logs") / "session.log", events)
    for model in session.models.values():
        stored = stored_in_log(session, model, None)
        helds = recorded_memory(session)[model.model]
        _, *held, types, roles, layers, tensors = compression_reports(stored, helds)
        assert len(held) == len(helds)
        for table in (types, roles, layers, tensors):
            assert sum(n_bytes or 0 for n_bytes in column(table, "bytes")) == stored.n_bytes


@pytest.mark.parametrize("source", ["demo", "log"])
def test_a_terminal_of_80_columns_has_room(source: str, log: Path) -> None:
    text = report(log if source == "log" else source)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Memory", "KV cache, state", "Types", "Roles", "Layers", "Largest tensors"):
        assert word in text


def test_names_are_no_markup_and_steer_no_terminal(log: Path) -> None:
    def rename(event: dict[str, Any]) -> None:
        if event.get("name") == "blk.0.ffn_up.weight":
            event["name"] = "<b>blk.0.[red]\x1b[31m"

    path = edited(log, rename)
    text = report(path)
    assert "\x1b" not in text
    assert r"<b>blk.0.[red]\x1b" in text.replace("\n", "")
    html = path.with_suffix(".html")
    report(path, "-o", html, "--force")
    assert "<b>" not in html.read_text()


def test_without_the_library_a_log_is_read_all_the_same(
    log: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "memory", log, "--json"],
        env=without_library(tmp_path, environment), cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    memory = memory_of(titled(json.loads(done.stdout)))
    assert memory["rows"][-1]["measured"] > 0
    assert any("Nothing was predicted" in n and "instr build" in n for n in memory["notes"])


def test_a_log_without_tensors_is_refused(log: Path, instr: Instr) -> None:
    first = log.read_text().splitlines()[0]
    path = log.with_name("empty.log")
    path.write_text(first + "\n")
    assert_refused(instr("memory", path), "empty.log", "tensors")


@pytest.mark.parametrize(
    ("room", "verdict", "slow"),
    [
        (776, "Fits into 740 MiB: ", False),
        (774, "Does not fit into 738 MiB: ", True),
        (475, "Does not fit into 453 MiB: ", True),
        (474, "Does not fit into 452 MiB: ", False),
    ],
)
def test_whether_it_fits_is_judged_by_what_stays_in_use(
    room: int, verdict: str, slow: bool
) -> None:
    """600 of 1,375 MB are mapped only to be repacked, and 300 are read in place."""
    settings = ContextSettings(
        512, 512, 512, 1, "f16", "f16",
        flash_attn=True, embeddings=False, kv_unified=False, swa_full=False, mmap=True,
    )  # fmt: skip
    mb = 10**6
    uses = [
        MemoryUse("weights", "CPU_Mapped", 900 * mb), MemoryUse("weights", "CPU_REPACK", 400 * mb),
        MemoryUse("cache", "CPU", 50 * mb), MemoryUse("compute", "CPU", 25 * mb),
    ]  # fmt: skip
    placed = [Placement("a", "CPU_Mapped", 300 * mb), Placement("b", "CPU_REPACK", 400 * mb)]
    known = MemoryBreakdown(settings, uses, placed)
    made = memory_report(StoredModel("m", "", []), ContextMemory(known, room=room * mb))
    assert made.notes[0] == f"{verdict}739 MiB of 1.28 GiB stay in use."
    assert ("Each token" in made.notes[1]) is slow
    assert made.figures["stays in use"] == (775 * mb, "bytes")
    assert any("The system can drop them: 739 MiB stay in use" in note for note in made.notes)


def test_a_model_must_fit_into_this_machine_or_into_what_is_named(instr: Instr, log: Path) -> None:
    memory = machine_memory()
    assert memory is not None
    assert f"Fits into {shown(memory, 'bytes')}: " in instr("memory", "demo").stdout
    assert "Does not fit into 9.54 MiB: " in instr("memory", "demo", "--memory", "10MB").stdout
    assert "fit into" not in instr("memory", log).stdout
    assert_refused(instr("memory", log, "--memory", "1GB"), "a log has its own settings")
