"""The packets of a trace, made with Perfetto's protobuf classes, and its interned strings.

All packets are of one sequence. So a string is written once, and later packets refer to its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
END = pb.TrackEvent.TYPE_SLICE_END
INSTANT = pb.TrackEvent.TYPE_INSTANT
COUNTER = pb.TrackEvent.TYPE_COUNTER
_SEQUENCE = {
    "trusted_packet_sequence_id": 1,
    "sequence_flags": pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE,
}

Value = str | int | float


class Packets:
    """Builds track events, and numbers the strings that they refer to.

    `take_interned` returns the new strings. They must be written before the packets that use them.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, int]] = {}
        self._interned = pb.InternedData()
        self._any_new = False

    def take_interned(self) -> bytes:
        """A packet with the strings that were interned since the last call; empty if there are
        none."""
        if not self._any_new:
            return b""
        entries, self._interned, self._any_new = self._interned, pb.InternedData(), False
        return packet(interned_data=entries)

    def intern(self, field: str, value: str) -> int:
        """The number of a string in a field of InternedData."""
        ids = self._ids.setdefault(field, {})
        number = ids.get(value)
        if number is None:
            number = ids[value] = len(ids) + 1
            entry = getattr(self._interned, field).add(iid=number)
            if isinstance(entry, pb.InternedString):
                entry.str = value.encode("utf-8", "replace")
            else:
                entry.name = valid(value)
            self._any_new = True
        return number

    def event(
        self,
        kind: int,
        track: int,
        name: str,
        category: str,
        args: Mapping[str, Value] | None = None,
        *,
        colour: str = "",
        seldom: bool = False,
    ) -> pb.TrackEvent:
        """A track event that begins a slice or is an instant.

        `seldom` says that the name is not worth interning, such as a token's text. Slices of one
        `colour`, a word, have the same colour in Perfetto's UI.
        """
        event = pb.TrackEvent(type=kind, track_uuid=track)
        if seldom:
            event.name = valid(name)
        else:
            event.name_iid = self.intern("event_names", name)
        event.category_iids.append(self.intern("event_categories", category))
        if colour:
            event.correlation_id_str_iid = self.intern("correlation_id_str", colour)
        self.add_args(event, args or {})
        return event

    def add_args(self, event: pb.TrackEvent, args: Mapping[str, Value], keep: bool = False) -> None:
        """Adds arguments in their order; `keep` interns texts, for those that occur often.

        Raises OverflowError for an integer of more than 64 bits.
        """
        for name, value in args.items():
            arg = self.add_arg(event, name)
            if isinstance(value, str):
                if keep:
                    arg.string_value_iid = self.intern("debug_annotation_string_values", value)
                else:
                    arg.string_value = valid(value)
            elif isinstance(value, bool):
                arg.bool_value = value
            elif isinstance(value, int):
                if not -(1 << 63) <= value < 1 << 63:
                    raise OverflowError
                arg.int_value = value
            else:
                arg.double_value = value

    def add_arg(self, event: pb.TrackEvent, name: str) -> pb.DebugAnnotation:
        """Adds an argument without a value."""
        iid = self.intern("debug_annotation_names", name)
        return event.debug_annotations.add(name_iid=iid)


def valid(text: str) -> str:
    """The text with `?` for lone surrogates, which are not valid UTF-8."""
    return text.encode("utf-8", "replace").decode()


def closing(track: int) -> pb.TrackEvent:
    """The event that ends the slice of a track that began last."""
    return pb.TrackEvent(type=END, track_uuid=track)


def add_packet(trace: pb.Trace, **fields: Any) -> pb.TracePacket:
    """Adds a packet of the sequence to a Trace."""
    return trace.packet.add(**_SEQUENCE, **fields)


def packet(**fields: Any) -> bytes:
    """A packet, serialized as part of a Trace."""
    trace = pb.Trace()
    add_packet(trace, **fields)
    data: bytes = trace.SerializeToString()
    return data


def event_packet(t: int, event: pb.TrackEvent) -> bytes:
    """A track event at `t`. Raises OverflowError for a time that has no place in a trace."""
    try:
        return packet(timestamp=t, track_event=event)
    except ValueError:
        raise OverflowError from None


def sample(t: int, track: int, value: float) -> bytes:
    """A counter's value from `t` on."""
    event = pb.TrackEvent(type=COUNTER, track_uuid=track)
    if isinstance(value, int):
        event.counter_value = value
    else:
        event.double_counter_value = value
    return event_packet(t, event)


def track(
    uuid: int, name: str, parent: int = 0, rank: int = 0, note: str = "", unit: str | None = None
) -> bytes:
    """The description of a track. Its children are in the order of their ranks; tracks of one name
    and one parent are shown as one. With `unit` it is a counter of bytes, or of that unit."""
    described = pb.TrackDescriptor(uuid=uuid, name=valid(name), sibling_order_rank=rank)
    if parent:
        described.parent_uuid = parent
    if note:
        described.description = valid(note)
    if unit is None:
        described.child_ordering = pb.TrackDescriptor.EXPLICIT
    elif unit == "bytes":
        described.counter.unit = pb.CounterDescriptor.UNIT_SIZE_BYTES
    else:
        described.counter.unit_name = unit
    return packet(track_descriptor=described)


def first_packets(t: int, wall: int) -> bytes:
    """Begins the sequence: times are of CLOCK_MONOTONIC, and `t` was `wall` in real time."""
    monotonic = pb.BUILTIN_CLOCK_MONOTONIC
    trace = pb.Trace()
    snapshot = trace.packet.add(trusted_packet_sequence_id=1).clock_snapshot
    snapshot.primary_trace_clock = monotonic
    snapshot.clocks.add(clock_id=monotonic, timestamp=t)
    snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_REALTIME, timestamp=wall)
    first = add_packet(trace)
    first.sequence_flags |= pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = monotonic
    data: bytes = trace.SerializeToString()
    return data
