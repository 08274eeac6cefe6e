"""A recorded llama-server: the log against the server's own figures and its clients' clocks."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session, load_session
from tests.conftest import read_events
from tests.kit.llama_programs import Answer, llama_server
from tests.kit.reports import by_title
from tests.kit.rpc_kit import until

pytestmark = pytest.mark.native

CLIENTS, EACH = 8, 2
PROMPTS = [
    [f"Once upon a time {'there was a cat ' * i}" for _ in range(EACH)] for i in range(CLIENTS)
]
TOKENS = [[8 + EACH * i + k for k in range(EACH)] for i in range(CLIENTS)]
"""each request has a number of its own, by which its answer is found in the log"""

LONG = ("-c", "32768", "-np", "1")
"""one slot, which a request keeps until it has as many tokens as the model was trained for"""
Served = tuple[Path, list[Answer], dict[str, float]]


@pytest.fixture(scope="module")
def served(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The log of a server with four slots for eight clients, their answers, and its metrics."""
    log = tmp_path_factory.mktemp("served") / "server.log"
    with llama_server(demo_model, log, "-c", "2048", "-np", "4") as server:
        answers = server.complete_all(PROMPTS, TOKENS)
        found = re.findall(r"^llamacpp:(\w+) (\S+)$", server.get("/metrics"), re.MULTILINE)
    return log, answers, {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def session(served: Served) -> Session:
    return load_session(served[0])


@pytest.fixture(scope="module")
def requests(session: Session) -> dict[int, Request]:
    """By their number of output tokens."""
    _, found = find_requests(session)
    assert len(found) == CLIENTS * EACH, "none is missing, none is a phantom"
    return {len(request.token_times): request for request in found}


def test_every_request_has_the_tokens_that_the_server_names(
    served: Served, requests: dict[int, Request]
) -> None:
    for answer in served[1]:
        timings = answer.timings
        request = requests[timings["predicted_n"]]
        assert (request.prompt, request.reused) == (timings["prompt_n"], timings["cache_n"])


@pytest.mark.parametrize("clients", [1, 32])
def test_one_client_or_many_are_recorded_alike(
    demo_model: Path, tmp_path: Path, clients: int
) -> None:
    prompts = [[f"Once upon a time {'there was a cat ' * (i % 5)}"] * EACH for i in range(clients)]
    tokens = [[8 + EACH * i + k for k in range(EACH)] for i in range(clients)]
    log = tmp_path / "server.log"
    with llama_server(demo_model, log, "-c", "2048", "-np", "4") as server:
        answers = server.complete_all(prompts, tokens)
    _, found = find_requests(load_session(log))
    ours = sorted((len(of.token_times), of.prompt, of.reused) for of in found)
    timings = [answer.timings for answer in answers]
    assert ours == sorted((of["predicted_n"], of["prompt_n"], of["cache_n"]) for of in timings)


def test_sums_are_those_of_the_metrics(served: Served, requests: dict[int, Request]) -> None:
    metrics = served[2]
    assert sum(requests) == metrics["tokens_predicted_total"]
    assert sum(request.prompt for request in requests.values()) == metrics["prompt_tokens_total"]


def test_a_request_lies_between_its_clients_first_and_last_moment(
    served: Served, requests: dict[int, Request]
) -> None:
    """Including its time in the queue: eight clients wait for four slots."""
    for answer in served[1]:
        request = requests[answer.timings["predicted_n"]]
        assert answer.begin < request.arrival < request.token_times[0] < answer.first
        assert request.token_times[-1] < min(request.end, answer.end)
    slots = {request.seq for request in requests.values()}
    assert slots == {0, 1, 2, 3}
    waited = sorted(request.queued or 0 for request in requests.values())
    assert waited[-1] > 10 * max(waited[0], 1), "some waited for a slot"


def test_the_server_names_the_result_of_a_request(requests: dict[int, Request]) -> None:
    tasks = set()
    for n, request in requests.items():
        of = request.served
        assert of is not None
        assert (of.computed, of.cached, of.generated) == (request.prompt, request.reused, n)
        assert (of.slot, of.end, of.stream) == (request.seq, "limit", True)
        tasks.add(of.task)
    assert len(tasks) == len(requests)


def test_nothing_appears_that_no_user_caused(served: Served, session: Session) -> None:
    """A dry load, a test of the removal of sequences, and a warm-up are in the log, and marked."""
    assert list(check_log(served[0])) == []
    assert len(session.models) == len(session.contexts) == 1
    assert sum(model["dry"] for model in read_events(served[0], "model") if "dry" in model) == 1
    assert "warm-up" in session.marks["name"]
    assert "Marks" not in by_title(compute_summary(session)), "they are those of the server"


def test_a_graph_is_written_once(served: Served) -> None:
    """Batches of different shapes have one topology."""
    graphs = [event for event in read_events(served[0], "graph") if event["source"] == "decode"]
    assert len(graphs) > 4
    size = served[0].stat().st_size
    lines = served[0].read_bytes().splitlines()
    of_graphs = sum(len(line) for line in lines if line.startswith(b'{"event":"graph"'))
    assert of_graphs < size / 3


def test_a_log_has_few_bytes_for_a_compute(served: Served) -> None:
    """The demo model has 4 layers. How many batches there are depends on when clients ask. What
    does not grow with them, its graphs with all their shapes, fits into a small part."""
    sizes: Counter[str] = Counter()
    for line in served[0].read_bytes().splitlines(keepends=True):
        sizes[json.loads(line)["event"]] += len(line)
    n_computes = len(read_events(served[0], "compute"))
    assert len(read_events(served[0], "tensor")) == len(load_session(served[0]).tensors)
    assert sizes["graph"] < 60_000
    assert sum(sizes.values()) - sizes["graph"] - sizes["machine"] < 60_000 + 2_500 * n_computes


def test_a_client_that_leaves_ends_its_request(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with llama_server(demo_model, log, *LONG) as server:
        server.complete("Once upon a time", 30_000, leave_after=0.1)
        server.complete("Once upon a time", 4)
    _, requests = find_requests(load_session(log))
    assert len(requests) == 2
    left, other = requests
    assert 0 < len(left.token_times) < 30_000
    assert len(other.token_times) == 4
    assert [of.served and of.served.end for of in requests] == ["cancelled", "limit"]


def test_answers_are_the_same_recorded_or_not(demo_model: Path, tmp_path: Path) -> None:
    texts = []
    for log in (tmp_path / "server.log", None):
        with llama_server(demo_model, log, "-c", "1024", "-np", "1") as server:
            texts.append([server.complete(of[0], 24).text for of in PROMPTS[:3]])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_whole_lines(
    number: signal.Signals, demo_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    with llama_server(demo_model, log, "-c", "1024", "-np", "1", end=number) as server:
        server.complete("Once upon a time", 8)
        until(lambda: log.read_bytes().count(b'"event":"token"') == 8)
    session = load_session(log)
    closed = number != signal.SIGKILL
    assert session.log_end.state == ("closed" if closed else "unclosed")
    assert len(session.tokens) == 8
