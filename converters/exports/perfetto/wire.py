"""Protobuf's wire format: the few encodings that a trace needs, and padded varints.

https://protobuf.dev/programming-guides/encoding. A varint may be longer than it has to be: bytes
of zero bits at its end, which every parser accepts, give a number a fixed width, so that it can be
overwritten in place.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

PADDED = 9
"""bytes of a padded varint: 63 bits"""


def varint(value: int) -> bytes:
    """An unsigned number below 2**64; negative ones as protobuf's int64 has them."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    if value < 0x4000:
        return _LAST[value]
    out = _NOT_LAST[value & 0x3FFF]
    value >>= 14
    while value >= 0x4000:
        out += _NOT_LAST[value & 0x3FFF]
        value >>= 14
    return out + _LAST[value]


# 14 bits at once: as the last of a number, without the bytes that it does not need, or before it
_LAST = [bytes((v,)) if v < 0x80 else bytes((v & 0x7F | 0x80, v >> 7)) for v in range(0x4000)]
_NOT_LAST = [bytes((v & 0x7F | 0x80, v >> 7 | 0x80)) for v in range(0x4000)]


def number(field: int, value: int) -> bytes:
    """A field of type uint64, int64, bool or enum."""
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    """A field of type bytes or message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A field of type string. Replaces lone surrogates, which are not valid UTF-8."""
    return data(field, value.encode("utf-8", "replace"))


def double(field: int, value: float) -> bytes:
    """A field of type double."""
    return varint(field << 3 | 1) + struct.pack("<d", value)


def fixed64(field: int, value: int) -> bytes:
    """A field of type fixed64."""
    return varint(field << 3 | 1) + struct.pack("<Q", value)


def padded(field: int) -> bytes:
    """A field whose varint is 0 and PADDED bytes wide, to be overwritten."""
    return varint(field << 3) + b"\x80" * (PADDED - 1) + b"\0"


def padded_words(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first 8 bytes of the padded varints of `values`, each as one little-endian word: 7 bits
    a byte, all with the bit that says that more follows. What is above their lower 56 bits is left
    to the caller: the ninth byte is `values >> 56` for those below 2**63."""
    x: NDArray[np.uint64] = values.astype(np.uint64)
    # each step moves the upper half of every group up, to make room: 28 bits, 14, 7
    for low, high, shift in _SPREAD:
        x = (x & low) | ((x & high) << shift)
    x |= _MORE
    return x


_SPREAD = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x0000_0000_0FFF_FFFF, 0x00FF_FFFF_F000_0000, 4),
        (0x0000_3FFF_0000_3FFF, 0x0FFF_C000_0FFF_C000, 2),
        (0x007F_007F_007F_007F, 0x3F80_3F80_3F80_3F80, 1),
    )
)
_MORE = np.uint64(0x8080_8080_8080_8080)
