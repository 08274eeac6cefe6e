"""A recorded llama-server with a multimodal projector: the time of its encoder is in the request
that waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.analyses.clock import compute_requests
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.waits import waits_of
from tests.conftest import read_events
from tests.kit import projectors
from tests.kit.llama_programs import Answer, llama_server
from tests.kit.reports import rows

pytestmark = pytest.mark.native

WIDTH = 256
"""of the demo model"""
PROMPTS = [("Once upon a time", 0), ("Once upon a <image> time", 1), ("<image> and <image> sat", 2)]
"""with their numbers of images; llama-server has no logits after one at the end"""


@pytest.fixture(scope="module")
def served(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """Two slots; each request has one more token than the previous one."""
    directory = tmp_path_factory.mktemp("images")
    log, projector = directory / "server.log", directory / "mmproj.gguf"
    projectors.write_projector(projector, WIDTH)
    with llama_server(demo_model, log, "--mmproj", str(projector), "-c", "1024", "-np", "2") as of:
        prompts: list[Any] = []
        for text, n in PROMPTS:
            images = [projectors.image(10 * n + i) for i in range(n)]
            prompts.append([of.with_images(text, *images) if n else text])
        return log, of.complete_all(prompts, [[8 + i] for i in range(len(prompts))])


@pytest.fixture(scope="module")
def session(served: tuple[Path, list[Answer]]) -> Session:
    assert list(check_log(served[0])) == []
    return load_session(served[0])


def test_an_encoding_is_inside_its_request(
    served: tuple[Path, list[Answer]], session: Session
) -> None:
    _, requests = find_requests(session)
    assert len(requests) == len(PROMPTS)
    for answer, (_, n) in zip(served[1], PROMPTS, strict=True):
        (request,) = [of for of in requests if len(of.token_times) == answer.timings["predicted_n"]]
        assert len(request.encoded) == n
        assert request.prompt == answer.timings["prompt_n"]
        for of in request.encoded:
            assert (of.kind, of.parts, of.tokens) == ("image", 1, projectors.TOKENS)
            assert (of.width, of.height) == (projectors.SIZE,) * 2
            assert answer.begin < request.arrival < of.begin < of.end < request.token_times[0]
            begins, ends = session.steps["begin"], session.steps["end"]
            assert ((of.end <= begins) | (ends <= of.begin)).all(), "no step is in it"


def test_its_time_is_a_part_of_the_requests(session: Session) -> None:
    steps, requests = find_requests(session)
    for request, waits in zip(requests, waits_of(requests, steps), strict=True):
        assert sum(waits) == request.total
        assert min(waits) >= 0
        assert (waits.encoder > 0) == bool(request.encoded)
    shown = {row["output"]: row["encoder"] for row in rows(compute_requests(session)[-1])}
    assert {n: shown[8 + n] > 0 for n in range(3)} == {0: False, 1: True, 2: True}


def test_answers_are_the_same_recorded_or_not(
    served: tuple[Path, list[Answer]], demo_model: Path, tmp_path: Path
) -> None:
    projector = projectors.write_projector(tmp_path / "mmproj.gguf", WIDTH)
    with llama_server(demo_model, None, "--mmproj", str(projector), "-c", "1024") as server:
        prompt = server.with_images(PROMPTS[1][0], projectors.image(10))
        assert server.complete(prompt, 9).text == served[1][1].text


def test_the_log_has_the_span_and_what_was_encoded(served: tuple[Path, list[Answer]]) -> None:
    marks = [of for of in read_events(served[0], "mark") if of["name"] == "encode"]
    notes = [of["data"]["mark"] for of in read_events(served[0], "note") if of["name"] == "encode"]
    assert sorted(of["mark"] for of in marks if of["phase"] == "begin") == sorted(notes)
    assert len(marks) == 2 * len(notes) == 6
