"""Packets of what comes in every step: built once as forms, of which only blanks differ.

Events of one shape (the same track, name, arguments) differ in numbers and in texts of one length.
Those are blanks of a fixed width at known places, and numpy fills them in for many events at once.

Invariant: packets are written in the order in which their events were added, since for equal times
that order decides what is nested in what; and what waits is bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from converters.exports.perfetto.packets import BEGIN, COUNTER, END, SEQUENCE, Packets, Value
from converters.exports.perfetto.wire import number, padded_words, varint

WAITING = 1 << 19
"""bytes of packets that are filled in at once"""
FORMS = 256
"""forms that are kept; a real log has a dozen"""
_LARGEST = 1 << 14
"""bytes of a form that is kept"""
_NUMBER = 10
"""bytes of a blank number: a varint of all 64 bits, so that negative ones have room"""


class Blank(NamedTuple):
    """A place for a value that differs from event to event."""

    size: int
    """bytes in the packet"""
    at: int
    """offset of the value in the bytes of one event's values"""
    wire: int
    """protobuf's wire type: 0 varint, 1 eight bytes, 2 text"""
    arg: int
    """DebugAnnotation's field for such a value"""


Part = bytes | Blank


class Form:
    """Made by asking for blanks and adding packets; its values are given in the blanks' order."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._format = "<"
        self._parts: list[Part] = []
        self.rows: list[bytes] = []
        """values of the events that wait"""

    # --- blanks ---

    def numbers(self, n: int) -> list[Blank]:
        """Blanks for integers of 64 bits with a sign."""
        return [self._blank("q", _NUMBER, 0, 4) for _ in range(n)]

    def double(self) -> Blank:
        return self._blank("d", 8, 1, 5)

    def flow(self) -> Blank:
        """A blank for the number of a flow."""
        return self._blank("Q", 8, 1, 0)

    def text(self, length: int) -> Blank:
        """A blank for exactly `length` bytes of UTF-8."""
        return self._blank(f"{length}s", length, 2, 6)

    def _blank(self, kind: str, size: int, wire: int, arg: int) -> Blank:
        at = struct.calcsize(self._format)
        self._format += kind
        return Blank(size, at, wire, arg)

    # --- packets; field numbers are those of TracePacket (1 to 13) and TrackEvent ---

    def slice(
        self,
        track: int,
        name: str | Blank,
        category: str,
        begin: Blank,
        end: Blank,
        args: dict[str, Value | Blank] | None = None,
        extra: Sequence[Part] = (),
    ) -> None:
        """Adds one slice; `extra` are further fields."""
        opening: list[Part] = [number(9, BEGIN) + number(11, track)]
        if isinstance(name, str):
            opening.append(number(10, self._packets.intern("name", name)))
        else:
            opening += blank_field(23, name)
        opening.append(number(3, self._packets.intern("category", category)))
        for key, value in (args or {}).items():
            opening += self._arg(key, value)
        self._event(begin, [*opening, *extra])
        self._event(end, [number(9, END) + number(11, track)])

    def sample(self, t: Blank, track: int, value: Blank) -> None:
        """Adds a counter's value."""
        head = number(9, COUNTER) + number(11, track)
        self._event(t, [head, *blank_field(30 if value.wire == 0 else 44, value)])

    def _arg(self, name: str, value: Value | Blank) -> list[Part]:
        if not isinstance(value, Blank):
            return [self._packets.arg(name, value)]
        head = number(1, self._packets.intern("arg", name))
        return _message(4, [head, *blank_field(value.arg, value)])

    def _event(self, t: Blank, body: list[Part]) -> None:
        self._parts += _message(1, [*blank_field(8, t), *_message(11, body), SEQUENCE])

    # --- filling ---

    def close(self) -> Form:
        """Nothing is added any more."""
        self.pack = struct.Struct(self._format).pack
        """makes one event's values into bytes; struct.error for a number that has no room"""
        self._row = struct.calcsize(self._format)
        self._bytes = np.frombuffer(
            b"".join(p if isinstance(p, bytes) else _EMPTY[p.wire](p.size) for p in self._parts),
            np.uint8,
        )
        self.size = len(self._bytes)
        """bytes of one event's packets"""
        places: list[list[tuple[int, int, int]]] = [[], [], []]
        at = 0
        for part in self._parts:
            if isinstance(part, Blank):
                places[part.wire].append((at, part.at, part.size))
                at += part.size
            else:
                at += len(part)
        self._parts.clear()
        self._number_at, self._number_of = _columns(places[0])
        self._word_at, self._word_of = _columns(places[1])
        self._texts = places[2]
        return self

    def fill(self) -> list[memoryview]:
        """The packets of every event that waited; none waits any more."""
        n, size = len(self.rows), self.size
        # the last word of each may reach beyond the end
        values = np.frombuffer(b"".join([*self.rows, bytes(8)]), np.uint8)
        self.rows.clear()
        out = np.empty(n * size + 8, np.uint8)
        rows = out[:-8].reshape(n, size)
        rows[:] = self._bytes
        # the same bytes as words that begin at any byte
        given = np.ndarray((n, self._row), "<u8", values, strides=(self._row, 1))
        words = np.ndarray((n, size), "<u8", out, strides=(size, 1))
        numbers = given[:, self._number_of]
        words[:, self._number_at] = padded_words(numbers)
        high = numbers >> np.uint64(56)
        if high.any():
            rows[:, self._number_at + 8] = high | 0x80
            rows[:, self._number_at + 9] = high >> np.uint64(7)
        if len(self._word_at):
            words[:, self._word_at] = given[:, self._word_of]
        if self._texts:
            texts = values[:-8].reshape(n, self._row)
            for at, of, length in self._texts:
                rows[:, at : at + length] = texts[:, of : of + length]
        view = memoryview(out.data)
        return [view[at : at + size] for at in range(0, n * size, size)]


