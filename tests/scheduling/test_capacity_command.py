"""`instr capacity` on recorded servers, and one line for each wrong input."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kit.in_process import instr_here, json_reports
from tests.kit.native_kit import ROOT

LOG = ROOT / "docs" / "tutorials" / "faster-server.log.gz"
WITHOUT = ROOT / "tests" / "fixtures" / "demo-verbose.log"


def reports(*words: object) -> dict[str, dict[str, Any]]:
    return {report["id"]: report for report in json_reports("capacity", LOG, *words)}


def test_more_clients_get_no_less_in_all_and_wait_longer() -> None:
    found = reports("--clients", "1-16")
    rows = found["capacity"]["rows"]
    assert [row["clients"] for row in rows] == [1, 2, 4, 8, 16]
    speeds = [row["tokens/s"] for row in rows]
    assert all(later >= 0.98 * speed for speed, later in pairwise(speeds))
    waits = [row["first token p50"] for row in found["waits"]["rows"]]
    assert waits == sorted(waits)
    # each client has at most one request: Little's law
    for row, of in zip(rows, found["waits"]["rows"], strict=True):
        answer = of["first token p50"] + of["per token p50"] * row["tokens/s"] / row["requests/s"]
        assert row["requests/s"] * answer / 1e9 == pytest.approx(row["clients"], rel=0.3)


def test_the_replay_is_near_the_recording() -> None:
    figures = {
        name: of["value"] for name, of in reports("--clients", 1)["replay"]["figures"].items()
    }
    for what in ("first token", "end"):
        assert figures[f"error of the {what}, median"] < 0.03
        assert figures[f"error of the {what}, p99"] < 0.10
    assert figures["simulated tokens/s"] == pytest.approx(figures["recorded tokens/s"], rel=0.03)


def test_a_damaged_line_costs_only_that_line(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(
        gzip.decompress(LOG.read_bytes()).replace(b'"event":"token"', b'"event":"t"', 1)
    )
    refused = instr_here("capacity", log, "--clients", 1)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "server.log:" in refused.stderr
    done = instr_here("capacity", log, "--clients", 1, "--lenient")
    assert done.returncode == 0
    assert "1 damaged line was skipped" in done.stdout + done.stderr


def test_all_of_the_server_s_time_is_accounted_for() -> None:
    found = reports("--clients", 2)["limits"]["rows"]
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert all(row["time"] >= 0 for row in found)


def test_a_rate_below_what_the_server_can_do_is_served() -> None:
    rows = reports("--rate", "0.25-0.5")["capacity"]["rows"]
    for row, rate in zip(rows, (0.25, 0.5), strict=True):
        assert row["requests/s"] == pytest.approx(rate, rel=0.15)
        assert row["server busy"] < 0.5


def test_a_smaller_cache_and_other_slots() -> None:
    rows = reports("--clients", 4, "--slots", "1,2,4", "--ctx", 2048)["capacity"]["rows"]
    assert [(row["slots"], row["slot's context"]) for row in rows] == [
        (1, 2048),
        (2, 1024),
        (4, 512),
    ]
    assert {row["cache"] for row in rows} == {2048 * 23040}
    (q8,) = reports("--clients", 4, "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")["capacity"][
        "rows"
    ]
    assert q8["cache"] == 4096 * 23040 * 34 / 64
    assert q8["not recorded"] > 0.9


def test_a_workload_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text("prompt = [100, 200]\nanswer = { least = 20, most = 30 }\nshared = 50\n")
    found = reports("--clients", 2, "--workload", path)["capacity"]["rows"][0]
    assert 20 <= found["tokens/s"] / found["requests/s"] <= 30
    path.write_text("prompt = 1\nanswer = 1\nthink = 10\n")
    idle = reports("--clients", 2, "--workload", path)
    assert idle["capacity"]["rows"][0]["requests/s"] == pytest.approx(0.2, rel=0.1)
    assert idle["limits"]["notes"] == ["What limits 2 clients most: too few requests at once."]


def test_a_page_has_the_charts(tmp_path: Path) -> None:
    page = tmp_path / "capacity.html"
    assert instr_here("capacity", LOG, "--clients", "1-4", "-o", page).returncode == 0
    assert page.read_text(encoding="utf-8").count("<svg") == 3


WRONG = {
    "--clients 0-4": "--clients 0-4: from 1 to 1024",
    "--clients 1-4 --rate 2": "give --clients or --rate, not both",
    "--rate 0": "--rate 0: give requests per second",
    "--rate 5-2": "--rate 5-2: give requests per second",
    "--draft on": "has no drafts; record a llama-server with a draft model",
    "--slots 0": "--slots is '0'",
    "--ctx 400000000": "this machine has 23.5 GiB; give a smaller --ctx",
    "--ctx 256": "2 slots have 256 cells each, but a prompt has 2",
    "--batch 64 --ubatch 128": "no server can have that",
    "--cache-type-k q9": "--cache-type-k 'q9' is not one of",
    "--goal quick": "--goal 'quick': write it like",
    "--goal 500tokens/s": "nothing reaches '500tokens/s'; the nearest is",
    "--workload none.toml": "none.toml: No such file or directory",
    "--machine none.json": "none.json",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_one_line(words: str) -> None:
    done = instr_here("capacity", LOG, *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert WRONG[words] in done.stderr


def test_a_log_without_a_server_s_requests_is_refused() -> None:
    done = instr_here("capacity", WITHOUT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "too few; record some more requests" in done.stderr


@pytest.mark.parametrize(
    "text", ["prompt = 5", "prompt = 5\nanswer = {}", "prompt = -1\nanswer = 5",
             "prompt = 5\nanswer = []", "prompt = 5\nanswer = 5\nsize = 1", "prompt"],
)  # fmt: skip
def test_a_wrong_workload_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(text)
    done = instr_here("capacity", LOG, "--workload", path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"Error: {path}: ")
