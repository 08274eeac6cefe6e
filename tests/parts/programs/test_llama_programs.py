"""Recorded llama-bench and llama-perplexity: the log has the figures that they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.base.processes import linked_library
from llamacpp_instr.converters.analyses.bench import bench_reports
from llamacpp_instr.llama.build.programs import PROGRAMS
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import BESIDE, Account, counted_steps
from llamacpp_instr.report.report import shown
from tests.conftest import read_events
from tests.kit.llama_programs import programs
from tests.kit.native_kit import installed_library, unpatched_library
from tests.kit.programs import native_program

pytestmark = pytest.mark.native


def run(program: Path, *options: str | Path, **settings: str) -> str:
    done = subprocess.run(
        [program, *options], env={**os.environ, **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_libraries_beside_the_programs_are_those_of_the_wheel() -> None:
    """llama.cpp is compiled once. The programs look beside them, and not where they are started."""
    libraries = [path for path in installed_library().glob("lib*.so*") if "rpc" not in path.name]
    assert {path.name.partition(".")[0] for path in libraries} >= {"libggml", "libllama", "libmtmd"}
    for library in libraries:
        assert (programs() / library.name).read_bytes() == library.read_bytes(), library.name
    for name in PROGRAMS:
        content = (programs() / name).read_bytes()
        assert b"\0$ORIGIN\0" in content
        assert linked_library(str(programs() / name), "libllama") == programs() / "libllama.so.0"


def test_repetitions_are_those_of_llama_bench(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "bench.log"
    done = subprocess.run(
        [programs() / "llama-bench", "-m", demo_model, "-p", "32", "-n", "8", "-d", "0,16",
         "-r", "3", "-t", "1", "-o", "json"],
        env={**os.environ, "LLAMA_INSTR_LOG": str(log)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed = json.loads(done.stdout)
    notes = [n["data"] for n in read_events(log, "note") if n["name"] == "llama-bench"]
    alike = (
        "n_prompt", "n_gen", "n_depth", "n_threads", "n_batch", "n_ubatch", "type_k", "type_v",
        "flash_attn",
    )  # fmt: skip
    wanted = [
        {"test": i, "ns": ns, "backend": of["backends"], **{name: of[name] for name in alike}}
        for i, of in enumerate(printed, 1)
        for ns in of["samples_ns"]
    ]
    assert notes == wanted
    assert list(check_log(log)) == []
    session = load_session(log)
    steps, _ = counted_steps(session)
    tokens = sum(of["n_prompt"] + of["n_gen"] for of in wanted)
    assert steps["n_tokens"].sum() == tokens, "neither warm-up nor depth counts"
    assert len(session.models) == 1


def test_the_summary_has_the_table_of_llama_bench(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "bench.log"
    done = subprocess.run(
        [programs() / "llama-bench", "-m", demo_model, "-p", "64,128", "-n", "16", "-pg", "32,8",
         "-d", "0,32", "-r", "3", "-t", "1,2", "-ctk", "f16,q8_0", "-o", "md", "-oe", "jsonl"],
        env={**os.environ, "LLAMA_INSTR_LOG": str(log)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    heads, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    )
    theirs = [dict(zip(heads, line, strict=True)) for line in lines]
    exact = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(theirs) == len(exact) == 2 * 2 * 2 * (2 + 1 + 1)

    session = load_session(log)
    account = Account(session, counted_steps(session)[0])
    speeds, times = bench_reports(account)
    own = [column.name for column in speeds.columns]
    assert set(heads) == {*own} - {"±", "lowest", "highest", "repetitions"}
    units = [column.unit for column in speeds.columns]
    kernels = kernels_of_repetitions(log)
    for row, their, of in zip(speeds.rows, theirs, exact, strict=True):
        cells = dict(zip(own, map(shown, row, units), strict=True))
        cells["t/s"] = f"{cells['t/s']} ± {cells['±']}"
        assert {head: cells[head] for head in heads} == their
        numbers = dict(zip(own, row, strict=True))
        assert numbers["t/s"] == pytest.approx(of["avg_ts"], rel=1e-6)
        assert numbers["±"] == pytest.approx(of["stddev_ts"], abs=1e-5)
        assert numbers["lowest"] == pytest.approx(min(of["samples_ts"]), rel=1e-4)
        assert numbers["highest"] == pytest.approx(max(of["samples_ts"]), rel=1e-4)
        assert numbers["repetitions"] == 3
    for i, (row, of) in enumerate(zip(times.rows, exact, strict=True)):
        spent = dict(zip((column.name for column in times.columns), row, strict=True))
        assert spent["repetition"] == pytest.approx(of["avg_ns"], abs=1)
        assert spent["kernels"] == sum(kernels[3 * i : 3 * i + 3]) / 3
        parts = [float(spent[name] or 0) for name in spent if name in (*BESIDE, "the program")]
        assert sum(parts) + float(spent["kernels"] or 0) == pytest.approx(of["avg_ns"], abs=1)
        assert min(parts) >= 0, spent


def kernels_of_repetitions(log: Path) -> list[int]:
    """ns of the kernels of thread 0 before each note, without those in a mark."""
    found, ns, is_marked = [], 0, False
    for event in read_events(log):
        if event["event"] == "mark":
            is_marked = event["phase"] == "begin"
        elif event["event"] == "ops" and not event.get("thread") and not is_marked:
            ns += sum(event["dur"])
        elif event["event"] == "note":
            found.append(ns)
            ns = 0
    return found


def test_perplexity_is_that_of_the_unpatched_program(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who had a red ball. " * 60)
    options = ("-m", demo_model, "-f", text, "-c", "64", "--chunks", "4", "-t", "2")
    log = tmp_path / "perplexity.log"
    found = []
    for folder in (programs(), unpatched_library()):
        flags = ("-shared", "-fPIC", "-Wl,--no-as-needed", "-lllama-common")
        flusher = native_program("flush_log", tmp_path, folder, flags)
        log_of = {"LLAMA_INSTR_LOG": str(log)} if folder == programs() else {}
        preloaded = {"LD_PRELOAD": str(flusher), **log_of}
        printed = run(folder / "llama-perplexity", *options, **preloaded)
        found.append(re.findall(r"\[\d+\][\d.]+|PPL = .*", printed))
    assert found[0] == found[1]
    assert len(found[0]) == 5, "four chunks and the estimate"
    assert list(check_log(log)) == []
