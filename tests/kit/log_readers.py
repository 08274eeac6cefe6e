"""Every reader of whole logs, and a log whose contexts, graphs and plans come and go."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec.structs import replace

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.flat import LineSelection, expand_lines
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import LogReader, read_events
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import Compute, Context, Event, Graph, Level, Mark, Plan, StepBegin
from llamacpp_instr.log.session import load_parts
from tests.kit.made_log import encode, make_log


def whole_events(log: Path) -> list[Event]:
    """The events of a log; graphs and plans that are like others have all their columns."""
    return [event for _, event in Resolver().follow(read_events(log))]


def _perfetto(log: Path) -> None:
    with Path("/dev/null").open("wb") as out:
        write_perfetto(read_events(log), out, Options(flows=True))


def _chrome(log: Path) -> None:
    with Path("/dev/null").open("wb") as out:
        write_chrome(read_events(log), out)


READERS: dict[str, Callable[[Path], object]] = {
    "session in parts": lambda log: deque(load_parts(log, part_rows=1000), 0),
    "Perfetto": _perfetto,
    "Chrome": _chrome,
    "flat": lambda log: deque(expand_lines(read_events(log), LineSelection()), 0),
}
ALL = {**READERS, "check": lambda log: deque(check_log(log), 0)}


NOT_WHOLE = re.compile(
    r"\w+: ((model|context|graph|plan|step|compute|mark|connection) \d+ "
    r"(was never|was given|was ended|has ended|is over|never began|ends and)"
    r"|tensor \d+ of model \d+ was given|of context|occurs a second time"
    r"|graph \d+ was given without|plan \d+ is of graph|\d+ kernels, plan|split -?\d+, the graph"
    r"|node \d+ of graph|node \d+ reads|\d+ uses of"
    r"|column `\w+` (has|is missing|does not belong))"
)
"""how those findings of `check` begin that no reader can pass over"""


def refusal(name: str, path: Path) -> str | None:
    """The line that a reader refuses, and why."""
    try:
        ALL[name](path)
    except LogError as error:
        return str(error)
    return None


def assert_all_agree(path: Path, log: bytes) -> None:
    """Writes the log to `path`, and checks that every reader refuses the first event that `check`
    refuses, for the same reason, or refuses the whole file as `check` does."""
    path.write_bytes(log)
    expected = refusal("check", path)
    if expected is None:
        items = LogReader(path, "give").items()
        undecoded = {line for line, event in items if isinstance(event, str)}
        first = (
            str(finding)
            for finding in check_log(path)
            if finding.line in undecoded or NOT_WHOLE.match(finding.message)
        )
        expected = next(first, None)
    assert {name: refusal(name, path) for name in READERS} == dict.fromkeys(READERS, expected)


def findings(path: Path, log: bytes) -> list[tuple[int, str]]:
    """What `check` finds, with the line, in a log that is written to `path`."""
    path.write_bytes(log)
    return [(finding.line, finding.message) for finding in check_log(path)]


_IDS = re.compile(rb'"(t|ctx|graph|plan|step|compute|mark)":(\d+)')
_GIVEN: dict[str, type[Event]] = {
    "ctx": Context, "graph": Graph, "plan": Plan, "step": StepBegin, "compute": Compute,
    "mark": Mark,
}  # fmt: skip


def write_coming_and_going(
    path: Path, n_bytes: int, n_more: int = 0, level: Level = "detailed"
) -> int:
    """Writes a log of about `n_bytes` in which one context after the other lives for a few steps
    that build graphs and `n_more` that reuse the last one. Returns the number of contexts. `check`
    finds nothing but that the log was not closed."""
    events = make_log(Random(41).randint, n_contexts=1, level=level)[:-1]
    first = next(i for i, event in enumerate(events) if isinstance(event, Context))
    life = events[first:] + _repeated(events, n_more)
    shift = {key: sum(isinstance(e, kind) for e in life) for key, kind in _GIVEN.items()}
    shift["t"] = max(event.t for event in life) - life[0].t + 1_000_000
    pieces = _IDS.split(encode(life))
    size = n = 0
    with path.open("wb") as file:
        size += file.write(encode(events[:first]))
        while size < n_bytes:
            copy = list(pieces)
            copy[1::3] = [
                b'"%s":%d' % (key, int(number) + n * shift[key.decode()])
                for key, number in zip(pieces[1::3], pieces[2::3], strict=True)
            ]
            copy[2::3] = [b""] * len(copy[2::3])
            size += file.write(b"".join(copy))
            n += 1
    return n


def _repeated(events: list[Event], n: int) -> list[Event]:
    """The last step of a log, which must reuse its graph, `n` times, one after another."""
    begins = [i for i, event in enumerate(events) if isinstance(event, StepBegin)]
    last = events[begins[-1] :]
    assert not any(isinstance(event, (Graph, Mark)) for event in last)
    took = last[-1].t - last[0].t + 1_000
    keys = ("step", "compute", "index")
    return [
        replace(
            event,
            t=event.t + i * took,
            **{key: getattr(event, key) + i for key in keys if hasattr(event, key)},
        )
        for i in range(1, n + 1)
        for event in last
    ]
