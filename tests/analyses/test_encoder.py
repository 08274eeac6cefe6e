"""The encoder of images and audio in `instr requests`, with times that are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamacpp_instr.converters.analyses.clock import compute_requests
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.waits import waits_of
from tests.kit.reports import rows, session_of
from tests.kit.sketched_log import Sketch

IMAGE = {"kind": "image", "parts": 2, "width": 32, "height": 16, "tokens": 8}


class Server(Sketch):
    """One thread that encodes and decodes for requests, each in a sequence of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n_marks = 0

    def mark(self, name: str) -> s.Mark:
        begun = s.Mark(t=self.t, mark=self.n_marks, name=name, phase="begin", thread=0)
        self.n_marks += 1
        self.events.append(begun)
        return begun

    def end(self, mark: s.Mark, seq: int = -1) -> None:
        self.events.append(
            s.Mark(t=self.t, mark=mark.mark, name=mark.name, phase="end", thread=0, seq=seq)
        )

    def encode(self, ns: int, **data: Any) -> None:
        mark = self.mark("encode")
        self.events.append(
            s.Note(t=self.t, name="encode", data={**IMAGE, "mark": mark.mark, **data})
        )
        self.pause(ns)
        self.end(mark)

    def compute(self, seq: int, ns: int, tokens: int = 1, *, token: bool = False) -> None:
        at = len(self.events)
        self.step(ns, tokens, sampled=0 if token else None)
        for event in self.events[at:]:
            if isinstance(event, s.StepBegin):
                event.seq = [seq]
            elif isinstance(event, s.Token):
                event.seq = seq


def served(tmp_path: Path) -> Session:
    """The first request has an image after 3 tokens of text, the second begins with one. Each part
    of the time has its own number."""
    server = Server()
    first, second = server.mark("request"), server.mark("request")
    server.pause(7)  # in the queue
    server.compute(0, 100, tokens=3)
    server.encode(1000)
    server.compute(0, 200, tokens=8, token=True)
    server.pause(11)
    server.encode(3000, tokens=4)
    server.compute(1, 400, tokens=4, token=True)
    server.compute(0, 800, token=True)
    server.end(first, 0)
    server.pause(13)
    server.compute(1, 1600, token=True)
    server.end(second, 1)
    return session_of(tmp_path / "a.log", server.events)


def test_an_image_belongs_to_the_request_that_computes_it_next(tmp_path: Path) -> None:
    _, (first, second) = find_requests(served(tmp_path))
    (one,), (two,) = first.encoded, second.encoded
    assert (one.kind, one.parts, one.width, one.height, one.tokens) == ("image", 2, 32, 16, 8)
    assert (one.end - one.begin, two.end - two.begin) == (1000, 3000)
    assert first.first <= one.begin < one.end <= first.end
    assert second.begin == two.begin, "its encoder is not its queue"
    assert second.queued == 7 + 100 + 1000 + 200 + 11


def test_the_parts_of_the_time(tmp_path: Path) -> None:
    session = served(tmp_path)
    steps, requests = find_requests(session)
    first, second = waits_of(requests, steps)
    assert first._asdict() == {
        "queue": 7, "encoder": 1000, "prompt": 300, "tokens": 800, "others": 3400, "rest": 11
    }  # fmt: skip
    assert second._asdict() == {
        "queue": 1318, "encoder": 3000, "prompt": 400, "tokens": 1600, "others": 800, "rest": 13
    }  # fmt: skip
    assert [sum(waits) for waits in (first, second)] == [of.total for of in requests]
    table = rows(compute_requests(session)[-1])
    assert [row["encoder"] for row in table] == [3000, 1000]
    assert [row["waited for"] for row in table] == ["the encoder", "other requests"]


def test_what_is_not_encoding_for_a_request(tmp_path: Path) -> None:
    """An encoding without an end, a note of an application, and one that no step follows."""
    server = Server()
    server.mark("encode")
    server.events.append(s.Note(t=0, name="encode", data={**IMAGE, "mark": 0}))
    server.events.append(s.Note(t=0, name="encode", data="mine"))
    server.events.append(s.Note(t=0, name="encode", data={**IMAGE, "mark": 99}))
    server.compute(0, 100, token=True)
    server.encode(1000)
    session = session_of(tmp_path / "a.log", server.events)
    _, (request,) = find_requests(session)
    assert request.encoded == []
    assert request.total == 100
    assert "encoder" not in rows(compute_requests(session)[-1])[0]
