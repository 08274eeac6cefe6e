"""Messages of the Debug Adapter Protocol as bytes: a `Content-Length` header, then one JSON object.

Invariant: what is read is bounded, and is either a whole message or a `ProtocolError`. A request of
a browser is not a message: its first line is not one of our headers.
"""

from __future__ import annotations

import re
from io import RawIOBase
from typing import Any, BinaryIO

import msgspec

from llamacpp_instr.base.errors import UsageError

MAX_HEADER = 8 << 10
MAX_BODY = 16 << 20
"""bytes"""

_HEADER = re.compile(rb"(Content-Length|Content-Type):[ \t]*([^\r\n]*?)[ \t]*\r?\n", re.IGNORECASE)


class ProtocolError(UsageError):
    """What was received is not a message; the connection cannot go on."""


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None if the stream ended before it began. Raises `ProtocolError`."""
    length = _read_header(stream)
    if length is None:
        return None
    body = stream.read(length)
    if len(body) < length:
        raise ProtocolError(
            f"the connection ended after {len(body)} of {length} bytes of a message"
        )
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message


def write_message(stream: BinaryIO | RawIOBase, message: dict[str, Any]) -> None:
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
