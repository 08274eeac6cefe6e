"""aiperf loads a recorded llama-server: its requests and tokens are those of the log, and of the
server that `instr capacity` simulates from it.

Not part of `make test`: it needs aiperf. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llamacpp_instr.converters.scheduling.capacity.capacity import Recorded, recorded_server
from llamacpp_instr.converters.scheduling.capacity.server import simulate
from llamacpp_instr.log.session import load_session
from tests.kit.aiperf import Seen, load_server, write_tokenizer
from tests.kit.llama_programs import llama_server
from tests.kit.native_kit import DEMO

CLIENTS, REQUESTS = 3, 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, list[Seen]]:
    """A server of two slots with three clients, and what these saw."""
    place = tmp_path_factory.mktemp("aiperf")
    log = place / "server.log"
    write_tokenizer(place / "tokenizer", DEMO)
    with llama_server(DEMO, log, "-c", "2048", "-np", "2", "-t", "1") as server:
        seen = load_server(
            server.port, CLIENTS, place / "tokenizer", place / "export",
            "--request-count", REQUESTS, "--num-dataset-entries", REQUESTS,
            "--synthetic-input-tokens-mean", 200, "--synthetic-input-tokens-stddev", 60,
            "--output-tokens-mean", 24, "--output-tokens-stddev", 8,
            aiperf=str(Path(sys.executable).with_name("aiperf")),
        )  # fmt: skip
    return recorded_server(load_session(log)), seen


def test_the_log_has_the_requests_that_aiperf_counts(loaded: tuple[Recorded, list[Seen]]) -> None:
    recorded, seen = loaded
    assert len(seen) == REQUESTS
    in_log = sorted(
        (of.prompt + of.reused, of.reused, len(of.token_times)) for of in recorded.requests
    )
    assert in_log == sorted((of.prompt, of.cached, of.output) for of in seen)


def test_the_log_has_each_token_before_aiperf_sees_it(loaded: tuple[Recorded, list[Seen]]) -> None:
    recorded, seen = loaded
    waits = sorted(of.to_first_token or 0 for of in recorded.requests)
    seen_waits = sorted(of.first - of.begin for of in seen)
    assert all(log < client for log, client in zip(waits, seen_waits, strict=True))


def test_the_replay_serves_what_aiperf_asked_for(loaded: tuple[Recorded, list[Seen]]) -> None:
    recorded, seen = loaded
    asked = sorted((of.prompt, of.output) for of in recorded.workload.requests)
    assert asked == sorted((of.prompt, of.output) for of in seen)
    outcome = simulate(recorded.workload, recorded.settings, recorded.times)
    assert sorted(outcome.output.tolist()) == sorted(of.output for of in seen)
    assert (outcome.arrival <= outcome.begin).all()
    assert (outcome.begin < outcome.first).all()
