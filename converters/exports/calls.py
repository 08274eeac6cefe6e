"""The commands of llama.cpp's RPC backend as slices of a trace: on the client from sending to the
reply, on a machine from their arrival until they were done.

Invariant: slices of one connection and side do not overlap; a request and a reply lie inside
their command. A machine's times are on the client's clock, if its log was merged; otherwise there
are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llamacpp_instr.log.calls import call_columns
from llamacpp_instr.log.graph.timeline import Selection
from llamacpp_instr.log.schema import RPC_COMMANDS, Connection, Rpc

Interval = tuple[int, int]
"""begin and end in ns"""


class CallSlice(NamedTuple):
    """A command."""

    connection: int
    machine: str
    """the endpoint, as the client's user named it; empty in a machine's own log"""
    name: str
    sent: Interval | None
    """on the client: from when sending began until the reply arrived, or everything was sent"""
    request: Interval | None
    """the transit to the machine, if that is known and ends earlier: viewers draw an arrow from the
    end of a slice"""
    reply: Interval | None
    """the transit of the reply, if the machine's times are known"""
    served: Interval | None
    """on the machine"""
    args: dict[str, int]

    @property
    def ways(self) -> list[tuple[str, Interval]]:
        """What is inside a command on the client, in order, with its name."""
        both = ("request", self.request), ("reply", self.reply)
        return [(name, of) for name, of in both if of is not None]


class Machines:
    """The machines of a session, for traces that stream."""

    def __init__(self) -> None:
        self._connections: dict[int, Connection] = {}

    def add(self, connection: Connection) -> None:
        self._connections[connection.connection] = connection

    def of_device(self, device: str) -> str:
        """The machine that has a device, as ggml names it: `RPC0[host:port]`; empty for a device of
        the client."""
        name = device.partition("[")[2].removesuffix("]")
        return name if any(of.endpoint == name for of in self._connections.values()) else ""

    def about(self, machine: str) -> str:
        """What a trace says about a machine."""
        found = [of for of in self._connections.values() if of.endpoint == machine]
        cpu = next((of.host.cpu for of in found if of.host is not None), "")
        clock = "its log was not merged"
        if bounds := [of.uncertainty for of in found if of.uncertainty is not None]:
            clock = f"its times may be wrong by {max(bounds):,} ns on the client's clock"
        return ", ".join(filter(None, [cpu, clock]))

    def slices(self, event: Rpc, selection: Selection) -> Iterator[CallSlice]:
        """The selected commands."""
        of = self._connections[event.connection]
        columns = {name: at.tolist() for name, at in call_columns(event, of.side).items()}
        for values in zip(*columns.values(), strict=True):
            call = dict(zip(columns, values, strict=True))
            if not selection.has_step(call["step"]):
                continue
            sent = request = reply = served = None
            args = {"connection": of.connection, "number": call["number"]}
            args |= {"request_bytes": call["out"], "reply_bytes": call["in"]}
            if call["sent"] >= 0:
                sent = call["sent"], max(call["written"], call["answered"])
                args["queued_ns"] = call["sent"] - call["queued"]
            if call["started"] >= 0:
                served = call["started"], call["done"]
                if sent and call["answered"] >= 0:
                    reply = min(max(call["done"], sent[0]), sent[1]), sent[1]
                if sent and call["received"] < sent[1]:
                    request = sent[0], max(call["received"], sent[0])
                if sent:
                    args["to_machine_ns"] = call["received"] - call["sent"]
                if of.uncertainty is not None:
                    args["uncertainty_ns"] = of.uncertainty
            args |= {n: call[n] for n in ("step", "compute", "split") if call[n] >= 0}
            name = RPC_COMMANDS[call["command"]]
            yield CallSlice(of.connection, of.endpoint, name, sent, request, reply, served, args)
