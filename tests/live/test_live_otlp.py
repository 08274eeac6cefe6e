"""`instr live --otlp`: a collector gets each request once it has ended, as from `instr to-otlp`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from llamacpp_instr.converters.exports.otlp import sending
from llamacpp_instr.log import schema as s
from tests.kit.in_process import instr_here
from tests.kit.made_log import encode
from tests.kit.noted_log import closed, noted
from tests.kit.otlp_receiver import Receiver, receiver
from tests.live.followed_logs import followed

PATIENCE_S = 120


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spans leave after 50 ms, not 5 s, and a collector may take its time."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE_S))
    return


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def lines_of(events: list[s.Event]) -> list[bytes]:
    """The lines of a log that this process writes."""
    assert isinstance(events[0], s.SessionStart)
    events[0].process.pid = os.getpid()
    return encode(events).splitlines(keepends=True)


def as_bytes(received: Receiver) -> list[bytes]:
    return sorted(span.SerializeToString(deterministic=True) for span in received.spans)


def converted(log: Path) -> Receiver:
    with receiver() as received:
        assert instr_here("to-otlp", log, "--endpoint", received.url).returncode == 0
    return received


def test_a_collector_gets_what_ends_while_the_log_grows(tmp_path: Path) -> None:
    log, events = tmp_path / "server.log", noted(Random(4))
    lines = lines_of(closed(events))
    half = len(lines) // 2
    log.write_bytes(b"".join(lines[:half]))
    first = converted(log)
    warnings: list[str] = []
    with (
        receiver() as received,
        sending(received.url, warnings.append) as ended,
        followed(log, ended) as (session, _),
    ):
        # all but those under way, of which the log has only the beginning
        wait_until(lambda: len(received.spans) > len(first.spans) / 2)
        with log.open("ab") as file:
            file.write(b"".join(lines[half:]))
        session.join()
    assert as_bytes(received) == as_bytes(converted(log))
    assert warnings == []


def test_what_is_under_way_is_not_sent_when_one_stops_to_watch(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    events = noted(Random(4))
    log.write_bytes(b"".join(lines_of(events[: len(events) // 2])))
    with (
        receiver() as received,
        sending(received.url, pytest.fail) as ended,
        followed(log, ended) as (session, _),
    ):
        wait_until(lambda: not session.is_catching_up)
    assert 0 < len(received.spans) < len(converted(log).spans)
    assert set(as_bytes(received)) <= set(as_bytes(converted(log)))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_collector_that_takes_nothing_is_one_line_and_the_rest_goes_on(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it tries again until then
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    log, events = tmp_path / "server.log", noted(Random(4))
    lines = lines_of(closed(events))
    log.write_bytes(b"".join(lines[: len(lines) // 2]))
    warnings: list[str] = []
    with receiver() as gone:
        pass
    with receiver(401) as refusing:
        url = refusing.url if is_there else gone.url
        with sending(url, warnings.append) as ended, followed(log, ended) as (session, _):
            wait_until(lambda: warnings)
            with log.open("ab") as file:
                file.write(b"".join(lines[len(lines) // 2 :]))
            session.join()
            assert session.look(lambda state: state.lanes.n_requests) > 100
    (line,) = warnings
    assert line.startswith(f"{url}/v1/traces takes no spans: ")
    assert line.endswith("; they are lost, and the next will be sent")
    assert "\n" not in line
