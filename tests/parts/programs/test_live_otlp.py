"""`instr live --otlp`: a collector gets each request once it has ended, as from `instr to-otlp`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands_kit import one_line
from tests.kit.llama_programs import llama_server
from tests.kit.native_kit import ROOT
from tests.kit.otlp_receiver import attributes_of, receiver
from tests.live.test_live_otlp import as_bytes, converted, wait_until

RUN = one_line("docs/reference/commands.md", "instr live server.log --no-browser --otlp")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spans leave after 50 ms, not 5 s."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    return


def clock_offset() -> int:
    """The wall clock minus the log's clock in ns, from the two that were read closest together."""

    def read() -> tuple[int, int]:
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        return after - before, wall - before

    return min(read() for _ in range(1000))[1]


@pytest.mark.native
def test_the_requests_of_a_server_are_there_by_its_clients_clocks(
    demo_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    offset = clock_offset()
    with receiver() as received, llama_server(demo_model, log, "-c", "2048", "-np", "2") as server:
        words = RUN.text.replace("http://localhost:4318", received.url).split()[1:]
        with subprocess.Popen(
            [sys.executable, "-m", "llamacpp_instr", *words], cwd=tmp_path, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as live:  # fmt: skip
            n = [[8, 9], [10, 11], [12, 13]]
            answers = server.complete_all([["Once upon a time"] * 2] * 3, n)
            wait_until(lambda: len(received.spans) >= 4 * len(answers))
            live.send_signal(signal.SIGINT)
            assert live.wait(60) == 0
            assert live.stderr is not None
            assert live.stderr.read() == ""
    roots: dict[int, Any] = {}
    for span in received.spans:
        of = attributes_of(span)
        if "gen_ai.usage.output_tokens" in of:
            roots[of["gen_ai.usage.output_tokens"]] = span, of
    assert len(roots) == len(answers)
    for answer in answers:
        span, of = roots[answer.timings["predicted_n"]]
        tokens = answer.timings["prompt_n"] + answer.timings["cache_n"]
        assert of["gen_ai.usage.input_tokens"] == tokens
        assert of["gen_ai.usage.cache_read.input_tokens"] == answer.timings["cache_n"]
        assert of["gen_ai.response.finish_reasons"] == ["length"]
        # the wall clock and the log's clock were read one after the other, twice
        begin, end = (t + offset for t in (answer.begin, answer.end))
        assert begin - 10_000_000 < span.start_time_unix_nano
        assert span.start_time_unix_nano < span.end_time_unix_nano
        first = span.start_time_unix_nano + of["llamacpp_instr.time_to_first_token_ns"]
        assert first < answer.first + offset + 10_000_000 < end + 20_000_000
    assert set(as_bytes(received)) == set(as_bytes(converted(log)))
