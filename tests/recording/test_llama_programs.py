"""Recorded llama-bench and llama-perplexity: the log has the figures that they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import counted_steps
from tests.conftest import read_events
from tests.kit.llama_programs import programs
from tests.kit.native_kit import unpatched_library
from tests.kit.programs import native_program

pytestmark = pytest.mark.native


def run(program: Path, *options: str | Path, **settings: str) -> str:
    done = subprocess.run(
        [program, *options], env={**os.environ, **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_repetitions_are_those_of_llama_bench(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "bench.log"
    options = ("-p", "32", "-n", "8", "-d", "0,16", "-r", "3", "-t", "1", "-o", "json")
    llama_bench = programs() / "llama-bench"
    printed = json.loads(run(llama_bench, "-m", demo_model, *options, LLAMA_INSTR_LOG=str(log)))
    notes = [n["data"] for n in read_events(log, "note") if n["name"] == "llama-bench"]
    wanted = [
        {"n_prompt": of["n_prompt"], "n_gen": of["n_gen"], "n_depth": of["n_depth"], "ns": ns}
        for of in printed
        for ns in of["samples_ns"]
    ]
    assert notes == wanted
    assert list(check_log(log)) == []
    session = load_session(log)
    steps, _ = counted_steps(session)
    tokens = sum(of["n_prompt"] + of["n_gen"] for of in wanted)
    assert steps["n_tokens"].sum() == tokens, "neither warm-up nor depth counts"
    assert len(session.models) == 1


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
