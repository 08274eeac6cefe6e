"""A log of which the first event is known before the others are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from llamacpp_instr.log.reader import EventReader, LogEnd
from llamacpp_instr.schema import Event, SessionStart


class Begun:
    """Gives the events of `reader`, once, from the first on."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        events = iter(reader)
        first = list(islice(events, 1))
        self._events = chain(first, events)
        self.start = first[0][1] if first and isinstance(first[0][1], SessionStart) else None
        """None if the first event is damaged; reading the rest reports that"""

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        return self._events

    @property
    def path(self) -> str:
        return self._reader.path

    @property
    def end(self) -> LogEnd | None:
        return self._reader.end

    @end.setter
    def end(self, end: LogEnd | None) -> None:
        self._reader.end = end
