"""`instr bench`: what it measures, in which order, and what it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import counted_steps
from tests.conftest import Instr, assert_refused, read_events
from tests.kit.perfetto_recordings import random_model

pytestmark = pytest.mark.native


def reports(text: str) -> dict[str, dict[str, Any]]:
    return {of["id"]: of for of in json.loads(text)}


def test_configurations_take_turns_and_each_round_has_a_log(instr: Instr, tmp_path: Path) -> None:
    done = instr(
        "bench", "demo", "-p", "16,48", "-n", 4, "--threads", "1,2", "--depth", "0,32",
        "--rounds", 2, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sides = [f"demo-t{threads}-d{depth}" for threads, depth in product((1, 2), (0, 32))]
    sessions = {
        log.stem: load_session(log) for log in (tmp_path / "bench").iterdir()
        if list(check_log(log)) == []
    }  # fmt: skip
    in_order = sorted(sessions, key=lambda name: sessions[name].start.wall)
    assert in_order == [f"{side}-{number}" for number in (1, 2) for side in sides]

    table = reports(done.stdout)
    measured = {
        (row["threads"], row["test"]): row["tokens_per_s"] for row in table["bench"]["rows"]
    }
    at_depth = {0: "", 32: " @ d32"}
    for side, (threads, depth) in zip(sides, product((1, 2), (0, 32)), strict=True):
        rates: dict[str, list[float]] = {}
        for number in (1, 2):
            session = sessions[f"{side}-{number}"]
            steps, _ = counted_steps(session)
            assert steps["n_tokens"].tolist() == [16, 48, 1, 1, 1, 1], "warm-up does not count"
            assert steps["pos"].tolist() == [depth, depth, *range(depth, depth + 4)]
            assert {of.n_threads for of in session.contexts.values()} == {threads}
            (begin, end) = (steps[name].tolist() for name in ("begin", "end"))
            notes = [note.data for note in session.notes]
            parts = [(16, 0, 1), (48, 1, 2), (4, 2, 6)]
            for note, (n, first, after) in zip(notes, parts, strict=True):
                inside = sum(end[first:after]) - sum(begin[first:after])
                assert inside <= note["ns"], "the time of its steps, and between them"
                name = f"{'pp' if n > 4 else 'tg'}{n}{at_depth[depth]}"
                (mark,) = session.marks.rows(session.marks["name"] == name).tuples("begin", "end")
                assert mark[0] <= begin[first]
                assert note["ns"] <= mark[1] - mark[0]
                rates.setdefault(name, []).append(n * 1e9 / note["ns"])
        for name, of in rates.items():
            assert measured[threads, name] == pytest.approx(sum(of) / 2)
    logs = [tmp_path / row["log"] for row in table["rounds"]["rows"]]
    assert {log.stem for log in logs} == set(sessions)
    again = instr("summary", tmp_path / "bench" / f"{sides[1]}-1.log", "--json")
    tests = [row["test"] for row in reports(again.stdout)["benchmark"]["rows"]]
    assert tests == ["pp16 @ d32", "pp48 @ d32", "tg4 @ d32"]


def test_a_model_is_quantized_and_measured_beside_itself(instr: Instr, tmp_path: Path) -> None:
    done = instr(
        "bench", "demo", "--types", "Q4_0", "-p", 0, "-n", 2, "--rounds", 1, "--threads", 1,
        "--logs", "logs", "-o", "bench.md",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    types = {
        log.stem: read_events(log, "model")[0]["ftype"] for log in (tmp_path / "logs").iterdir()
    }
    assert types == {"F16-1": "F16", "Q4_0-1": "Q4_0"}
    page = (tmp_path / "bench.md").read_text()
    assert "| Q4\\_0 | 1 | tg2 |" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.md", "logs"]


def test_an_existing_log_is_kept(instr: Instr, tmp_path: Path) -> None:
    words = ("bench", "demo", "-p", 4, "-n", 0, "--rounds", 1, "--threads", 1, "--logs", "logs")
    assert instr(*words).returncode == 0
    (log,) = (tmp_path / "logs").iterdir()
    before = log.read_bytes()
    assert_refused(instr(*words), f"{Path('logs') / log.name} exists", "--force")
    assert log.read_bytes() == before
    assert instr(*words, "--force").returncode == 0
    assert log.read_bytes() != before


@pytest.mark.parametrize("name", ["mamba2-dense", "gemma3-dense", "llama-moe"])
def test_tests_begin_at_their_depth_whatever_the_memory(
    instr: Instr, tmp_path: Path, name: str
) -> None:
    """The last tokens of a recurrent state cannot be taken away, so it is filled again."""
    done = instr(
        "bench", random_model(name), "-p", 5, "-n", "2,3", "--depth", 7, "--rounds", 1,
        "--threads", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "bench").iterdir()
    steps, _ = counted_steps(load_session(log))
    assert steps["pos"].tolist() == [7, 7, 8, 7, 8, 9]


@pytest.mark.parametrize("after", [1, 5])
def test_ctrl_c_prints_what_was_measured(
    environment: dict[str, str], tmp_path: Path, after: int
) -> None:
    """After 1 or 5 repetitions: in the first log, or in a later one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "bench", "demo", "-p", "8,9,10", "-n", "400",
         "--threads", "1", "--rounds", "1000", "--json"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    logs = tmp_path / "bench"
    while sum(log.read_bytes().count(b'"event":"note"') for log in logs.glob("*.log")) < after:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "Interrupted"
    assert "Traceback" not in errors
    notes = [note["data"] for log in sorted(logs.iterdir()) for note in read_events(log, "note")]
    assert len(notes) >= after
    printed = reports(output)
    assert sorted(row["time"] for row in printed["rounds"]["rows"]) == sorted(
        note["ns"] for note in notes
    )
    assert len(printed["bench"]["rows"]) == len({note["test"] for note in notes})
    for log in logs.iterdir():
        assert read_events(log)[-1]["event"] == "session_end"
        assert list(check_log(log)) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "Missing argument 'MODEL...'"),
        ("none.gguf", "none.gguf does not exist"),
        ("demo --types Q9", "unknown file type 'Q9'"),
        ("demo --types Q4_0,Q4_0", "names a type twice"),
        ("demo {llama} --types Q4_0", "--types takes one MODEL"),
        ("demo demo", "a model is given twice"),
        ("demo --rounds 0", "--rounds is 0; it must be 1 or more"),
        ("demo -p 0 -n 0", "nothing to measure"),
        ("demo -p 1,x", "--n-prompt is '1,x'; it must be numbers"),
        ("demo -n -1", "--n-gen is '-1'; it must be numbers"),
        ("demo --threads 0", "--threads is '0'; it must be numbers"),
        ("demo --threads 513", "--threads is 513; it must be from 1 to 512"),
        ("demo -d 1", "a test of 512 tokens at depth 1 exceeds the context of 512 tokens"),
        ("demo -p 1 -n 1 --logs no/where", "--logs no/where: No such file"),
        ("{bert} -p 1", "is an encoder and generates no text"),
        ("{t5} -p 1", "has an encoder"),
        ("{vocabulary} -p 1", "only a vocabulary"),
        ("demo -o out.pftrace", "a report is .txt"),
    ],
)
def test_wrong_input_is_one_line(
    instr: Instr, models: Path, tmp_path: Path, words: str, reason: str
) -> None:
    paths = {path.stem: path for path in models.iterdir()}
    assert_refused(instr("bench", *words.format(**paths).split()), reason)
    assert list(tmp_path.iterdir()) == [], "wrong input leaves no log"
