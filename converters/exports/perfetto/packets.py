"""The packets of a trace: interned names, tracks, and events on them, as bytes.

Field numbers are those of perfetto's perfetto_trace.proto (protos/perfetto/trace). All packets are
of one sequence, so that a string is written once and referred to by number afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from converters.exports.perfetto.wire import data, double, fixed64, number, padded, text, varint

MONOTONIC, REALTIME = 3, 1
"""BuiltinClock"""
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
"""TrackEvent.Type"""
_CLEARED, _NEEDS_STATE = 1, 2

Value = str | int | float

# tags of fields that come most often
_PACKET, _TIME, _EVENT, _ARG, _INT = (varint(tag) for tag in (0x0A, 0x40, 0x5A, 0x22, 0x20))
_SMALL = 256
"""integers below are written often: steps' sizes, states, layers"""
SEQUENCE = number(10, 1) + number(13, _NEEDS_STATE)
"""fields of every packet: the one sequence, and that it refers to interned strings"""
_KINDS: dict[str, int] = {"category": 1, "name": 2, "arg": 3, "text": 29, "colour": 43}
"""InternedData's fields"""


class Packets:
    """Makes packets; keeps which strings were already given a number.

    Interned strings that a packet needs are collected until `take_interned`, whose bytes have to
    be written before that packet.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
        self.new: list[bytes] = []
        """strings that were interned and not yet taken"""
        self._arg_names: dict[str, bytes] = {}
        self._small: dict[tuple[str, int], bytes] = {}
        self._openings: dict[tuple[int, str, str, str, int], bytes] = {}

    def take_interned(self) -> bytes:
        """A packet with the strings that were interned since the last call, or nothing."""
        if not self.new:
            return b""
        entries, self.new = b"".join(self.new), []
        return packet(data(12, entries) + SEQUENCE)

    def intern(self, kind: str, value: str) -> int:
        """The number of a string."""
        ids = self._ids[kind]
        if value not in ids:
            ids[value] = len(ids) + 1
            self.new.append(data(_KINDS[kind], number(1, ids[value]) + text(2, value)))
        return ids[value]

    # --- parts of events ---

    def arg(self, name: str, value: Value, keep: bool = False) -> bytes:
        """An argument; `keep` interns its text, which pays when it comes again."""
        if type(value) is int and 0 <= value < _SMALL:
            known = self._small.get((name, value))
            if known is None:
                known = self._small[name, value] = self._arg(name, _INT + varint(value))
            return known
        if isinstance(value, str):
            body = number(17, self.intern("text", value)) if keep else text(6, value)
        elif isinstance(value, bool):
            body = number(2, value)
        elif isinstance(value, int):
            body = _INT + varint(_int64(value))
        else:
            body = double(5, value)
        return self._arg(name, body)

    def _arg(self, name: str, value: bytes) -> bytes:
        head = self._arg_names.get(name)
        if head is None:
            head = self._arg_names[name] = number(1, self.intern("arg", name))
        body = head + value
        return _ARG + varint(len(body)) + body

    def arg_of_number(self, name: str) -> bytes:
        """An argument whose integer is to be overwritten; it ends with the padded varint."""
        return data(4, number(1, self.intern("arg", name)) + padded(4))

    def args(self, values: Mapping[str, Value], keep: bool = False) -> bytes:
        """Arguments in their order."""
        return b"".join(self.arg(name, value, keep) for name, value in values.items())

    def opening(
        self, track: int, name: str, category: str, colour: str = "", kind: int = BEGIN
    ) -> bytes:
        """The fields of a track event that begins a slice, or is an instant, without arguments.

        Slices of one `colour`, a word, look alike in Perfetto's UI whatever their names.
        """
        key = (track, name, category, colour, kind)
        body = self._openings.get(key)
        if body is None:
            body = number(9, kind) + number(11, track)
            body += number(10, self.intern("name", name))
            body += number(3, self.intern("category", category))
            body += number(54, self.intern("colour", colour)) if colour else b""
            self._openings[key] = body
        return body

    def named(self, track: int, name: str, category: str, kind: int = BEGIN) -> bytes:
        """The same for a name that is not worth a number: a token's text."""
        body = number(9, kind) + number(11, track) + text(23, name)
        return body + number(3, self.intern("category", category))


@lru_cache(1024)
def closing(track: int) -> bytes:
    """The fields of a track event that ends the slice begun last."""
    return number(9, END) + number(11, track)


def flow_from(flow: int) -> bytes:
    """A field of the event at which a flow begins."""
    return fixed64(47, flow)


def flow_to(flow: int) -> bytes:
    """A field of the event at which a flow ends."""
    return fixed64(48, flow)


def event(t: int, body: bytes) -> bytes:
    """A packet of one track event at `t`."""
    whole = _TIME + varint(t) + _EVENT + varint(len(body)) + body + SEQUENCE
    return _PACKET + varint(len(whole)) + whole


def event_to_fill(body: bytes) -> tuple[bytes, int, int]:
    """The same with a time to be overwritten: the packet, the offset of the time's padded varint,
    and where the body does."""
    time = padded(8)
    inner = data(11, body)
    whole = packet(time + inner + SEQUENCE)
    start = len(whole) - len(time + inner + SEQUENCE)
    return whole, start + 1, start + len(time) + len(inner) - len(body)


def sample(t: int, track: int, value: float) -> bytes:
    """A counter's value from `t` on."""
    body = _sampling(track)
    whole = isinstance(value, int)
    return event(t, body + (number(30, _int64(int(value))) if whole else double(44, value)))


@lru_cache(1024)
def _sampling(track: int) -> bytes:
    return number(9, COUNTER) + number(11, track)


def _int64(value: int) -> int:
    """Raises OverflowError for a number that has no place in a trace."""
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError
    return value


def track(
    uuid: int, name: str, parent: int = 0, rank: int = 0, note: str = "", unit: str | None = None
) -> bytes:
    """A track's description. Its children are in the order of their ranks; tracks of one name
    and one parent are shown as one. With `unit` it is a counter of bytes, or of what that says."""
    body = number(1, uuid) + text(2, name)
    if parent:
        body += number(5, parent)
    if note:
        body += text(14, note)
    if unit is not None:
        body += data(8, number(3, 3) if unit == "bytes" else text(6, unit))
    else:
        body += number(11, 3)
    return packet(data(60, body + number(12, rank)) + SEQUENCE)


def first_packet(t: int, wall: int) -> bytes:
    """Begins the sequence: times are of CLOCK_MONOTONIC, and `t` was `wall` in real time."""
    clocks = b"".join(
        data(1, number(1, clock) + number(2, time))
        for clock, time in ((MONOTONIC, t), (REALTIME, wall))
    )
    snapshot = packet(data(6, clocks + number(2, MONOTONIC)) + number(10, 1))
    defaults = data(59, number(58, MONOTONIC))
    return snapshot + packet(number(10, 1) + number(13, _CLEARED | _NEEDS_STATE) + defaults)


def packet(body: bytes) -> bytes:
    """A TracePacket, as an entry of a Trace."""
    return _PACKET + varint(len(body)) + body
