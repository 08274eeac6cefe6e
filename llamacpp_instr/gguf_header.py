"""Reads a GGUF file's header: its metadata and where its tensors lie, without their data.

Nothing that the file claims is believed before it has been held against the file's size, so the
memory used is bounded by the bytes that are really there, whatever the counts say. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .errors import UsageError

GGUF_VERSIONS = (2, 3)
"""Versions that the pinned llama.cpp reads."""

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# little-endian struct codes by GGUF's number of the scalar type
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

Scalar = int | float | bool | str


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header."""

    name: str
    type: int
    """ggml's number of the storage type"""
    ne: tuple[int, ...]
    """ggml's order: the row's length first"""
    offset: int
    """bytes from the start of the file's data section"""


@dataclass(frozen=True)
class ArrayInfo:
    """An array of the metadata; `read_array` reads it."""

    type: int
    """GGUF's number of the items' type"""
    count: int
    start: int
    """bytes from the start of the file"""


@dataclass(frozen=True)
class Header:
    """A GGUF file without its data."""

    version: int
    metadata: dict[str, Scalar]
    """scalars and strings"""
    arrays: dict[str, ArrayInfo]
    """where the metadata's arrays lie: a vocabulary may be larger than all the rest"""
    tensors: list[TensorInfo]
    data_start: int
    """bytes from the start of the file"""
    file_size: int
    """bytes"""


def read_header(path: Path) -> Header:
    """The header of the GGUF file at `path`; raises `UsageError` when it is none, or not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            _check_start(path, file.read(64))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read_array(path: Path, array: ArrayInfo, limit: int) -> list[Scalar]:
    """The first `limit` items of an array that `read_header` has found in the file at `path`."""
    count = min(array.count, limit)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data, len(data))
        reader.at = array.start
        if array.type == _STRING:
            return [reader.string("an array") for _ in range(count)]
        return [reader.scalar(_SCALARS[array.type], "an array") for _ in range(count)]


def _check_start(path: Path, start: bytes) -> None:
    if not start:
        raise UsageError(f"{path} is empty; it is no GGUF model")
    if start.startswith(b"version https://git-lfs"):
        raise UsageError(
            f"{path} is a Git LFS pointer, not the model; fetch it with `git lfs pull`"
        )
    if start[:4] != b"GGUF":
        shown = "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in start[:4])
        raise UsageError(f"{path} is no GGUF model: it starts with {shown!r} instead of 'GGUF'")
    if len(start) < 24:
        raise UsageError(
            f"{path} is truncated: it ends inside the header, after {len(start)} bytes"
        )
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        raise UsageError(
            f"{path} is big-endian (GGUF version bytes {start[4:8].hex(' ')}); "
            "llama.cpp cannot load it on this machine: convert it with gguf-py's "
            "gguf_convert_endian"
        )
    if version > GGUF_VERSIONS[-1]:
        raise UsageError(
            f"{path} has GGUF version {version}; this llama.cpp reads up to {GGUF_VERSIONS[-1]}: "
            "it is newer than this program"
        )
    if version not in GGUF_VERSIONS:
        raise UsageError(
            f"{path} has GGUF version {version}; this llama.cpp reads {GGUF_VERSIONS[0]} and "
            f"{GGUF_VERSIONS[-1]}: convert the model again"
        )


class _Reader:
    """Walks the header; every read is checked against the end of the file first."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 4
        self.arrays: dict[str, ArrayInfo] = {}

    def header(self) -> Header:
        version = int(self.scalar("I", "the version"))
        n_tensors = int(self.scalar("q", "the tensor count"))
        n_metadata = int(self.scalar("q", "the metadata count"))
        if n_tensors < 0 or n_metadata < 0:
            self.damaged(f"it claims {n_tensors} tensors and {n_metadata} metadata entries")
        # no list is made of these sizes: the loops end where the file does
        metadata: dict[str, Scalar] = {}
        for index in range(n_metadata):
            key = self.string(f"the key of metadata entry {index}")
            value = self.value(key)
            if value is not None:
                metadata[key] = value
        tensors = [self.tensor(index) for index in range(n_tensors)]

        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self.damaged(f"general.alignment is {alignment!r}, not a power of two")
        return Header(
            version=version,
            metadata=metadata,
            arrays=self.arrays,
            tensors=tensors,
            data_start=-(-self.at // alignment) * alignment,
            file_size=self.size,
        )

    def tensor(self, index: int) -> TensorInfo:
        name = self.string(f"the name of tensor {index}")
        n_dims = int(self.scalar("I", f"tensor {name!r}"))
        if n_dims > _MAX_DIMS:
            self.damaged(
                f"tensor {name!r} has {n_dims} dimensions, at most {_MAX_DIMS} are allowed"
            )
        ne = tuple(int(self.scalar("q", f"tensor {name!r}")) for _ in range(n_dims))
        if any(n < 0 for n in ne):
            self.damaged(f"tensor {name!r} has a negative dimension: {list(ne)}")
        type_ = int(self.scalar("I", f"tensor {name!r}"))
        offset = int(self.scalar("Q", f"tensor {name!r}"))
        return TensorInfo(name, type_, ne, offset)

    def value(self, key: str) -> Scalar | None:
        """A metadata value; an array is passed over, noted in `arrays`, and gives None."""
        what = f"the value of {key!r}"
        type_ = int(self.scalar("I", what))
        if type_ == _STRING:
            return self.string(what)
        if type_ in _SCALARS:
            return self.scalar(_SCALARS[type_], what)
        if type_ != _ARRAY:
            self.damaged(f"{key!r} has the unknown value type {type_}")
        item = int(self.scalar("I", what))
        count = int(self.scalar("Q", what))
        self.arrays[key] = ArrayInfo(item, count, self.at)
        if item in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[item]), what)
        elif item == _STRING:
            if count > (self.size - self.at) // 8:
                self.truncated(what)
            self.skip_strings(count, what)
        else:
            self.damaged(f"{key!r} is an array of the unknown value type {item}")
        return None

    def skip_strings(self, count: int, what: str) -> None:
        # hundreds of thousands in a vocabulary: nothing in this loop but the arithmetic
        data, at, size = self.data, self.at, self.size
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > size:
                self.truncated(what)
        self.at = at

    def string(self, what: str) -> str:
        length = int(self.scalar("Q", what))
        start = self.at
        self.skip(length, what)
        return self.data[start : self.at].decode(errors="replace")

    def scalar(self, code: str, what: str) -> int | float | bool:
        start = self.at
        self.skip(struct.calcsize("<" + code), what)
        value: int | float | bool = struct.unpack_from("<" + code, self.data, start)[0]
        return value

    def skip(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.at:
            self.truncated(what)
        self.at += n_bytes

    def truncated(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self.path} is truncated or damaged: it ends after {self.size:,} bytes, inside "
            f"{what}; fetch it again"
        )

    def damaged(self, finding: str) -> NoReturn:
        raise UsageError(f"{self.path} is damaged: {finding}; fetch it again")
