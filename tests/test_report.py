"""`instr report`: sums that are the file's, memory that is llama.cpp's, differences explained."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings

from converters.compression import compression_reports
from converters.compression.recorded import recorded_memory
from converters.stored import stored_in_log
from llamacpp_instr import cli, schema
from llamacpp_instr.engine import ContextOptions, Model
from llamacpp_instr.llama_log import captured
from llamacpp_instr.recording import record
from llamacpp_instr.session import load_session
from tests.conftest import ROOT, Instr, assert_refused, read_events
from tests.made_log import encode
from tests.native_kit import DEMO, random_models
from tests.quantized_kit import quantized_demo
from tests.sparse_models import write_sparse_llama
from tests.strategies import logs

FIXTURE = Path(__file__).parent / "fixtures" / "demo-verbose.log"
Json = list[dict[str, Any]]


def report(*args: object) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, args)])


def reported(*args: object) -> Json:
    """The reports as JSON."""
    done = report(*args, "--json")
    assert done.exit_code == 0, done.output
    found: Json = json.loads(done.stdout)
    return found


def memory_of(reports: Json) -> dict[str, Any]:
    (found,) = (r for r in reports if r["title"].startswith("Memory"))
    return found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of the demo model in Q4_K_M, a copy of which lies beside the log."""
    directory = tmp_path_factory.mktemp("session")
    model = shutil.copy(quantized_demo("Q4_K_M"), directory / "tiny.gguf")
    args = ["-p", "Once", "-n", "4", "--ctx", "384", "--cache-type-k", "q8_0", "--threads", "2"]
    command = [sys.executable, "-m", "llamacpp_instr", "run", model, *args]
    subprocess.run(
        [*command, "--log", directory / "session.log"], cwd=ROOT, check=True, capture_output=True
    )
    return directory / "session.log"


