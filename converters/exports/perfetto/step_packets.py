"""Packets of events that come in every step, built once for each shape.

Events of one shape have the same tracks, names and arguments. Only some values differ: the form's
blanks. To write an event, a form sets these fields of its protobuf message and serializes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.converters.exports.perfetto.packets import (
    BEGIN,
    COUNTER,
    Packets,
    Value,
    add_packet,
    closing,
)

FORMS = 256
"""forms that are kept; a real log has a dozen"""
FILLS = 1 << 14
"""how often a form is filled before it is made again: protobuf frees a replaced value only together
with its message"""


class Blank(NamedTuple):
    """A value that differs from event to event."""

    number: int
    """its place among the values of an event"""
    arg: str
    """DebugAnnotation's field for such a value"""
    counter: str
    """TrackEvent's field for a counter of such values"""


class Form:
    """Made by asking for blanks and adding packets; `fill` takes values in the blanks' order."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._trace = pb.Trace()
        self._n_blanks = 0
        self._setters: list[tuple[int, Callable[[Any], None]]] = []
        """set the value of that number in one place"""
        self.n_fills = 0

    # --- blanks ---

    def numbers(self, n: int) -> list[Blank]:
        """Blanks for integers."""
        return [self._blank("int_value", "counter_value") for _ in range(n)]

    def double(self) -> Blank:
        return self._blank("double_value", "double_counter_value")

    def text(self) -> Blank:
        """A blank for valid Unicode."""
        return self._blank("string_value")

    def flows(self) -> Blank:
        """A blank for a list of flows' numbers."""
        return self._blank()

    def _blank(self, arg: str = "", counter: str = "") -> Blank:
        self._n_blanks += 1
        return Blank(self._n_blanks - 1, arg, counter)

    # --- packets ---

    def slice(
        self,
        track: int,
        name: str | Blank,
        category: str,
        begin: Blank,
        end: Blank,
        args: Mapping[str, Value | Blank] | None = None,
        **flows: Blank,
    ) -> None:
        """Adds one slice; `flows` are TrackEvent's fields for flows."""
        if isinstance(name, Blank):
            event = self._packets.event(BEGIN, track, "", category, seldom=True)
            event = self._event(begin, event)
            self._place(name, event, "name")
        else:
            event = self._event(begin, self._packets.event(BEGIN, track, name, category))
        for key, value in (args or {}).items():
            if isinstance(value, Blank):
                self._place(value, self._packets.add_arg(event, key), value.arg)
            else:
                self._packets.add_args(event, {key: value})
        for key, blank in flows.items():
            self._setters.append((blank.number, partial(setitem, getattr(event, key), slice(None))))
        self._event(end, closing(track))

    def sample(self, t: Blank, track: int, value: Blank) -> None:
        """Adds a counter's value."""
        event = self._event(t, pb.TrackEvent(type=COUNTER, track_uuid=track))
        self._place(value, event, value.counter)

    def zero(self, t: Blank, track: int) -> None:
        """Adds that nothing is counted from then on."""
        self._event(t, pb.TrackEvent(type=COUNTER, track_uuid=track, counter_value=0))

    def _event(self, t: Blank, event: pb.TrackEvent) -> pb.TrackEvent:
        added = add_packet(self._trace, track_event=event)
        self._place(t, added, "timestamp")
        return added.track_event

    def _place(self, blank: Blank, message: Any, field: str) -> None:
        self._setters.append((blank.number, partial(setattr, message, field)))

    def fill(self, *values: Any) -> bytes:
        """The packets with these values. Raises OverflowError for an integer without room."""
        self.n_fills += 1
        try:
            for number, set_value in self._setters:
                set_value(values[number])
        except ValueError:
            raise OverflowError from None
        data: bytes = self._trace.SerializeToString()
        return data


class Forms:
    """Keeps forms by shape."""

    def __init__(self) -> None:
        self._forms: dict[object, Form] = {}

    def fill(self, make: Callable[..., Form], shape: tuple[object, ...], *values: Any) -> bytes:
        """The packets of an event. `make(*shape)` gives the form for events of that shape. Raises
        OverflowError for an integer without room."""
        form = self._forms.get((make, shape))
        if form is None or form.n_fills >= FILLS:
            form = self._forms[make, shape] = make(*shape)
            if len(self._forms) > FORMS:
                del self._forms[next(iter(self._forms))]
        return form.fill(*values)
