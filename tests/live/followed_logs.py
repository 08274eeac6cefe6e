"""Logs that are being written, and what follows them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from llamacpp_instr.converters.live.live_session import EndedIn, LiveSession
from llamacpp_instr.log.runs import FollowedLog
from llamacpp_instr.log.schema import Event, Message, SessionStart
from tests.kit.made_log import encode, make_log

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def events_of_this_process(seed: int) -> list[Event]:
    """The events of a log that is followed as long as this process lives."""
    events = make_log(Random(seed).randint)
    assert isinstance(events[0], SessionStart)
    events[0].process.pid = os.getpid()
    return events


def open_log(directory: Path, name: str = "it.log", seed: int = 5) -> tuple[Path, bytes]:
    """A log that this process is writing, and what it still lacks."""
    events = events_of_this_process(seed)
    events.insert(1, Message(t=events[0].t, level="warn", text=HOSTILE))
    lines = encode(events).splitlines(keepends=True)
    (directory / name).write_bytes(b"".join(lines[:10]))
    return directory / name, b"".join(lines[10:])


@contextmanager
def followed(
    first: Path, ended: EndedIn | None = None
) -> Iterator[tuple[LiveSession, FollowedLog]]:
    """What follows a log, of which this is the first part."""
    stop = threading.Event()
    log = FollowedLog(first, stop)
    session = LiveSession(log, ended)
    session.start()
    yield session, log
    stop.set()
    session.join()
