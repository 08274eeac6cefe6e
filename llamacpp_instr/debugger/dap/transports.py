"""Carries the protocol: its messages as bytes, over standard input and output, and over TCP to this
machine's own user.

Invariant: on standard output, nothing but messages leaves, whatever else this process or a library
prints. TCP is served on the loopback interface only. A client that does not read never holds up the
run: messages wait for it in a thread of their own. What is read is bounded, and is a whole message
or a `ProtocolError`, such as a browser's request: its first line is not one of our headers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import BinaryIO

import msgspec

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.base.processes import is_ours
from llamacpp_instr.base.terminal import handled, notice
from llamacpp_instr.debugger.dap.adapter import Adapter, Json, ProtocolError

MAX_HEADER = 8 << 10
MAX_BODY = 16 << 20  # bytes
LOOPBACK = "127.0.0.1"
WAITING = 4096  # messages that a client may be behind; then its connection ends
PATIENCE_S = 1.0  # how long the end waits for a client that reads nothing
MakeAdapter = Callable[[Callable[[Json], None]], Adapter]

_HEADER = re.compile(rb"(Content-Length|Content-Type):[ \t]*([^\r\n]*?)[ \t]*\r?\n", re.IGNORECASE)


def read_message(stream: BinaryIO) -> Json | None:
    """The next message; None if the stream ended before it began. Raises `ProtocolError`."""
    length = _read_header(stream)
    if length is None:
        return None
    body = stream.read(length)
    if len(body) < length:
        raise ProtocolError(
            f"the connection ended after {len(body)} of {length} bytes of a message"
        )
    return decode_message(body)


def decode_message(body: bytes | str) -> Json:
    """The message in a JSON text. Raises `ProtocolError`."""
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message


def write_message(stream: BinaryIO | RawIOBase, message: Json) -> None:
    """Write one message to a stream without a buffer. NaN and infinity become null."""
    body = msgspec.json.encode(message)
    data = memoryview(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    while data:
        data = data[stream.write(data) :]


def _read_header(stream: BinaryIO) -> int | None:
    """The length of the body that follows, None at the end of the stream."""
    length: int | None = None
    read = 0
    while True:
        line = stream.readline(MAX_HEADER - read + 1)
        read += len(line)
        if not line and not read:
            return None
        if read > MAX_HEADER:
            raise ProtocolError(f"a header has more than {MAX_HEADER} bytes")
        if line in (b"\r\n", b"\n"):
            break
        field = _HEADER.fullmatch(line)
        if field is None:
            start = line[:60].decode(errors="replace").strip()
            raise ProtocolError(
                f"{start!r} is not the header of a message; is this a debugger's client?"
            )
        if field[1].lower() == b"content-length":
            if not re.fullmatch(rb"\d{1,10}", field[2]):
                value = field[2][:60].decode(errors="replace")
                raise ProtocolError(f"Content-Length is {value!r}, not a number of bytes")
            length = int(field[2])
    if length is None:
        raise ProtocolError("a header has no Content-Length")
    if length > MAX_BODY:
        raise ProtocolError(f"a message of {length} bytes is too long; at most {MAX_BODY} are read")
    return length


def serve_stdio(make: MakeAdapter) -> None:
    """Serve the client at standard input until it disconnects. Raises `ProtocolError` for what is
    not a message; in every case the run is ended, and its log is whole."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as out, ends_by_signals():
        os.dup2(2, 1)  # whatever else is printed goes to standard error
        serve(sys.stdin.buffer, out, make, lambda: os.kill(os.getpid(), signal.SIGTERM))


def serve_tcp(make: MakeAdapter, port: int, ready: Callable[[int], None]) -> None:
    """Serve one client after the other on a port of the loopback interface, until Ctrl-C; port 0
    takes a free one, and `ready` gets it. Raises `UsageError` if the port is in use."""
    with socket.socket() as listener, ends_by_signals():
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            why = reason(error)
            raise UsageError(f"port {port} cannot be used: {why}; choose another") from None
        listener.listen()
        ready(listener.getsockname()[1])
        while True:
            connection, address = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                if is_ours(address, listener.getsockname()):
                    _serve_connection(connection, make)
                else:
                    notice("a connection from another user was refused")


def serve(source: BinaryIO, out: RawIOBase, make: MakeAdapter, hang_up: Callable[[], None]) -> None:
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

    def __init__(self, out: RawIOBase, hang_up: Callable[[], None]) -> None:
        self._waiting: queue.Queue[Json | None] = queue.Queue(WAITING)
        self._hang_up: Callable[[], None] | None = hang_up
        self._thread = threading.Thread(target=self._write, args=(out,), daemon=True)
        self._thread.start()

    def send(self, message: Json | None) -> None:
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

    def _write(self, out: RawIOBase) -> None:
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


@contextlib.contextmanager
def ends_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end what is inside: editors stop an adapter this way."""
    interrupt = signal.default_int_handler
    with contextlib.suppress(KeyboardInterrupt), handled(interrupt, "SIGTERM", "SIGHUP"):
        yield
