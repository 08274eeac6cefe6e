"""Changes an input where it matters; half of the time the fuzzer changes bytes.

A random byte in a line of JSON or in a length usually makes a reader refuse the input at once. Code
behind these checks is reached by wrong values in well-formed input.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

Mutate = Callable[[bytes, int], bytes]

NUMBERS: tuple[int | float, ...] = (
    0, 1, -1, 2, 7, 31, 32, 255, 256, 65535, 2**20, 10**9, 2**31 - 1, 2**31, -(2**31), 2**32,
    2**40, 10**15, 2**52, 2**53 - 1, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**63, -(2**63),
    2**64 - 1, 2**64, 10**30,
    0.5, -0.0, 1e-300, 1e300, 1.7976931348623157e308,
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "\x1b[31m", "\x9b2J", "\u202e", "\ud800", "\U0010ffff", "<b>", "</table>",
    "&lt;", "[red]", "[/]", "|", "`", "\\", "\n", "\r\n", "\u2028", "=1+1", "%s", "{0}", "a" * 3000,
    "blk.0.attn_q.weight", "blk.99999999999999999999.x", "token_embd.weight", "f32", "q4_K",
    "MUL_MAT", "FLASH_ATTN_EXT", "nan", "1e5", "../../x", "MUL", "prefill", "decode", "9" * 400,
    "2025-01-01T00:00:00Z", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+14:00",
)  # fmt: skip


def mutate_log(data: bytes, most: int, random: Random, mutate: Mutate) -> bytes:
    """A log in which one line, or one value of a line, is changed."""
    if data[:2] in (b"\x1f\x8b", b"\x28\xb5") or random.random() < 0.3:  # gzip, zstd
        return mutate(data, most)
    lines = data.split(b"\n")
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        i = random.randrange(len(lines))
        how = random.random()
        if how < 0.70:
            lines[i] = _other_line(lines[i], random)
        elif how < 0.80:
            lines.insert(random.randrange(len(lines)), lines[i])
        elif how < 0.88 and len(lines) > 2:
            del lines[i]
        elif how < 0.94:
            j = random.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
        else:
            del lines[i + 1 :]
    return b"\n".join(lines)[:most]


def _other_line(line: bytes, random: Random) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    try:
        return json.dumps(_other(value, random), separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return line


def _other(value: Any, random: Random) -> Any:
    """The value with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and random.random() < 0.93:
        key = random.choice(list(value))
        how = random.random()
        if how < 0.06:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.09:
            return {**value, random.choice(TEXTS): value[key]}
        if how < 0.12:
            return {**value, key: value[random.choice(list(value))]}
        return {**value, key: _other(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.93:
        i = random.randrange(len(value))
        how = random.random()
        if how < 0.08:
            return [*value[:i], *value[i + 1 :]]
        if how < 0.16:
            return [*value[:i], value[i], *value[i:]]
        if how < 0.20:
            return []
        if how < 0.23:
            return value * random.choice((2, 3, 20, 300))
        if how < 0.26:
            return [_other(value[i], random)] * len(value)
        if how < 0.32:
            j = random.randrange(len(value))
            return [*value[:i], value[j], *value[i + 1 :]]
        return [*value[:i], _other(value[i], random), *value[i + 1 :]]
    if isinstance(value, bool):
        return random.choice((not value, None, 0))
    if isinstance(value, (int, float)) and random.random() < 0.95:
        near = (value + 1, value - 1, -value, value * 2)
        return random.choice(near) if random.random() < 0.4 else random.choice(NUMBERS)
    if isinstance(value, str) and random.random() < 0.95:
        text = random.choice(TEXTS)
        return random.choice((text, value + text, text + value, value[: len(value) // 2]))
    return random.choice((None, [], {}, 0, "", [[]], random.choice(NUMBERS), random.choice(TEXTS)))


# --- GGUF ---

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FLOATS = (float("nan"), float("inf"), -0.0, 1e38, 1e-45, 3e5)


def mutate_gguf(data: bytes, most: int, random: Random, mutate: Mutate) -> bytes:
    """A model with another value in one field of its header."""
    if random.random() < 0.3:
        return mutate(data, most)
    fields = _fields(data)
    if not fields:
        return mutate(data, most)
    for at, size, kind in sorted(random.sample(fields, min(len(fields), 2)), reverse=True):
        if kind == "text":
            text = random.choice(TEXTS).encode(errors="surrogatepass")[: random.choice((30, 3000))]
            data = data[:at] + struct.pack("<Q", len(text)) + text + data[at + size :]
        elif kind == "float":
            data = data[:at] + struct.pack("<f", random.choice(_FLOATS)) + data[at + size :]
        else:
            old = int.from_bytes(data[at : at + size], "little")
            number = random.choice((old + 1, old - 1, old * 2, int(random.choice(NUMBERS[:-5]))))
            new = (number % (1 << 8 * size)).to_bytes(size, "little")
            data = data[:at] + new + data[at + size :]
        if random.random() < 0.5:
            break
    # a longer header moves the data: without padding the file would only be truncated
    return (data + bytes(random.choice((0, 64, 4096))))[:most]


def _fields(data: bytes) -> list[tuple[int, int, str]]:
    """Where the header's values are: offset, bytes, kind; as far as it can be parsed."""
    found = [(4, 4, "number"), (8, 8, "number"), (16, 8, "number")]
    at = 24

    def number(size: int) -> int:
        nonlocal at
        found.append((at, size, "number"))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = int.from_bytes(data[at : at + 8], "little")
        found.append((at, 8 + length, "text"))
        at += 8 + length

    def value(type_: int) -> None:
        if type_ == 8:
            text()
        elif type_ == 9:
            item, count = number(4), number(8)
            for _ in range(min(count, 20) if item in (8, *_SIZES) else 0):
                value(item)
        elif type_ == 6:
            found.append((at, 4, "float"))
            number(4)
        else:
            number(_SIZES.get(type_, 4))

    n_tensors, n_metadata = struct.unpack_from("<QQ", data.ljust(24, b"\0"), 8)
    for _ in range(min(n_metadata, 100)):
        text()
        value(number(4))
        if at > len(data):
            break
    for _ in range(min(n_tensors, 100)):
        text()
        n_dims = number(4)
        for _ in range(min(n_dims, 4)):
            number(8)
        number(4)
        number(8)
        if at > len(data):
            break
    return [field for field in found if field[0] + field[1] <= len(data)]


def mutate_imatrix(data: bytes, most: int, random: Random, mutate: Mutate) -> bytes:
    if data.startswith(b"GGUF"):
        return mutate_gguf(data, most, random, mutate)
    return mutate(data, most)


def mutate_dap(data: bytes, most: int, random: Random, mutate: Mutate) -> bytes:
    """Messages of a debugger's client, of which one, or one value of one, is changed."""
    if random.random() < 0.15:
        return mutate(data, most)
    bodies = re.split(rb"Content-Length: \d+\r\n\r\n", data)[1:]
    if not bodies:
        return mutate(data, most)
    changed = mutate_log(b"\n".join(bodies), most, random, mutate).split(b"\n")
    return b"".join(b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in changed)[:most]


MUTATORS = {
    "log": mutate_log,
    "gguf": mutate_gguf,
    "imatrix": mutate_imatrix,
    "dap": mutate_dap,
}
