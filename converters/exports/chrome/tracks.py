"""The processes and tracks of a trace: each context is a process, the first also the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

ORDER = (
    "steps", "marks", "requests", "phases", "layers", "thread", "device waits", "sampler",
    "messages",
)  # fmt: skip
_MOST_LANES = 100_000
"""tracks of one name that are shown in their order"""


class Track(NamedTuple):
    """Numbers from 1: Perfetto takes track 0 for the process itself, and two tracks of one number
    for one, whatever their processes."""

    pid: int
    tid: int


class Tracks:
    """Hands out the numbers of processes and tracks, and describes them to `write` when they are
    first used.

    In a trace of several logs each has its own, with the `log`'s name, after those `before`.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object], log: str, before: Track) -> None:
        self._write, self._log, self._before = write, log, before
        self._processes: dict[int, int] = {}
        self._tracks: dict[tuple[int, str, int], Track] = {}

    @property
    def latest(self) -> Track:
        """The largest numbers so far."""
        pid, tid = self._before
        return Track(pid + len(self._processes), tid + len(self._tracks))

    def process(self, ctx: int) -> int:
        """The number of a context's process."""
        if ctx not in self._processes:
            pid = self._processes[ctx] = self.latest.pid + 1
            name = f"context {ctx}" if ctx else "session"
            self._describe("process_name", {"pid": pid}, {"name": name + self._log})
        return self._processes[ctx]

    def on(self, ctx: int, name: str, lane: int = 0) -> Track:
        """A context's track of ORDER. Slices that overlap are on different lanes, which are tracks
        of one name; each thread is a lane of its own name."""
        key = ctx, name, lane
        if key not in self._tracks:
            track = self._tracks[key] = Track(self.process(ctx), self.latest.tid + 1)
            shown = f"{name} {lane}" if name == "thread" else name
            rank = ORDER.index(name) * _MOST_LANES + lane
            self._describe("thread_name", track._asdict(), {"name": shown})
            self._describe("thread_sort_index", track._asdict(), {"sort_index": rank})
        return self._tracks[key]

    def _describe(self, what: str, of: dict[str, int], args: dict[str, Any]) -> None:
        self._write({"ph": "M", "name": what, **of, "args": args})
