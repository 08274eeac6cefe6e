"""Requests of a log that is followed, against those of the whole session."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.ended_requests import EndedRequests
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.session import Table, load_session
from llamacpp_instr.log.waits import waits_of
from tests.kit.batched_log import Batch, batched_log
from tests.kit.made_log import encode, make_log
from tests.kit.noted_log import note, noted


class Followed:
    """Takes events one by one, and keeps what ended with them."""

    def __init__(self) -> None:
        self.refs = Resolver()
        self.found: list[tuple[Request, Table]] = []
        self.requests = EndedRequests(self.refs, lambda *of: self.found.append(of))

    def take(self, *events: s.Event) -> int:
        """How many requests have ended so far."""
        for event in events:
            if isinstance(event, s.SessionStart):
                self.refs.start = event
            assert list(self.refs.problems(event)) == []
            self.refs.take(1, event)
            if take := self.requests.takers.get(type(event)):
                take(event)
        return len(self.found)


def figures(request: Request, steps: Table) -> tuple[Any, ...]:
    (waits,) = waits_of([request], steps)
    rows = steps.rows(request.steps)  # type: ignore[arg-type]
    return (
        request.ctx, request.seq, request.first, request.end, request.name, request.prompt,
        request.reused, request.token_times.tolist(), request.served, waits,
        list(rows.tuples("step", "ctx", "begin", "end", "n_tokens", "n_seqs")),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_they_are_those_of_the_session(seed: int, tmp_path: Path) -> None:
    """With marks that end during the next request's step, and steps that fail or warm up."""
    log = tmp_path / "made.log"
    events = noted(Random(seed)) if seed < 8 else make_log(Random(seed).randint)
    log.write_bytes(encode(events))
    steps, requests = find_requests(load_session(log))
    followed = Followed()
    early = followed.take(*events)
    followed.requests.finish()
    assert sorted(figures(*of) for of in followed.found) == sorted(
        figures(request, steps) for request in requests
    )
    assert early > len(requests) / 2 or seed >= 8, "most have ended before the log does"


def one(seq: int, pos: int, tokens: int) -> Batch:
    return Batch([(seq, pos, tokens)], sampled=[(seq, 1, "x")])


def test_a_request_ends_with_its_mark() -> None:
    *facts, graph = batched_log([])
    events = batched_log([one(0, 0, 5), one(0, 5, 1)])[len(facts) + 1 :]
    t = graph.t
    mark = s.Mark(t=t, mark=7, name="request", phase="begin")
    end = s.Mark(t=t + 5000, mark=7, name="request", phase="end", seq=0)
    followed = Followed()
    assert followed.take(*facts, graph, mark, *events) == 0
    assert followed.take(note(7, t + 5000, traceparent="x")) == 0
    assert followed.take(end) == 1
    ((request, steps),) = followed.found
    assert (request.arrival, request.end, request.steps) == (t, t + 5000, [0, 1])
    assert request.served is not None
    assert request.served.traceparent == "x"
    assert len(steps) == 2
    followed.requests.finish()
    assert len(followed.found) == 1, "it ended once"


@pytest.mark.parametrize("marked", [False, True])
def test_without_a_mark_a_request_ends_when_the_next_begins(marked: bool) -> None:
    """Unless a mark is open that may be its own."""
    *facts, graph = batched_log([])
    events = batched_log([one(0, 0, 5), one(0, 5, 1), one(0, 0, 4)])[len(facts) + 1 :]
    mark = s.Mark(t=graph.t, mark=7, name="all", phase="begin")
    followed = Followed()
    followed.take(*facts, graph, *([mark] if marked else []))
    before = [followed.take(event) for event in events]
    assert before[-1] == (0 if marked else 1)
    followed.requests.finish()
    assert [request.prompt for request, _ in followed.found] == [5, 4]


def test_what_is_kept_does_not_grow_with_the_log() -> None:
    *facts, graph = batched_log([])
    batches = [one(0, 0 if i % 3 == 0 else 4 + i % 3, 5 if i % 3 == 0 else 1) for i in range(300)]
    followed = Followed()
    followed.take(*facts, graph)
    most = 0
    for event in batched_log(batches)[len(facts) + 1 :]:
        followed.take(event)
        kept = followed.requests
        most = max(most, sum(map(len, kept._steps.values())) + len(kept._open))
    assert most <= 6
    assert len(followed.found) == 99
