"""`instr memory MODEL`: sums equal the file's, every format, missing parts, wrong input."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import gguf
import pytest

from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.breakdown import MemoryBreakdown
from llamacpp_instr.recording.memory.plan import plan_memory
from tests.conftest import ROOT, Instr, assert_refused
from tests.kit.in_process import refusal, titled
from tests.kit.native_kit import DEMO
from tests.kit.quantized_kit import quantized_demo
from tests.kit.report_kit import memory_of, report, reported, without_library
from tests.kit.sparse_models import write_sparse_llama

FIXTURE = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


# --- sizes ---


@pytest.mark.native
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


@pytest.mark.native
def test_a_tensor_by_hand() -> None:
    *_, tensors = reported(quantized_demo("Q4_K_M"))
    (up,) = (row for row in tensors["rows"] if row["Tensor"] == "blk.1.ffn_up.weight")
    # 256 x 768 in blocks of 256 with 144 bytes: 4.5 bits, instead of 16 and 32
    assert (up["shape"], up["elements"], up["bytes"]) == ("256x768", 196_608, 110_592)
    assert (up["bits/weight"], up["of F16"], up["of F32"]) == (4.5, 0.28125, 0.140625)
    assert (up["layer"], up["role"]) == (1, "ffn_up")


@pytest.mark.native
def test_options_are_those_of_run() -> None:
    """Keys of 4 layers, 128 wide, in 34 bytes per 32; values in 2 bytes each."""
    rows = memory_of(reported("demo", "--ctx", 8192, "--cache-type-k", "q8_0"))["rows"]
    (cache,) = (row for row in rows if row["Memory"] == "KV cache, state")
    assert cache["predicted"] == 4 * 8192 * 128 * 34 // 32 + 4 * 8192 * 128 * 2
    assert rows[-1]["Memory"] == "total"
    assert rows[-1]["predicted"] == sum(row["predicted"] for row in rows[:-1])


@pytest.mark.native
def test_a_model_that_is_read_is_not_mapped() -> None:
    rows = memory_of(reported("demo", "--no-mmap"))["rows"]
    assert (rows[0]["Memory"], rows[0]["buffer"]) == ("weights, read", "CPU")


@pytest.mark.native
def test_an_encoder_has_no_cache_to_speak_of(models: Path) -> None:
    memory = memory_of(reported(models / "bert.gguf"))
    kinds = [row["Memory"] for row in memory["rows"]]
    assert kinds == ["weights, mapped", "compute buffers", "total"]
    (note,) = (note for note in memory["notes"] if "embeddings" in note)
    assert "cache" not in note


# --- formats ---


@cache
def plan_of_demo() -> MemoryBreakdown:
    return plan_memory(load_model_file("demo"), ContextOptions())


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dry run, which takes a process, is enough for all forms."""
    monkeypatch.setattr(
        "llamacpp_instr.recording.memory.plan.plan_memory", lambda *_: plan_of_demo()
    )


@pytest.mark.usefixtures("planned")
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
    report("demo", "-o", out)
    text = out.read_text()
    assert text.startswith(begins)
    names = [t.name for t in gguf.GGUFReader(DEMO).tensors]
    assert all(name in text.replace("\\_", "_") for name in names), "files have every tensor"


@pytest.mark.usefixtures("planned")
def test_csv_is_the_table_of_tensors() -> None:
    rows = list(csv.DictReader(report("demo", "--csv").splitlines()))
    assert len(rows) == 39
    assert rows[0]["Tensor"] == "token_embd.weight"
    assert int(rows[0]["bytes"]) == 256 * 1024 * 2


@pytest.mark.usefixtures("planned")
def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "a.md"
    out.write_text("mine")
    assert "exists; use --force" in refusal("memory", "demo", "-o", out)
    assert out.read_text() == "mine"
    report("demo", "-o", out, "--force")
    assert out.read_text().startswith("## ")


def test_two_thousand_tensors_fit_on_a_few_screens(tmp_path: Path) -> None:
    path = write_sparse_llama(tmp_path / "deep.gguf", layers=222, width=256, feed_forward=512)
    text = report(path)
    assert len(text.splitlines()) < 80
    assert max(map(len, text.splitlines())) <= 80
    assert "0-221" in text, "layers that are alike are one row"
    assert "Not shown: 1,981 more rows." in text
    assert len(report(path, "--csv").splitlines()) == 2002


# --- missing parts, wrong input ---


@pytest.mark.native
def test_without_the_library_the_report_says_what_is_missing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    model = quantized_demo("Q4_K_M")
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "report", model, "--json"],
        env=without_library(tmp_path, environment), cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    memory = memory_of(titled(json.loads(done.stdout)))
    (weights,) = memory["rows"]
    assert weights["Memory"] == "weights, mapped"
    assert weights["predicted"] == gguf_span(model)
    (note,) = memory["notes"]
    assert note.startswith("KV cache and compute buffers cannot be predicted: ")
    assert "instr build" in note


def gguf_span(path: Path) -> int:
    tensors = gguf.GGUFReader(path).tensors
    end = max(int(t.data_offset) + int(t.n_bytes) for t in tensors)
    return end - min(int(t.data_offset) for t in tensors)


@pytest.mark.native
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
        ((str(FIXTURE), "--ctx", "512"), ("a log has its own settings",)),
        (("demo", "--ctx", "0"), ("--ctx is 0",)),
        (("demo", "--cache-type-k", "q9"), ("--cache-type-k 'q9' is not one of",)),
        (("demo", "-o", "nowhere/a.html"), ("nowhere",)),
    ],
)
def test_wrong_input_is_one_line(
    args: tuple[str, ...], words: tuple[str, ...], instr: Instr
) -> None:
    assert_refused(instr("report", *args), *words)
