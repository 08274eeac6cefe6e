"""`instr requests`: requests found in a log, against the clients' own clocks and by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.clock import (
    PARTS,
    compute_requests,
    concurrency_over_time,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.waits import waits_of
from tests.kit.made_log import make_log
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.reports import column, rows, session_of

CLIENTS, EACH = 8, 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The log of a server with 8 clients, and what their own clocks saw."""
    log = tmp_path_factory.mktemp("served") / "server.log"
    command = [sys.executable, "-m", "tests.kit.batch_server", str(DEMO), str(log)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return log, json.loads(done.stdout)


def _in_pairs(
    log: Path, seen: list[dict[str, Any]]
) -> tuple[s.Level, list[tuple[Request, dict[str, Any]]]]:
    """Each request of the log with what its client saw: those of a client come one by one."""
    session = load_session(log)
    _, requests = find_requests(session)
    pairs = []
    for client in range(CLIENTS):
        found = [request for request in requests if request.name == f"client {client}"]
        calls = sorted((c for c in seen if c["client"] == client), key=lambda c: c["sent"])
        pairs += zip(sorted(found, key=lambda request: request.arrival), calls, strict=True)
    return session.start.level, pairs


@pytest.mark.native
def test_a_server_s_log_has_what_its_clients_saw(
    served: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Counts are exact. A time of the log lies between two readings of the clock in the server;
    `python -m benchmarks.request_times` measures how far from the client's own it is."""
    _, pairs = _in_pairs(*served)
    assert len(pairs) == CLIENTS * EACH
    for request, call in pairs:
        assert request.seq == call["slot"]
        assert request.prompt == call["n_prompt"] - call["reused"]
        assert request.reused == call["reused"]
        assert len(request.token_times) == call["n_tokens"]
        assert call["sent"] <= request.arrival <= request.begin
        earlier = [request.begin, *call["pushed"][:-1]]
        times = zip(earlier, request.token_times, call["pushed"], call["got"], strict=True)
        assert all(before <= at <= pushed <= got for before, at, pushed, got in times)


@pytest.mark.native
def test_its_rate_by_the_clock_counts_what_its_clients_got(
    served: tuple[Path, list[dict[str, Any]]],
) -> None:
    log, seen = served
    latencies, *_ = compute_requests(load_session(log))
    tokens = sum(call["n_tokens"] for call in seen)
    seconds = (max(c["done"] for c in seen) - min(c["sent"] for c in seen)) / 1e9
    rate = latencies.figures["tokens/s by the clock"][0]
    assert isinstance(rate, float)
    assert rate >= tokens / seconds  # the clients read the clock before and after
    assert latencies.figures["concurrent, most"][0] in range(2, CLIENTS + 1)


@pytest.mark.native
def test_the_parts_of_each_request_add_up(served: tuple[Path, list[dict[str, Any]]]) -> None:
    steps, requests = find_requests(load_session(served[0]))
    for request, waits in zip(requests, waits_of(requests, steps), strict=True):
        parts = (waits.queue, waits.prompt, waits.tokens, waits.others, waits.rest)
        assert sum(parts) == request.total
        assert min(parts) >= 0
    times, counts = concurrency_over_time(requests)
    assert counts[-1] == 0
    assert counts.min() >= 0
    assert (np.diff(times) > 0).all()


@pytest.mark.parametrize("seed", range(8))
def test_requests_at_once_over_time(seed: int, tmp_path: Path) -> None:
    events = make_log(Random(seed).randint, level="minimal")
    session = session_of(tmp_path / "made.log", events)
    _, requests = find_requests(session)
    found = [of for of in compute_requests(session) if of.title == "Requests at once, over time"]
    assert len(found) == (len(requests) > 1)
    for report in found:
        assert len(report.rows) == PARTS
        begin = min(request.first for request in requests)
        edges = [int(row[0]) for row in report.rows] + [max(r.end for r in requests) - begin]  # type: ignore[arg-type]
        for (_, mean, most), low, high in zip(report.rows, edges[:-1], edges[1:], strict=True):
            spans = [(r.first - begin, max(r.end, r.first) - begin) for r in requests]
            inside = sum(max(min(end, high) - max(of, low), 0) for of, end in spans)
            assert mean == pytest.approx(inside / (high - low), rel=1e-6)
            moments = [low, *(of for of, _ in spans if low < of < high)]
            assert most == max(sum(of <= t < end for of, end in spans) for t in moments)


def _marked(seed: int) -> list[s.Event]:
    """A log in which the n-th context serves one request, in sequence n, and every second one
    has a mark."""
    events = make_log(Random(seed).randint, n_contexts=8, level="minimal")
    first: dict[int, int] = {}
    for event in events:
        if isinstance(event, s.StepBegin):
            event.seq = [event.ctx]
            first.setdefault(event.ctx, event.t)
        if isinstance(event, s.Token):
            event.seq = event.ctx
    end = events.pop()
    for ctx, begin in first.items():
        if ctx % 2:
            mark = s.Mark(t=begin - 700 * ctx, mark=100 + ctx, name=f"call {ctx}", phase="begin")
            events += [mark, replace(mark, t=end.t - 5, phase="end", seq=ctx)]
    return [*events, end]


@pytest.mark.parametrize("seed", range(4))
def test_the_tables_are_what_the_lines_of_the_log_say(seed: int, tmp_path: Path) -> None:
    log = tmp_path / "made.log"
    session = session_of(log, _marked(seed))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ends = {line["step"]: line["t"] for line in lines if line["event"] == "step_end"}
    wanted: list[dict[str, Any]] = []
    for ctx in {line["ctx"] for line in lines if line["event"] == "step_begin"}:
        own = [line for line in lines if line.get("ctx") == ctx]
        steps = [of for of in own if of["event"] == "step_begin"]
        times = [of["t"] + of["dur"] for of in own if of["event"] == "token"]
        marks = [of["t"] for of in lines if of["event"] == "mark" and of["mark"] == 100 + ctx]
        arrival, end = marks or (steps[0]["t"], max(times[-1], ends[steps[-1]["step"]]))
        durs = [ends[of["step"]] - of["t"] for of in steps]
        gaps = [b - a for a, b in pairwise(times)]
        parts = {
            "queue": steps[0]["t"] - arrival,
            "its prompt": durs[0],
            "its tokens": sum(durs[1:]),
            "other requests": 0,
        }
        parts["the rest"] = end - arrival - sum(parts.values())
        longest = max(parts, key=lambda name: parts[name])
        named = {"queue": "the queue", "the rest": "sampling, application"}
        wanted.append({
            "name": f"call {ctx}" if marks else "", "context": ctx, "sequence": ctx,
            "begin": arrival, "queued": parts["queue"] if marks else None,
            "prompt": steps[0]["n_tokens"], "reused": 0, "output": len(times),
            "first token": times[0] - arrival, "between": median(gaps) if gaps else None,
            "total": end - arrival, "waited for": named.get(longest, longest), "gaps": gaps,
            **parts,
        })  # fmt: skip
    assert len(wanted) > 3
    began, ended = min(r["begin"] for r in wanted), max(r["begin"] + r["total"] for r in wanted)
    slowest = sorted(wanted, key=lambda of: -of["total"])

    latencies, _, shown = compute_requests(session, top=3)
    assert shown.title == "The slowest requests"
    assert f"3 of {len(wanted)}; `instr requests --top {len(wanted)}` shows all." in shown.notes
    for row, of in zip(rows(shown), slowest[:3], strict=True):
        assert row.pop("from") == of["begin"] - began
        del row["Request"]
        assert row == {name: of[name] for name in row}
    (_, _, every) = compute_requests(session, top=100)
    assert column(every, "total") == [of["total"] for of in slowest]
    by_begin = sorted(wanted, key=lambda of: of["begin"] + (of["queue"] or 0))
    assert [by_begin[n - 1]["total"] for n in column(every, "Request")] == column(every, "total")

    samples = {
        "queued": [of["queued"] for of in wanted if of["queued"] is not None],
        "to the first token": [of["first token"] for of in wanted],
        "between tokens": [gap for of in wanted for gap in of["gaps"]],
        "total": [of["total"] for of in wanted],
    }
    for row in rows(latencies):
        values = sorted(samples.pop(row["Time"]))
        assert (row["count"], row["longest"]) == (len(values), values[-1])
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            place = share * (len(values) - 1)
            low, part = int(place), place % 1
            high = values[min(low + 1, len(values) - 1)]
            assert row[name] == pytest.approx(values[low] + part * (high - values[low]))
    assert not any(samples.values())
    spans = [(of["begin"], of["begin"] + of["total"]) for of in wanted]
    n_output = sum(of["output"] for of in wanted)
    most = max(sum(a <= t < b for a, b in spans) for t, _ in spans)
    mean = sum(b - a for a, b in spans) / (ended - began)
    assert latencies.figures == {
        "requests": (len(wanted), "count"),
        "output tokens": (n_output, "count"),
        "prompt tokens computed": (sum(of["prompt"] for of in wanted), "count"),
        "prompt tokens reused": (0, "count"),
        "tokens/s by the clock": (pytest.approx(n_output / (ended - began) * 1e9), "per_second"),
        "concurrent, mean": (pytest.approx(mean), "number"),
        "concurrent, most": (most, "count"),
    }
    notes = " ".join(latencies.notes)
    assert f"At most {most} at once, {mean:.3g} on average." in notes
    unknown = sum(of["queued"] is None for of in wanted)
    assert f"The log lacks the arrival of {unknown} request" in notes


def test_a_reused_prompt_is_counted(tmp_path: Path) -> None:
    turns = [(0, 8, 1, True), (8, 1, 1, True), (4, 4, 1, True), (6, 2, 1, True)]
    requests = _requests_of(turns, tmp_path)
    assert sum(of.reused for of in requests) == 10
    latencies, *_ = compute_requests(load_session(tmp_path / "made.log"))
    assert latencies.figures["prompt tokens reused"] == (10, "count")
    assert latencies.figures["prompt tokens computed"] == (14, "count")


# --- what begins a request ---

Turn = tuple[int, int, int, bool]
"""position, tokens, outputs, and whether a token is sampled then"""


def _requests_of(turns: list[Turn], tmp_path: Path, **marks: int) -> list[Request]:
    """The requests of a log with these steps of sequence 3, one per microsecond."""
    events = make_log(lambda low, _: low, n_contexts=1, level="minimal")
    kept = [e for e in events if isinstance(e, s.SessionStart | s.Model | s.Tensor | s.Context)]
    ctx = next(e for e in kept if isinstance(e, s.Context))
    t0 = max(event.t for event in kept) + 1
    for name, end in marks.items():
        kept.append(s.Mark(t=t0, mark=end, name=name, phase="begin"))
    for i, (pos, tokens, outputs, sampled) in enumerate(turns):
        t = t0 + 1000 * (i + 1)
        kept += [
            s.StepBegin(
                t=t, step=i, ctx=ctx.ctx, kind="decode", phase="decode", n_tokens=tokens,
                n_outputs=outputs, n_seqs=1, pos=pos, seq=[3], seq_pos=[pos],
                seq_tokens=[tokens], seq_outputs=[outputs],
            ),
            s.StepEnd(t=t + 500, step=i, status=0, n_ubatch=1, n_reused=0, prepare=0, readback=0),
        ]  # fmt: skip
        if sampled:
            kept.append(s.Token(t=t + 600, ctx=0, step=i, seq=3, index=i, id=1, text="x", dur=9))
        for name, end in marks.items():
            if end == i:
                kept.append(s.Mark(t=t + 700, mark=end, name=name, phase="end", seq=3))
    return find_requests(session_of(tmp_path / "made.log", kept))[1]


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        pytest.param(
            [(0, 8, 0, False), (8, 3, 1, True), (11, 1, 1, True)], [(11, 0, 2)],
            id="a prompt in two batches",
        ),
        pytest.param(
            [(0, 8, 1, True), (8, 1, 1, True), (4, 4, 1, True)], [(8, 0, 2), (4, 4, 1)],
            id="a prompt that shares a prefix with the one before",
        ),
        pytest.param(
            [(0, 8, 1, True), (8, 1, 1, True), (9, 5, 1, True)], [(8, 0, 2), (5, 9, 1)],
            id="the next turn of a chat",
        ),
        pytest.param(
            [(0, 8, 1, True), (8, 1, 1, True), (7, 1, 1, True)], [(8, 0, 2), (1, 7, 1)],
            id="the same prompt again",
        ),
        pytest.param(
            [(0, 8, 1, True), (8, 4, 4, True), (10, 4, 4, True)], [(8, 0, 3)],
            id="drafts of speculative decoding, some of which are rejected",
        ),
        pytest.param([(0, 8, 0, False)], [(8, 0, 0)], id="a prompt without a token"),
        pytest.param(
            [(0, 8, 8, False), (8, 3, 3, True), (11, 1, 1, True)], [(11, 0, 2)],
            id="a prompt in two batches with all logits",
        ),
        pytest.param(
            [(0, 8, 1, False), (8, 8, 1, False), (16, 2, 1, True), (18, 1, 1, True)],
            [(18, 0, 2)], id="a prompt in batches that each have an output",
        ),
        pytest.param(
            [(0, 8, 1, False), (8, 1, 1, False), (9, 5, 1, False)], [(8, 0, 2), (5, 9, 1)],
            id="the next turn, if the application samples",
        ),
    ],
)  # fmt: skip
def test_a_prompt_after_a_token_begins_a_request(
    turns: list[Turn], found: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    requests = _requests_of(turns, tmp_path)
    assert [(r.prompt, r.reused, len(r.token_times)) for r in requests] == found


def test_the_end_of_a_marked_span_ends_its_request(tmp_path: Path) -> None:
    turns = [(0, 8, 1, True), (8, 1, 1, True), (9, 1, 1, True)]
    first, second = _requests_of(turns, tmp_path, mine=1, other=2)
    assert (first.name, len(first.token_times)) == ("mine", 2)
    assert (second.name, len(second.token_times)) == ("other", 1)
    assert first.queued == 1000
    assert second.queued == 3000
