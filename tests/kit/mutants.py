"""Copies of models with other values, and of the demo model whose tokenizer lacks or claims
something.

`tests.programs.claims` does the same with the numbers of the architectures.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

from llamacpp_instr.model.file import demo_model
from llamacpp_instr.model.header import read_header

Entries = Mapping[str, bytes]
"""type and value by name, as bytes in a file; an empty value removes the entry"""

N = 1024
"""tokens of the demo model"""

_TYPES = gguf.GGUFValueType
U8, U32, I32, F32 = _TYPES.UINT8, _TYPES.UINT32, _TYPES.INT32, _TYPES.FLOAT32
_CODES = {U8: "B", U32: "I", I32: "i", F32: "f"}


def damaged(source: Path, path: Path, key: str, value: float) -> Path:
    """A copy of a model with another value in its metadata."""
    shutil.copyfile(source, path)
    field = gguf.GGUFReader(path, "r+").fields[key]
    field.parts[field.data[0]][0] = value
    return path


def text(value: str) -> bytes:
    """An entry's type and value."""
    return struct.pack("<I", _TYPES.STRING) + _text(value)


def number(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def texts(values: Sequence[str]) -> bytes:
    head = struct.pack("<IIQ", _TYPES.ARRAY, _TYPES.STRING, len(values))
    return head + b"".join(map(_text, values))


def array(values: Sequence[float], type_: gguf.GGUFValueType) -> bytes:
    head = struct.pack("<IIQ", _TYPES.ARRAY, type_, len(values))
    return head + struct.pack(f"<{len(values)}{_CODES[type_]}", *values)


def vocabulary() -> list[str]:
    tokens: list[str] = gguf.GGUFReader(demo_model()).fields["tokenizer.ggml.tokens"].contents()
    return tokens


def write_mutant(path: Path, changes: Entries) -> Path:
    """A copy of the demo model with other entries for its tokenizer."""
    source = demo_model()
    data, header = source.read_bytes(), read_header(source)
    entries = {
        key: b"".join(part.tobytes() for part in field.parts[2:])
        for key, field in gguf.GGUFReader(source).fields.items()
        if not key.startswith("GGUF.")
    }
    for name, value in changes.items():
        group = "tokenizer" if name == "chat_template" else "tokenizer.ggml"
        entries[f"{group}.{name}"] = value
    entries = {key: value for key, value in entries.items() if value}
    start = b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(entries))
    start += b"".join(_text(key) + value for key, value in entries.items())
    for tensor in header.tensors:
        start += _text(tensor.name) + struct.pack("<I", len(tensor.ne))
        start += struct.pack(f"<{len(tensor.ne)}qIQ", *tensor.ne, tensor.type, tensor.offset)
    start += b"\0" * (-len(start) % header.alignment)
    path.write_bytes(start + data[header.data_start :])
    return path


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data
