"""Carries the protocol: over standard input and output, and over TCP to this machine's own user.

Invariant: with standard output nothing but messages leaves through it, whatever else this process,
or a library, prints. TCP is served on the loopback interface only. A client that does not read
never holds the run: messages wait for it in a thread of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import handled, notice
from llamacpp_instr.debugger.dap.adapter import Adapter
from llamacpp_instr.debugger.dap.framing import ProtocolError, read_message, write_message

LOOPBACK = "127.0.0.1"
WAITING = 4096
"""messages that a client may be behind; then its connection ends"""
PATIENCE_S = 1.0
"""how long the end waits for a client that reads nothing"""
MakeAdapter = Callable[[Callable[[dict[str, Any]], None]], Adapter]


def serve_stdio(make: MakeAdapter) -> None:
    """Serve the client at standard input until it disconnects. Raises `ProtocolError` for what is
    no message; the run is ended, and its log is whole, in every case."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out, ends_by_signals():
        os.dup2(2, 1)  # what else is printed goes to standard error
        serve(sys.stdin.buffer, out, make, lambda: os.kill(os.getpid(), signal.SIGTERM))


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


def serve(
    source: BinaryIO, out: io.RawIOBase, make: MakeAdapter, hang_up: Callable[[], None]
) -> None:
    """Carry messages between streams and an adapter until the client disconnects or its stream
    ends. `hang_up` ends the stream of a client that does not read. Raises `ProtocolError`."""
    outbox = _Outbox(out, hang_up)
    adapter = make(outbox.send)
    try:
        while not adapter.is_over and (message := read_message(source)) is not None:
            adapter.handle(message)
    finally:
        adapter.close()
        outbox.close()


class _Outbox:
    """Writes messages in a thread of its own."""

    def __init__(self, out: io.RawIOBase, hang_up: Callable[[], None]) -> None:
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._hang_up: Callable[[], None] | None = hang_up
        self._thread = threading.Thread(target=self._write, args=(out,), daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any] | None) -> None:
        """Never waits."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            hang_up, self._hang_up = self._hang_up, None
            if hang_up is not None:
                notice("the connection was closed: its client does not read")
                hang_up()

    def close(self) -> None:
        """Wait for what was sent, as long as the client reads."""
        self.send(None)
        left = WAITING + 1
        while self._thread.is_alive() and self._waiting.qsize() < left:
            left = self._waiting.qsize()
            self._thread.join(PATIENCE_S)

    def _write(self, out: io.RawIOBase) -> None:
        while (message := self._waiting.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # the client may be gone
                write_message(out, message)


def _serve_connection(connection: socket.socket, make: MakeAdapter) -> None:
    def hang_up() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    with connection.makefile("rb") as source, connection.makefile("wb", buffering=0) as out:
        try:
            serve(source, out, make, hang_up)
        except ProtocolError as error:
            notice(f"the connection was closed: {error}")
        finally:
            hang_up()


def _is_ours(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether a connection comes from a process of our user, as Linux's table of sockets shows.
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
    interrupt = signal.default_int_handler
    with contextlib.suppress(KeyboardInterrupt), handled(interrupt, "SIGTERM", "SIGHUP"):
        yield
