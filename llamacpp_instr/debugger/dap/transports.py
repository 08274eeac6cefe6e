"""Carries the protocol: over standard input and output, and over TCP to this machine's own user.

Invariant: with standard output nothing but messages leaves through it, whatever else this process,
or a library, prints. TCP is served on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llamacpp_instr.debugger.dap.adapter import Adapter
from llamacpp_instr.debugger.dap.framing import ProtocolError, read_message, write_message
from llamacpp_instr.errors import UsageError
from llamacpp_instr.terminal import notice

LOOPBACK = "127.0.0.1"
MakeAdapter = Callable[[Callable[[dict[str, Any]], None]], Adapter]


def serve_stdio(make: MakeAdapter) -> None:
    """Serve the client at standard input until it disconnects. Raises `ProtocolError` for what is
    no message; the run is ended, and its log is whole, in every case."""
    with os.fdopen(os.dup(1), "wb") as out, ends_by_signals():
        os.dup2(2, 1)  # what else is printed goes to standard error
        serve(sys.stdin.buffer, out, make)


def serve_tcp(make: MakeAdapter, port: int, ready: Callable[[int], None]) -> None:
    """Serve one client after the other on a port of the loopback interface, until Ctrl-C; 0 takes a
    free one, and `ready` gets it. Raises `UsageError` if the port is in use."""
    with socket.socket() as listener, ends_by_signals():
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"port {port} cannot be used: {reason}; choose another") from None
        listener.listen()
        ready(listener.getsockname()[1])
        while True:
            connection, address = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                if _is_ours(address, listener.getsockname()):
                    _serve_connection(connection, make)
                else:
                    notice("a connection of another user was refused")


def serve(source: BinaryIO, out: BinaryIO, make: MakeAdapter) -> None:
    """Carry messages between a stream and an adapter until the client disconnects or the stream
    ends. Raises `ProtocolError`."""

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client may be gone
            write_message(out, message)

    adapter = make(send)
    try:
        while not adapter.is_over and (message := read_message(source)) is not None:
            adapter.handle(message)
    finally:
        adapter.close()


def _serve_connection(connection: socket.socket, make: MakeAdapter) -> None:
    with connection.makefile("rb") as source, connection.makefile("wb") as out:
        try:
            serve(source, out, make)
        except ProtocolError as error:
            notice(f"the connection was closed: {error}")


def _is_ours(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether a connection comes from a process of our user, as Linux's table of sockets tells.
    Other systems have no such table, and every connection counts as ours there."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        return True
    ends = f"{_as_in_table(peer)} {_as_in_table(own)}"
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if " ".join(fields[1:3]) == ends:
            return int(fields[7]) == os.getuid()
    return False


def _as_in_table(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


@contextlib.contextmanager
def ends_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end what is inside: editors stop an adapter like this."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            before[number] = signal.signal(number, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
