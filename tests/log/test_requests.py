"""Requests that are found step by step, from calls written by hand."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.log import requests
from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.requests import (
    Request,
    RequestFinder,
    Served,
    Taken,
    find_requests,
    read_note,
)
from llamacpp_instr.log.schema import CONTEXTS_KEPT, Mark, Note
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


class Finder(RequestFinder):
    """Keeps what it found; steps are numbered, and take from 10 to 15 of each hundred ns."""

    def __init__(self) -> None:
        self.found: list[Request] = []
        self.n = 0
        super().__init__(self.found.append)

    def serve(self, pos: int, tokens: int = 1, outputs: int = 1, prompt: bool = False,
              seq: int = 0, ctx: int = 0) -> Request:  # fmt: skip
        self.n += 1
        part = Part(seq, pos, tokens, outputs, prompt)
        (request,) = self.step(self.n, ctx, 100 * self.n + 10, 100 * self.n + 15, [part])
        return request

    def sample(self, seq: int = 0, ctx: int = 0, step: int | None = None) -> Request | None:
        """A token of the latest step, from 20 to 24."""
        return self.token(ctx, seq, self.n if step is None else step, 100 * self.n + 20, 4)

    def all(self) -> list[Request]:
        self.finish()
        return self.found


def test_a_request_has_its_prompt_its_tokens_and_its_times() -> None:
    finder = Finder()
    finder.serve(3, 5, prompt=True)
    finder.sample()
    finder.serve(8)
    request = finder.sample()
    assert request == Request(
        ctx=0, seq=0, reused=3, prompt=5, begin=110, end=224, first_step=1, last_step=2, length=9,
        token_times=array("q", [124, 224]),
    )  # fmt: skip
    assert finder.all() == [request]
    assert (request.first, request.queued, request.to_first_token, request.total) == (
        110, None, 14, 114
    )  # fmt: skip
    assert request.between_tokens.tolist() == [100]
    empty = Request(0, 0)
    assert (empty.to_first_token, empty.between_tokens.tolist()) == (None, [])


def test_an_unknown_position_reuses_nothing() -> None:
    assert Finder().serve(-1, 5, prompt=True).reused == 0


def test_a_prompt_after_a_token_is_another_request() -> None:
    finder = Finder()
    first = finder.serve(0, 5, prompt=True)
    assert finder.serve(5, 3, prompt=True) is first, "no token came yet"
    finder.sample()
    assert finder.serve(8) is first
    assert finder.serve(9, 2, prompt=True) is not first
    assert [(of.prompt, of.reused) for of in finder.all()] == [(8, 0), (2, 9)]


def test_without_tokens_of_the_log_each_output_is_one_when_its_step_ends() -> None:
    finder = Finder()
    finder.serve(0, 5, prompt=True)
    request = finder.serve(5, 3, prompt=True)
    assert request.token_times.tolist() == [215], "the prompt went on: that of its end"
    finder.serve(8)
    assert request.token_times.tolist() == [215, 315]
    finder.serve(9, outputs=0)
    assert request.token_times.tolist() == [215, 315]
    assert finder.serve(11, 2, prompt=True) is not request, "it does not follow the prompt"


def test_the_first_token_of_a_context_takes_back_those_that_outputs_counted_as() -> None:
    finder = Finder()
    one, other = finder.serve(0, 5, prompt=True), finder.serve(0, 5, prompt=True, seq=1)
    of_other_context = finder.serve(0, 5, prompt=True, ctx=1)
    finder.serve(0, 5, prompt=True)  # the same sequence again
    finder.sample(step=-1)
    assert not one.token_times
    assert not other.token_times
    assert of_other_context.token_times.tolist() == [315]


def test_a_second_token_from_one_output_is_a_request_that_found_its_prompt() -> None:
    finder = Finder()
    first = finder.serve(0, 5, prompt=True)
    assert finder.sample() is first
    second = finder.sample()
    assert second == Request(
        0, 0, reused=5, first_step=1, last_step=1, begin=120, length=5, end=124,
        token_times=array("q", [124]),
    )  # fmt: skip
    assert finder.sample(seq=-1) is second, "a token of an unknown sequence begins none"
    assert finder.all() == [first, second]


@pytest.mark.parametrize(("outputs", "n"), [(1, 2), (2, 2), (3, 1), (0, 2)])
def test_drafts_have_as_many_tokens_as_outputs(outputs: int, n: int) -> None:
    """Of three that are sampled after a decode, and at least one; a prompt has one."""
    finder = Finder()
    finder.serve(0, 5, prompt=True)
    finder.sample()
    finder.serve(5, 3, outputs)
    for _ in range(max(outputs, 1) + (n - 1)):
        finder.sample()
    assert len(finder.all()) == n
    finder = Finder()
    finder.serve(0, 5, 5, prompt=True)
    for _ in range(2):
        finder.sample()
    assert len(finder.all()) == 2


def test_a_token_of_another_step_or_sequence_is_not_its() -> None:
    finder = Finder()
    request = finder.serve(0, 5, prompt=True)
    assert finder.sample(step=7) is request
    assert finder.sample(ctx=9) is None
    assert not request.token_times


def test_a_copy_of_a_sequence_takes_its_first_token_from_the_others_logits() -> None:
    """As the answers of llama-server to one prompt do."""
    finder = Finder()
    finder.serve(0, 5, prompt=True)
    copy = finder.sample(seq=3)
    assert copy is not None
    assert (copy.reused, copy.prompt, len(copy.token_times)) == (5, 0, 1)
    assert len(finder.all()) == 2


# --- marks ---


def test_a_span_is_of_the_first_request_that_begins_in_it() -> None:
    finder = Finder()
    first = finder.serve(0, 5, prompt=True)
    finder.sample()
    second = finder.serve(8, 2, prompt=True)
    finder.span(0, 210, 260, "second")
    finder.span(0, 110, 111, "first")
    finder.span(1, 0, 999, "of another sequence")
    assert (first.name, first.arrival, first.queued, first.end) == ("first", 110, 0, 124)
    assert (second.name, second.arrival, second.end, second.total) == ("second", 210, 260, 50)
    assert finder.found == [first], "it waits no more"
    assert finder.all() == [first, second]


@pytest.mark.parametrize(
    ("begin", "end", "fits"),
    [(110, 111, True), (111, 120, False), (100, 110, False), (0, 111, True)],
)
def test_a_request_begins_in_a_span_before_its_end(begin: int, end: int, fits: bool) -> None:
    for told_before in (False, True):
        finder = Finder()
        if told_before:
            finder.span(0, begin, end, "x")
        request = finder.serve(0, 5, prompt=True)
        if not told_before:
            finder.span(0, begin, end, "x")
        assert (request.name == "x") is fits


def test_a_span_has_one_request_of_each_context() -> None:
    finder = Finder()
    finder.span(0, 0, 9999, "x")
    first = finder.serve(0, 5, prompt=True)
    finder.sample()
    other = finder.serve(0, 5, prompt=True, ctx=1)
    again = finder.serve(0, 5, prompt=True)
    assert again is not first
    assert [of.name for of in (first, other, again)] == ["x", "x", ""]


def test_after_the_end_of_its_span_a_request_is_over() -> None:
    """A step that begins with the end of the span, or later, serves the next."""
    for end, same in ((210, False), (211, True), (200, False)):
        finder = Finder()
        finder.span(0, 105, end, "x")
        first = finder.serve(0, 5, prompt=True)
        assert (finder.serve(5) is first) is same
    finder = Finder()
    first = finder.serve(0, 5, prompt=True)
    assert finder.serve(5) is first, "without a span"


def test_a_span_at_the_start_of_the_clock_has_an_arrival() -> None:
    request = Request(0, 0, arrival=0, begin=5)
    assert (request.first, request.queued) == (0, 5)


# --- what is kept ---


def test_ended_requests_wait_for_their_span_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "KEPT", 2)
    finder = Finder()
    for pos in (0, 10, 20):
        finder.serve(pos, 5, prompt=True)
        finder.sample()
    assert finder.found == []
    finder.serve(30, 5, prompt=True)
    assert [of.reused for of in finder.found] == [0]
    assert [of.reused for of in finder.all()] == [0, 10, 20, 30]


def test_contexts_are_kept_by_their_latest_step() -> None:
    finder = Finder()
    for ctx in range(CONTEXTS_KEPT):
        finder.serve(0, 5, prompt=True, ctx=ctx)
    finder.serve(5, ctx=0)
    assert finder.found == []
    finder.serve(0, 5, prompt=True, ctx=CONTEXTS_KEPT)
    assert [of.ctx for of in finder.found] == [1]


# --- of a session ---


def test_steps_of_a_request_are_rows_of_the_table(tmp_path: Path) -> None:
    sketch = Sketch()
    for ns, tokens in ((500, 6), (100, 1), (100, 1)):
        sketch.step(ns, tokens, sampled=10)
    open_mark = Mark(t=0, mark=1, name="open", phase="begin", seq=0)
    steps, (request,) = find_requests(session_of(tmp_path / "a.log", [*sketch.events, open_mark]))
    assert request.steps == [0, 1, 2]
    assert steps["step"].tolist() == [0, 1, 2]
    assert np.diff(request.token_times).tolist() == [110, 110]
    assert (request.name, request.first_step, request.last_step) == ("", 0, 2)


def test_marks_of_no_sequence_and_instants_name_no_request(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.step(500, 6, sampled=10)
    for seq, name in ((-1, ""), (0, "x")):
        marks = [Mark(t=0, mark=1, name="x", phase=phase, seq=seq) for phase in ("begin", "end")]
        marks[1].t = 900
        path = tmp_path / f"{seq}.log"
        _, (request,) = find_requests(session_of(path, [*sketch.events, *marks]))
        assert request.name == name


@pytest.mark.parametrize(
    ("path", "stop", "operation"),
    [
        ("/v1/chat/completions", "limit", "chat"), ("/v1/messages", "eos", "chat"),
        ("/prefix/v1/responses", "none", "chat"), ("/v1/completions", "limit", "text_completion"),
        ("/infill", "word", "text_completion"), ("", "limit", "text_completion"),
        ("", "done", "embeddings"),
    ],
)  # fmt: skip
def test_the_path_of_a_request_says_what_was_asked_for(
    path: str, stop: str, operation: str
) -> None:
    known = dict.fromkeys(("mark", "task", "slot", "cached", "computed", "generated", "drafted",
                           "accepted", "verified"), 0)  # fmt: skip
    data = {**known, "stream": True, "truncated": False, "stop": stop, "path": path}
    served = read_note(Note(t=0, name="request", data=data))
    assert isinstance(served, Served)
    assert served.operation == operation


def test_a_note_of_another_application_is_none_of_a_request() -> None:
    assert read_note(Note(t=0, name="request", data={"id": 7})) is None
    assert read_note(Note(t=0, name="slot", data="x")) is None
    assert read_note(Note(t=0, name="documents", data={"found": 3})) is None


# --- slots ---


def taken(slot: int, mark: int = 0) -> Taken:
    return Taken(mark, slot, prompt=5, cached=3, here=3, elsewhere=0, before=0, moved=0, reuse=True)


def test_a_slot_has_the_request_that_it_took_until_its_mark_ends() -> None:
    """Whatever its steps look like, and also before the first."""
    finder = Finder()
    request = finder.take(taken(0), 50, "request")
    assert (request.arrival, request.reused, request.ctx, request.first_step) == (50, 3, -1, -1)
    assert finder.serve(3, 2, prompt=True) is request
    assert (request.ctx, request.begin, request.queued) == (0, 110, 60)
    finder.sample()
    assert finder.serve(0, 4, prompt=True) is request, "a prompt that is computed again"
    finder.sample()
    finder.sample()
    assert len(request.token_times) == 3, "a second token from one output"
    finder.span(0, 50, 290, "request")
    assert (request.marked_end, request.end) == (290, 290)
    assert finder.serve(9, 2, prompt=True) is not request


def test_a_slot_that_takes_another_request_has_that_one() -> None:
    finder = Finder()
    first = finder.serve(0, 5, prompt=True)
    finder.sample()
    second = finder.take(taken(0), 130, "request")
    assert finder.serve(5) is second, "one token looks like the next of the first request"
    assert finder.all() == [first, second]


def test_a_request_that_ends_before_its_first_step_has_no_steps() -> None:
    finder = Finder()
    request = finder.take(taken(0), 50, "request")
    finder.span(0, 50, 90, "request")
    assert request.end == request.marked_end == 90
    assert finder.serve(0, 5, prompt=True) is not request