Row = tuple[Form, bytes]
"""an event whose values are known"""


class Forms:
    """Keeps forms by shape, and the events that wait, in their order."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._forms: dict[object, Form] = {}
        self._order: list[Form | bytes] = []
        self._size = 0

    def row(self, make: Callable[..., Form], shape: tuple[object, ...], *values: Any) -> Row:
        """An event that is to be added later. `make(*shape)` gives the form for all events of
        that shape; it is asked once. Raises OverflowError for numbers beyond 64 bits."""
        key = (make, shape)
        form = self._forms.get(key)
        if form is None:
            form = make(*shape).close()
            if form.size <= _LARGEST:
                self._forms[key] = form
            if len(self._forms) > FORMS:
                del self._forms[next(iter(self._forms))]
        try:
            return form, form.pack(*values)
        except struct.error:
            raise OverflowError from None

    def add(self, make: Callable[..., Form], shape: tuple[object, ...], *values: Any) -> None:
        """Adds an event; as `row`."""
        self.add_row(self.row(make, shape, *values))

    def add_row(self, row: Row) -> None:
        """Adds an event that was made before."""
        form, values = row
        form.rows.append(values)
        self._order.append(form)
        self._size += form.size
        if self._size >= WAITING:
            self.flush()

    def add_packets(self, packets: bytes) -> None:
        """Adds what is not worth a form."""
        self._order.append(packets)
        self._size += len(packets)
        if self._size >= WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes all that waits."""
        if not self._order:
            return
        order, self._order, self._size = self._order, [], 0
        filled = {form: iter(form.fill()) for form in {*order} if isinstance(form, Form)}
        self._write(b"".join([p if isinstance(p, bytes) else next(filled[p]) for p in order]))


def blank_field(number_of: int, blank: Blank) -> list[Part]:
    """A field that is a blank."""
    head = varint(number_of << 3 | blank.wire)
    return [head + varint(blank.size) if blank.wire == 2 else head, blank]


def _message(number_of: int, parts: Sequence[Part]) -> list[Part]:
    size = sum(len(part) if isinstance(part, bytes) else part.size for part in parts)
    return [varint(number_of << 3 | 2) + varint(size), *parts]


def _columns(places: list[tuple[int, int, int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Offsets of the blanks in the packets, and of their values."""
    return (
        np.array([at for at, _, _ in places], np.intp),
        np.array([of for _, of, _ in places], np.intp),
    )


_EMPTY: tuple[Callable[[int], bytes], ...] = (
    lambda size: b"\x80" * (size - 1) + b"\0",
    bytes,
    bytes,
)
"""a blank in the form, by its wire type"""
