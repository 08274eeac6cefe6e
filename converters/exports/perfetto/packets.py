"""The packets of a trace, made with Perfetto's protobuf classes: strings, events, forms, tracks.

All packets are of one sequence. So a string is written once, and later packets refer to its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from operator import setitem
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.log.schema import CONTEXTS_KEPT

BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
END = pb.TrackEvent.TYPE_SLICE_END
INSTANT = pb.TrackEvent.TYPE_INSTANT
COUNTER = pb.TrackEvent.TYPE_COUNTER
_SEQUENCE = {
    "trusted_packet_sequence_id": 1,
    "sequence_flags": pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE,
}

Value = str | int | float
_FIELDS = {
    bool: "bool_value", int: "int_value", float: "double_value", str: "string_value",
}  # fmt: skip
"""of DebugAnnotation"""
_COUNTER_FIELDS = {int: "counter_value", float: "double_counter_value"}
"""of TrackEvent"""
FORMS, FILLS = 256, 1 << 14
"""forms (a real log has a dozen) and fills, after which all forms are made again: protobuf frees a
replaced value only together with its message"""

Slice = tuple[int, str | None, str, tuple[str, ...], str]
"""what slices have in common: track, name (None if that differs), category, names of arguments, and
TrackEvent's field for flows (or none)"""


class Packets:
    """Builds track events, and numbers the strings that they refer to.

    `take_interned` returns the new strings. They must be written before the packets that use them.
    """

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, int]] = {}
        self._interned = pb.InternedData()
        self.any_new = False
        """whether there are strings to write"""
        self._forms: dict[object, _Form] = {}
        self._n_fills = 0

    def take_interned(self) -> bytes:
        """A packet with the strings that were interned since the last call; empty if there are
        none."""
        if not self.any_new:
            return b""
        entries, self._interned, self.any_new = self._interned, pb.InternedData(), False
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
            self.any_new = True
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
            if not isinstance(value, str):
                try:
                    setattr(arg, _FIELDS.get(type(value), "double_value"), value)
                except ValueError:
                    raise OverflowError from None
            elif keep:
                arg.string_value_iid = self.intern("debug_annotation_string_values", value)
            else:
                arg.string_value = valid(value)

    def add_arg(self, event: pb.TrackEvent, name: str) -> pb.DebugAnnotation:
        """Adds an argument without a value."""
        iid = self.intern("debug_annotation_names", name)
        return event.debug_annotations.add(name_iid=iid)

    def fill(self, shape: tuple[Slice | int, ...], values: Sequence[Any]) -> bytes:
        """Slices and samples of counters, which are named by their tracks, as packets. The values
        are, for each slice, when it begins and ends, its name, flows and arguments, and for each
        sample its time and value. Raises OverflowError for an integer without room."""
        form = self._forms.get(shape)
        if form is None:
            form = self._forms[shape] = _Form(self, shape, values)
        self._n_fills += 1
        if self._n_fills % FILLS == 0 or len(self._forms) > FORMS:
            self._forms.clear()
        try:
            for place, value in zip(form.places, values, strict=True):
                place(value)
        except ValueError:
            raise OverflowError from None
        data: bytes = form.trace.SerializeToString()
        return data


class _Form:
    """The packets of a shape, built once. To write others of that shape, the values are set in the
    protobuf message, and it is serialized. Texts are valid Unicode."""

    def __init__(
        self, packets: Packets, shape: Iterable[Slice | int], values: Sequence[object]
    ) -> None:
        self.trace = pb.Trace()
        self.places: list[Callable[[Any], None]] = []
        """set one value after the other"""
        for of in shape:
            if isinstance(of, int):
                event = self._event(pb.TrackEvent(type=COUNTER, track_uuid=of))
                self._place(event, _COUNTER_FIELDS[type(values[len(self.places)])])
                continue
            track, name, category, args, flows = of
            event = self._event(packets.event(BEGIN, track, name or "", category, seldom=not name))
            self._event(closing(track))
            if name is None:
                self._place(event, "name")
            if flows:
                self.places.append(partial(setitem, getattr(event, flows), slice(None)))
            for arg in args:
                field = _FIELDS[type(values[len(self.places)])]
                self._place(packets.add_arg(event, arg), field)

    def _event(self, event: pb.TrackEvent) -> pb.TrackEvent:
        packet = add_packet(self.trace, track_event=event)
        self._place(packet, "timestamp")
        return packet.track_event

    def _place(self, message: Any, field: str) -> None:
        self.places.append(partial(setattr, message, field))


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
    uuid: int,
    name: str,
    parent: int = 0,
    rank: int = 0,
    note: str = "",
    unit: str | None = None,
    process: int = 0,
) -> bytes:
    """The description of a track. Its children are in the order of their ranks; tracks with one
    name and parent are shown as one. With `unit` it is a counter of bytes, or of that unit; with
    the number of a `process` it is that of a machine."""
    described = pb.TrackDescriptor(uuid=uuid, name=valid(name), sibling_order_rank=rank)
    if process:
        described.process.pid = process
        described.process.process_name = valid(name)
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


