"""Prompts that a server did not reuse, and drafts, from logs that are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamacpp_instr.converters.analyses.clock import compute_requests
from llamacpp_instr.converters.analyses.findings import missed_reuse
from llamacpp_instr.converters.analyses.serving import (
    CHANGED,
    CHECKPOINT,
    ELSEWHERE,
    EVICTED,
    OFF,
    SHIFTED,
    SHORT,
    Missed,
    compute_speculation,
    cost_by_reason,
    missed_of,
)
from llamacpp_instr.converters.analyses.summary import Facts, compute_summary
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import (
    Request,
    Taken,
    find_requests,
    left_requests,
    step_tokens,
)
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account, counted_steps
from llamacpp_instr.log.waits import waits_of
from tests.kit.batched_log import STEP_NS, Batch, batched_log
from tests.kit.reports import by_title, rows, session_of

# --- why a prompt was not reused ---


def taken(**of: Any) -> Request:
    """A request for a prompt of 100 tokens, of which its slot reused 10."""
    known = {"mark": 0, "slot": 0, "prompt": 100, "cached": 10, "here": 10, "elsewhere": 0,
             "before": 0, "moved": 0, "reuse": True}  # fmt: skip
    return Request(0, 0, prompt=90, taken=msgspec.convert(known | of, Taken))


@pytest.mark.parametrize(
    ("of", "missed"),
    [
        ({}, Missed(SHORT, 0)),
        ({"cached": 99}, None),
        ({"here": 11}, Missed(SHORT, 0)),
        ({"here": 60}, Missed(CHECKPOINT, 50)),
        ({"elsewhere": 60}, Missed(ELSEWHERE, 50)),
        ({"before": 64}, Missed(EVICTED, 54)),
        ({"elsewhere": 70, "before": 64}, Missed(ELSEWHERE, 60)),
        ({"elsewhere": 12, "before": 96}, Missed(EVICTED, 86)),
        ({"moved": 80}, Missed(CHANGED, 80)),
        ({"cached": 0, "here": 80, "reuse": False}, Missed(OFF, 80)),
        ({"cached": 0, "here": 0, "reuse": False}, Missed(SHORT, 0)),
    ],
)
def test_the_reason_is_what_missed_most(of: dict[str, Any], missed: Missed | None) -> None:
    assert missed_of(taken(**of)) == missed


def test_a_context_that_was_too_small_is_its_own_reason() -> None:
    assert missed_of(taken(before=64), shifted=True) == Missed(SHIFTED, 54)


def test_a_request_without_a_note_has_no_reason() -> None:
    assert missed_of(Request(0, 0, prompt=90)) is None


def test_missed_tokens_cost_their_part_of_the_prompt() -> None:
    requests = [taken(before=64), taken(here=60), taken(before=32)]
    missed = [missed_of(request) for request in requests]
    costs = cost_by_reason(requests, missed, [900, 450, 900])
    assert list(costs) == [EVICTED, CHECKPOINT]
    evicted = costs[EVICTED]
    assert (evicted.requests, evicted.computed, evicted.missed) == (2, 180, 54 + 22)
    assert evicted.ns == 540 + 220
    assert costs[CHECKPOINT].ns == 250


def served_log(tmp_path: Path, **of: Any) -> Session:
    """A server whose second request computes 40 tokens; the note on its slot is given."""
    events = batched_log([
        Batch([(0, 0, 40)], sampled=[(0, 1, "a")]), Batch([(0, 0, 40)], sampled=[(0, 2, "b")]),
    ])  # fmt: skip
    t = [event.t for event in events if isinstance(event, s.StepBegin)]
    known = {"task": 1, "slot": 0, "prompt": 40, "cached": 0, "here": 0, "elsewhere": 0,
             "before": 0, "moved": 0, "reuse": True}  # fmt: skip
    for mark, begin in enumerate(t):
        noted = known | {"mark": mark} | (of if mark else {})
        events += [
            s.Mark(t=begin - 100, mark=mark, name="request", phase="begin", thread=0),
            s.Note(t=begin - 50, name="slot", data=noted),
            s.Mark(t=begin + 900, mark=mark, name="request", phase="end", thread=0, seq=0),
        ]
    events += [
        s.Mark(t=t[1] + 910, mark=2, name="request", phase="begin", thread=0),
        s.Mark(t=t[1] + 980, mark=2, name="request", phase="end", thread=0),
    ]
    first = next(i for i, event in enumerate(events) if isinstance(event, s.Graph))
    events[first:] = sorted(events[first:], key=lambda event: event.t)
    return session_of(tmp_path / "served.log", events)


def test_requests_name_reasons_costs_and_what_to_try(tmp_path: Path) -> None:
    session = served_log(tmp_path, before=32)
    found = by_title(compute_requests(session))
    row, other = rows(found["Prompts that were not reused"])
    assert (row["Not reused: why"], row["requests"], row["had been there"]) == (EVICTED, 1, 32)
    assert row["cost"] == STEP_NS * 32 / 40
    assert "slots" in row["what to try"]
    assert (other["Not reused: why"], other["cost"]) == (SHORT, 0)
    slowest = rows(found["Requests, the slowest first"])
    assert sorted(row["not reused"] for row in slowest) == [EVICTED, SHORT]


def test_a_finding_adds_it_up(tmp_path: Path) -> None:
    def cause(**of: Any) -> Any:
        session = served_log(tmp_path, **of)
        return missed_reuse(Facts(Account(session, counted_steps(session)[0])))

    what, share, advice = cause(elsewhere=32)
    assert "held 32 of the computed prompt tokens" in what
    assert ELSEWHERE in what
    assert share == pytest.approx(32 / 80)
    assert "id_slot" in advice
    assert cause(elsewhere=3) is None


def test_a_request_that_left_the_queue_has_no_sequence(tmp_path: Path) -> None:
    session = served_log(tmp_path)
    assert [request.total for request in left_requests(session)] == [70]
    assert len(find_requests(session)[1]) == 2
    (latencies, *_) = compute_requests(session)
    assert "1 more request left the queue before a slot took it, after 70.0 ns (median)." in (
        latencies.notes
    )


def test_a_request_that_a_slot_had_when_the_server_ended_did_not_leave_the_queue(
    tmp_path: Path,
) -> None:
    """The server drops what its slots have: the mark then ends without a sequence."""
    session = served_log(tmp_path)
    marks = session.marks
    marks["seq"][:] = -1
    assert [request.total for request in left_requests(session)] == [70]
    _, requests = find_requests(session)
    assert [(request.seq, request.arrival >= 0) for request in requests] == [(0, True)] * 2
    assert len(requests) == 2


def test_moves_of_prompts_add_up(tmp_path: Path) -> None:
    """The limit and the copies that are held in the end are those of the last move."""
    session = served_log(tmp_path)
    assert "Copies of prompts in RAM" not in by_title(compute_requests(session))
    moves = [("save", 100, 3000, 7), ("save", 40, 1200, 5), ("load", 100, 3000, 9)]
    for i, (op, tokens, size, dur) in enumerate(moves):
        data = {"op": op, "slot": 0, "tokens": tokens, "bytes": size, "dur": dur, "copies": i,
                "held": 10 * i, "limit": 4096}  # fmt: skip
        session.notes.append(s.Note(t=i, name="prompt-copy", data=data))
    report = by_title(compute_requests(session))["Copies of prompts in RAM"]
    assert [list(row.values()) for row in rows(report)] == [
        ["from a slot to RAM", 2, 140, 4200, 12], ["from RAM to a slot", 1, 100, 3000, 9],
    ]  # fmt: skip
    assert report.notes == ["Copies after the last move: 2, with 20 B of 4.00 KiB (--cache-ram)."]


# --- drafts ---


@pytest.fixture
def drafts(tmp_path: Path) -> Session:
    """A prompt of 8 tokens, then drafts of 3, 2 and 1 tokens: 3, 0 and 1 are accepted."""

    def draft(pos: int, tokens: int) -> Batch:
        return Batch([(0, pos, tokens)], ctx=1)

    def verify(pos: int, tokens: int, accepted: int) -> Batch:
        given = [(0, i, "x") for i in range(accepted + 1)]
        return Batch([(0, pos, tokens + 1)], outputs=[tokens + 1], sampled=given)

    batches = [
        Batch([(0, 0, 8)], sampled=[(0, 9, "a")]), draft(0, 8),
        draft(8, 1), verify(8, 3, 3),
        draft(12, 1), verify(12, 2, 0),
        draft(13, 1), verify(13, 1, 1),
    ]  # fmt: skip
    return session_of(tmp_path / "drafts.log", batched_log(batches))


def test_steps_of_a_draft_model_serve_the_request_of_the_target(drafts: Session) -> None:
    steps, requests = find_requests(drafts)
    (request,) = requests
    assert (request.ctx, request.prompt, request.reused) == (0, 8, 0)
    assert len(request.token_times) == 1 + 4 + 1 + 2
    assert request.steps == list(range(8))
    assert steps["phase"].tolist() == ["prefill", "draft"] + ["draft", "decode"] * 3
    (waits,) = waits_of(requests, steps)
    assert (waits.prompt, waits.tokens, waits.others) == (STEP_NS, 7 * STEP_NS, 0)


def test_tokens_count_by_what_each_was(drafts: Session) -> None:
    steps, _ = counted_steps(drafts)
    prompt, output = step_tokens(drafts, steps)
    assert prompt.tolist() == [8, 0, 0, 0, 0, 0, 0, 0]
    assert output.tolist() == [1, 0, 0, 4, 0, 1, 0, 2]
    speed = rows(by_title(compute_summary(drafts))["Speed"])
    counts = [(row["Phase"], row["prompt tokens"], row["output tokens"]) for row in speed]
    assert counts == [("prefill", 8, 1), ("decode", 0, 7), ("draft", 0, 0)]


def test_drafted_and_accepted_tokens_by_position(drafts: Session) -> None:
    found = compute_speculation(drafts, counted_steps(drafts)[0])
    assert found is not None
    assert found.drafted.tolist() == [3, 2, 1]
    assert found.accepted.tolist() == [2, 1, 1]
    assert (found.draft_ns, found.verify_ns, found.tokens) == (4 * STEP_NS, 3 * STEP_NS, 7)
    assert found.rejected_ns == round(STEP_NS * 2 / 3)
    report = by_title(compute_requests(drafts))["Speculative decoding"]
    assert report.figures["rejected"] == (2, "count")


def test_a_session_without_drafts_has_no_such_table(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", batched_log([Batch([(0, 0, 4)])]))
    assert "Speculative decoding" not in by_title(compute_requests(session))
