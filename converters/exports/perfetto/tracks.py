"""The tracks of a trace and their order. Each is described when it is first used.

A context's track shows its steps, and its other tracks are below it in the order of ORDER. None of
them is a process or thread track, because Perfetto would show the children of such a track beside
it and in another order.
"""

from __future__ import annotations

from collections.abc import Callable

from llamacpp_instr.converters.exports.perfetto.packets import track

HOME = "session"
"""the first context's track, which also has what belongs to no context"""
ORDER = (
    "marks",
    "requests",
    "phases",
    "layers",
    "threads",
    "splits",
    "device waits",
    "sampler",
    "tokens/s",
    "KV",
    "memory",
    "achieved GB/s",
    "achieved GFLOP/s",
    "page faults",
    "machine",
    "tensor statistics",
    "messages",
)
_NOTES = {
    "marks": "Spans and instants that the application named.",
    "requests": "Prompts with the tokens that followed them, from arrival to end.",
    "phases": "The parts of a step: preparing, computing, reading back.",
    "layers": "Layers, blocks in them, ops in those, as the first thread ran them.",
    "threads": "Every thread of ggml: ops, and waiting for the others at barriers.",
    "splits": "Runs of nodes that were given to one backend. If a device is asynchronous, a slice"
    " ends with the submission, not with the computation.",
    "device waits": "Waiting for asynchronous backends.",
    "sampler": "Choosing the next token.",
    "machine": "What other processes took.",
}


class Tracks:
    """Hands out the numbers of tracks and describes them to `write`.

    The first context is part of the session, and its tracks have short names. Those of other
    contexts say whose they are, because a viewer may show any track without its parent. In a trace
    of several logs each has its own, with the log's name, below those with the `first` numbers.
    """

    def __init__(self, write: Callable[[bytes], object], log: str = "", first: int = 0) -> None:
        self._write = write
        self._log = f", {log}" if log else ""
        self._first = first
        self._uuids: dict[tuple[int, str, int], int] = {}
        self._contexts: dict[int, int] = {}
        self._suffixes: dict[int, str] = {}
        """what the tracks below a context's are called, besides; nothing for the first"""

    def begin(self, note: str) -> None:
        """The session has begun; `note` describes it."""
        self.home = self._new((0, HOME, 0), HOME + self._log, rank=self._first, note=note)

    @property
    def latest(self) -> int:
        """The largest number so far."""
        return self._first + len(self._uuids)

    def context(self, ctx: int) -> int:
        """The track of a context's steps."""
        if ctx not in self._contexts:
            n = len(self._contexts)
            name = f"context {ctx}{self._log}"
            new = self.home if not n else self._new((0, name, 0), name, rank=self._first + n)
            self._contexts[ctx] = new
            self._suffixes[new] = f" of {name}" if n or self._log else ""
        return self._contexts[ctx]

    def child(
        self, parent: int, name: str, unit: str | None = None, lane: int = 0, below: str = ""
    ) -> int:
        """A track of ORDER below a context's track, or, if `below` names one of these, any track
        below that one. Tracks that differ only in their lane are shown as one."""
        key = (parent, f"{below}/{name}" if below else name, lane)
        if key in self._uuids:
            return self._uuids[key]
        shown = name + self._suffixes.get(parent, "")
        if below:
            group = self.child(parent, below)
            return self._new(key, shown, group, len(self._uuids), unit=unit)
        return self._new(key, shown, parent, ORDER.index(name), _NOTES.get(name, ""), unit)

    def _new(
        self,
        key: tuple[int, str, int],
        name: str,
        parent: int = 0,
        rank: int = 0,
        note: str = "",
        unit: str | None = None,
    ) -> int:
        uuid = self._uuids[key] = self.latest + 1
        self._write(track(uuid, name, parent, rank, note, unit))
        return uuid