# --- tracks ---

HOME = "session"
"""the first context's track, which also has what belongs to no context"""
_NOTES = {
    "marks": "Spans and instants that the application named.",
    "requests": "Prompts with the tokens that followed them, from arrival to end.",
    "phases": "The parts of a step: preparing, computing, reading back.",
    "layers": "Layers, blocks in them, ops in those, as the first thread ran them.",
    "threads": "Every thread of ggml: ops, and waiting for the others at barriers.",
    "splits": "Runs of nodes that were given to one backend. If a device is asynchronous, a slice"
    " ends with the submission, not with the computation.",
    "devices": "What devices computed behind the first thread: splits, and in them layers, blocks"
    " and ops. An arrow leads from the submission. Times are on the clock of the trace, within the"
    " uncertainty among the arguments of a split.",
    "device waits": "Waiting for asynchronous backends.",
    "machines": "Commands to machines of llama.cpp's RPC backend: from sending until the reply"
    " arrived, or until everything was sent. Arrows lead to the machine and back: from a slice"
    " inside a command, or from the command itself.",
    "commands": "Commands that came over the network, from their arrival until they were done.",
    "sampler": "Choosing the next token.",
    "tokens/s": "",
    "KV": "",
    "memory": "",
    "memory of devices": "What contexts hold on a device, and what its driver reported as free.",
    "achieved GB/s": "",
    "achieved GFLOP/s": "",
    "page faults": "",
    "machine": "What other processes took.",
    "tensor statistics": "",
    "messages": "",
}
"""of the tracks below a context's, in their order"""


class Tracks:
    """Hands out the numbers of tracks, and describes them to `write` when they are first used.

    A context's track shows its steps, and its other tracks are below it. None of them is a process
    or thread track, because Perfetto would show the children of such a track beside it and in
    another order.

    The first context is part of the session, and its tracks have short names. Those of other
    contexts say whose they are, because a viewer may show any track without its parent. In a trace
    of several logs each has its own, with the log's name, below those with the `first` numbers.
    """

    def __init__(self, write: Callable[[bytes], object], log: str = "", first: int = 0) -> None:
        self._write = write
        self._log = f", {log}" if log else ""
        self._first = first
        self.latest = first
        """the largest number so far"""
        self.child = cache(self._child)
        self._contexts: dict[int, int] = {}
        self._machines: dict[str, int] = {}
        self._suffixes: dict[int, str] = {}
        """the end of the names of the tracks below a context's; empty for the first"""

    def begin(self, note: str) -> None:
        """The session has begun; `note` describes it."""
        self.home = self._new(HOME + self._log, rank=self._first, note=note)

    def context(self, ctx: int) -> int:
        """The track of a context's steps."""
        if ctx not in self._contexts:
            n = len(self._contexts)
            name = f"context {ctx}{self._log}"
            new = self.home if not n else self._new(name, rank=self._first + n)
            self._contexts[ctx] = new
            self._suffixes[new] = f" of {name}" if n or self._log else ""
        return self._contexts[ctx]

    def machine(self, name: str, note: str) -> int:
        """The track of a machine, which is a process; the tracks below it have short names."""
        if name not in self._machines:
            n = len(self._machines) + 1
            rank, process = self._first + CONTEXTS_KEPT + n, self._first + n
            track = self._new(f"machine {name}{self._log}", 0, rank, note, process=process)
            self._machines[name] = track
        return self._machines[name]

    def _child(
        self,
        parent: int,
        name: str,
        unit: str | None = None,
        lane: int = 0,  # noqa: ARG002 (the cache tells tracks apart by it)
        below: str = "",
    ) -> int:
        """A track of _NOTES below a context's track, or, if `below` names one of these, any track
        below that one. Tracks that differ only in their lane are shown as one."""
        shown = name + self._suffixes.get(parent, "")
        if below:
            group = self.child(parent, below)
            return self._new(shown, group, self.latest - self._first, unit=unit)
        return self._new(shown, parent, [*_NOTES].index(name), _NOTES[name], unit)

    def _new(
        self,
        name: str,
        parent: int = 0,
        rank: int = 0,
        note: str = "",
        unit: str | None = None,
        process: int = 0,
    ) -> int:
        self.latest += 1
        self._write(track(self.latest, name, parent, rank, note, unit, process))
        return self.latest