def edited(log: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The log with its events changed; a file beside it."""
    events = read_events(log)
    for event in events:
        edit(event)
    path = log.with_name("edited.log")
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


# --- sizes ---


@pytest.mark.parametrize("file_type", ["F16", "Q4_K_M", "IQ2_XXS"])
def test_sums_are_the_files(file_type: str) -> None:
    path = quantized_demo(file_type)
    overview, _, types, roles, layers, tensors = reported(path)
    theirs = gguf.GGUFReader(path).tensors
    (whole,) = overview["rows"]
    assert whole["Tensors"] == len(theirs)
    assert whole["file"] == path.stat().st_size
    assert whole["weights"] == sum(int(t.n_bytes) for t in theirs)
    for table in (types, roles, layers):
        assert sum(row["bytes"] for row in table["rows"]) == whole["weights"]
        assert sum(row["elements"] for row in table["rows"]) == whole["elements"]
        assert sum(row["tensors"] for row in table["rows"]) == whole["Tensors"]
        assert sum(row["share"] for row in table["rows"]) == pytest.approx(1)
    keys = ("Tensor", "type", "elements", "bytes")
    assert [tuple(row[key] for key in keys) for row in tensors["rows"]] == [
        (t.name, t.tensor_type.name, int(t.n_elements), int(t.n_bytes)) for t in theirs
    ]


def test_a_tensor_by_hand() -> None:
    *_, tensors = reported(quantized_demo("Q4_K_M"))
    (up,) = (row for row in tensors["rows"] if row["Tensor"] == "blk.1.ffn_up.weight")
    # 256 x 768 in blocks of 256 in 144 bytes: 4.5 bits, of 16 and of 32
    assert (up["shape"], up["elements"], up["bytes"]) == ("256x768", 196_608, 110_592)
    assert (up["bits/weight"], up["of F16"], up["of F32"]) == (4.5, 0.28125, 0.140625)
    assert (up["layer"], up["role"]) == (1, "ffn_up")


def test_options_are_those_of_run() -> None:
    """Keys of 4 layers, 128 wide, in 34 bytes for 32; values in 2 bytes."""
    rows = memory_of(reported("demo", "--ctx", 8192, "--cache-type-k", "q8_0"))["rows"]
    (cache,) = (row for row in rows if row["Memory"] == "KV cache, state")
    assert cache["predicted"] == 4 * 8192 * 128 * 34 // 32 + 4 * 8192 * 128 * 2
    assert rows[-1]["Memory"] == "total"
    assert rows[-1]["predicted"] == sum(row["predicted"] for row in rows[:-1])


def test_a_model_that_is_read_is_not_mapped() -> None:
    rows = memory_of(reported("demo", "--no-mmap"))["rows"]
    assert (rows[0]["Memory"], rows[0]["buffer"]) == ("weights, read", "CPU")


# --- a log ---


def test_what_was_measured_is_what_was_predicted(log: Path) -> None:
    memory = memory_of(reported(log))
    logged = read_events(log, "memory")[-1]["buffers"]
    assert sum(row["measured"] for row in memory["rows"][:-1]) == sum(
        use.get(kind, 0) for use in logged for kind in ("model", "context", "compute")
    )
    assert [row["difference"] for row in memory["rows"]] == [0] * len(memory["rows"])
    notes = " ".join(memory["notes"])
    assert "equals it to the byte" in notes
    assert "For 512 tokens" in notes, "the log's, in whole blocks of 256"
    assert "q8_0 keys and f16 values" in notes


def test_a_log_alone_is_enough(log: Path, tmp_path: Path) -> None:
    with_file, copy = reported(log), shutil.copy(log, tmp_path / "alone.log")
    edited_copy = edited(
        copy, lambda event: event.update(path="gone.gguf") if "arch" in event else None
    )
    alone = reported(edited_copy)
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
    moved = edited(
        tmp_path / "session.log",
        lambda event: event.update(path="/gone/tiny.gguf") if "arch" in event else None,
    )
    notes = " ".join(memory_of(reported(moved))["notes"])
    assert "tiny.gguf is no longer the model of the log: " in notes


def test_the_model_is_found_beside_the_log(log: Path) -> None:
    moved = edited(
        log, lambda event: event.update(path="/gone/tiny.gguf") if "arch" in event else None
    )
    assert "equals it to the byte" in " ".join(memory_of(reported(moved))["notes"])


def test_a_whole_cache_for_sliding_windows_is_recognized(tmp_path: Path) -> None:
    """As programs make it that leave `swa_full` as it is; llama.cpp's tools, and ours, do not."""
    path = random_models() / "gemma3-dense.gguf"
    with captured() as llama_log, record(tmp_path / "a.log", level="minimal"):  # noqa: SIM117
        with Model(path, llama_log) as model:
            params = model.api.llama_context_default_params()
            params.n_ctx = 4096
            model.api.llama_free(model.api.llama_init_from_model(model.handle, params))
    memory = memory_of(reported(tmp_path / "a.log"))
    assert "equals it to the byte" in " ".join(memory["notes"])
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
    assert "tensors lay in other buffers than this library would put them into" in notes
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
    assert "equals it to the byte" not in notes


def test_contexts_that_are_alike_are_one_section(tmp_path: Path) -> None:
    from llamacpp_instr.engine import Context

    with captured() as llama_log, record(tmp_path / "a.log", level="minimal"):  # noqa: SIM117
        with Model(quantized_demo("Q8_0"), llama_log) as model:
            for ctx in (256, 512, 256):
                with Context(model, ContextOptions(ctx=ctx)):
                    pass
    titles = [r["title"] for r in reported(tmp_path / "a.log") if r["title"].startswith("Memory")]
    assert titles == ["Memory of contexts 0, 2", "Memory of context 1"]


def test_an_old_log_of_another_machine() -> None:
    overview, memory, *_, tensors = reported(FIXTURE)
    assert overview["title"].startswith("demo")
    assert len(tensors["rows"]) == overview["rows"][0]["Tensors"] > 0
    assert memory["rows"][-1]["measured"] > 0


@settings(max_examples=30, deadline=None)
@given(events=logs())
def test_sums_of_any_log(events: list[schema.Event], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("logs") / "session.log"
    path.write_bytes(encode(events))
    session = load_session(path)
    for model in session.models.values():
        stored = stored_in_log(model, session.tensors, None)
        helds = recorded_memory(session, model)
        _, *held, types, roles, layers, tensors = compression_reports(stored, helds)
        assert len(held) == len(helds)
        for table in (types, roles, layers, tensors):
            at = [column.name for column in table.columns].index("bytes")
            assert sum(int(row[at] or 0) for row in table.rows) == stored.n_bytes


# --- forms ---


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [
        ("html", "<!doctype html>"),
        ("md", "## "),
        ("json", "["),
        ("csv", "Tensor,"),
        ("txt", "demo"),
    ],
)
def test_the_form_follows_from_the_suffix(suffix: str, begins: str, tmp_path: Path) -> None:
    out = tmp_path / f"report.{suffix}"
    assert report("demo", "-o", out).exit_code == 0
    text = out.read_text()
    assert text.startswith(begins)
    names = [t.name for t in gguf.GGUFReader(DEMO).tensors]
    assert all(name in text.replace("\\_", "_") for name in names), "files have every tensor"


def test_csv_is_the_table_of_tensors(tmp_path: Path) -> None:
    report("demo", "-o", tmp_path / "a.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert len(rows) == 39
    assert rows[0]["Tensor"] == "token_embd.weight"
    assert int(rows[0]["bytes"]) == 256 * 1024 * 2


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "a.md"
    out.write_text("mine")
    assert report("demo", "-o", out).exit_code == 2
    assert out.read_text() == "mine"
    assert report("demo", "-o", out, "--force").exit_code == 0
    assert out.read_text().startswith("## ")


@pytest.mark.parametrize("source", ["demo", "log"])
def test_a_terminal_of_80_columns_has_room(source: str, log: Path) -> None:
    text = report(log if source == "log" else source).stdout
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Memory", "KV cache, state", "Types", "Roles", "Layers", "Largest tensors"):
        assert word in text


def test_two_thousand_tensors_fit_on_a_few_screens(tmp_path: Path) -> None:
    path = write_sparse_llama(tmp_path / "deep.gguf", layers=222, width=256, feed_forward=512)
    text = report(path).stdout
    assert len(text.splitlines()) < 80
    assert max(map(len, text.splitlines())) <= 80
    assert "0-221" in text, "layers that are alike are one row"
    assert "1,981 smaller ones are left out" in text
    report(path, "-o", tmp_path / "all.csv")
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 2002


def test_names_are_no_markup_and_steer_no_terminal(log: Path) -> None:
    def rename(event: dict[str, Any]) -> None:
        if event.get("name") == "blk.0.ffn_up.weight":
            event["name"] = "<b>blk.0.[red]\x1b[31m"

    path = edited(log, rename)
    text = report(path).stdout
    assert "\x1b" not in text
    assert r"<b>blk.0.[red]\x1b" in text.replace("\n", "")
    html = path.with_suffix(".html")
    report(path, "-o", html, "--force")
    assert "<b>" not in html.read_text()


# --- what is missing, what is wrong ---


def test_without_the_library_the_report_says_what_is_missing(
    log: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise ImportError('it is hidden')")
    hidden = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}

    def run(source: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "llamacpp_instr", "report", source, "--json"]
        done = subprocess.run(command, env=hidden, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return memory_of(json.loads(done.stdout))

    model = quantized_demo("Q4_K_M")
    memory = run(model)
    (weights,) = memory["rows"]
    assert weights["Memory"] == "weights, mapped"
    assert weights["predicted"] == gguf_span(model)
    (note,) = memory["notes"]
    assert note.startswith("KV cache and compute buffers cannot be predicted: ")
    assert "instr build" in note

    memory = run(log)
    assert memory["rows"][-1]["measured"] > 0
    assert any("Nothing was predicted" in n and "instr build" in n for n in memory["notes"])


def gguf_span(path: Path) -> int:
    tensors = gguf.GGUFReader(path).tensors
    end = max(int(t.data_offset) + int(t.n_bytes) for t in tensors)
    return end - min(int(t.data_offset) for t in tensors)


def test_a_model_that_llama_cpp_cannot_load_has_sizes_all_the_same(tmp_path: Path) -> None:
    data = quantized_demo("Q8_0").read_bytes()
    (tmp_path / "new.gguf").write_bytes(
        data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llbma")
    )
    reports = reported(tmp_path / "new.gguf")
    assert reports[0]["rows"][0]["bits/weight"] == pytest.approx(8.5, abs=0.1)
    (note,) = memory_of(reports)["notes"]
    assert "cannot load it" in note


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nowhere.gguf",), ("nowhere.gguf does not exist",)),
        (("nowhere.log",), ("nowhere.log",)),
        ((str(ROOT),), (str(ROOT), "directory")),
        ((str(FIXTURE), "--ctx", "512"), ("log has settings of its own",)),
        (("demo", "--ctx", "0"), ("--ctx is 0",)),
        (("demo", "--cache-type-k", "q9"), ("--cache-type-k 'q9' is none of",)),
        (("demo", "-o", "nowhere/a.html"), ("nowhere",)),
    ],
)
def test_wrong_input_is_one_line(
    args: tuple[str, ...], words: tuple[str, ...], instr: Instr
) -> None:
    assert_refused(instr("report", *args), *words)


def test_a_log_without_tensors_is_refused(log: Path, instr: Instr) -> None:
    first = log.read_text().splitlines()[0]
    path = log.with_name("empty.log")
    path.write_text(first + "\n")
    msgspec.json.decode(first)
    assert_refused(instr("report", path), "empty.log", "tensors")
