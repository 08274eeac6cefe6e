"""The bytes of the Debug Adapter Protocol: what is a message, and what ends a connection."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.debugger.dap.adapter import ProtocolError
from llamacpp_instr.debugger.dap.transports import MAX_BODY, MAX_HEADER, read_message, write_message

TEXT = st.text(max_size=8)
VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT | st.lists(TEXT)
MESSAGES = st.dictionaries(TEXT, VALUES, max_size=4)


class OneByteAtATime(io.RawIOBase):
    """A connection whose bytes arrive one by one."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._data.read(1)
        buffer[: len(piece)] = piece
        return len(piece)


def sent(*messages: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    for message in messages:
        write_message(stream, message)
    return stream.getvalue()


@settings(max_examples=50)
@given(st.lists(MESSAGES, max_size=3))
def test_what_is_written_is_read_in_pieces_of_any_size(messages: list[dict[str, Any]]) -> None:
    data = sent(*messages)
    for stream in (io.BytesIO(data), io.BufferedReader(OneByteAtATime(data))):
        assert [read_message(stream) for _ in messages] == messages
        assert read_message(stream) is None


@settings(max_examples=50)
@given(MESSAGES, st.data())
def test_a_message_that_is_cut_off_is_refused(message: dict[str, Any], data: st.DataObject) -> None:
    whole = sent(message)
    at = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(ProtocolError):
        read_message(io.BytesIO(whole[:at]))


@given(st.binary(max_size=300))
def test_other_bytes_are_messages_or_refused(data: bytes) -> None:
    stream = io.BytesIO(data)
    with contextlib.suppress(ProtocolError):
        while (message := read_message(stream)) is not None:
            assert isinstance(message, dict)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "is not the header of a message"),
        (b"Content-Type: x\r\n\r\n{}", "no Content-Length"),
        (b"Content-Length: -1\r\n\r\n{}", "not a number of bytes"),
        (b"Content-Length: 2e1\r\n\r\n{}", "not a number of bytes"),
        (b"Content-Length: 2\r\n\r\n[]", "not a JSON object"),
        (b"Content-Length: 2\r\n\r\n{'", "is not JSON"),
        (b"Content-Length: 2\r\n\r\n\xff\xff", "is not JSON"),
        (b"Content-Length: 9\r\n\r\n{}", "after 2 of 9 bytes"),
        (b"Content-Length: 2", "is not the header of a message"),
    ],
)
def test_one_line_says_what_is_wrong(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        read_message(io.BytesIO(data))


def test_a_long_header_and_a_long_message_are_not_read_to_their_end() -> None:
    header = io.BytesIO(b"Content-Type: " + b"x" * 2 * MAX_HEADER)
    with pytest.raises(ProtocolError, match=f"more than {MAX_HEADER} bytes"):
        read_message(header)
    assert header.tell() <= MAX_HEADER + 1
    body = io.BytesIO(b"Content-Length: %d\r\n\r\n{}" % (MAX_BODY + 1))
    with pytest.raises(ProtocolError, match="too long"):
        read_message(body)
    assert body.read() == b"{}"


def test_deep_nesting_is_refused() -> None:
    body = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with pytest.raises(ProtocolError, match="not JSON"):
        read_message(io.BytesIO(b"Content-Length: %d\r\n\r\n%b" % (len(body), body)))


def test_numbers_that_json_lacks_are_null() -> None:
    assert read_message(io.BytesIO(sent({"mean": float("nan")}))) == {"mean": None}
