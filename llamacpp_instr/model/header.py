"""Reads the header of a GGUF file: its metadata and the offsets of its tensors, without their data.

Every count is checked against the size of the file before it is used. So the memory is bounded by
the size of the file, whatever the counts claim. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from llamacpp_instr.base.errors import UsageError

GGUF_VERSIONS = (2, 3)
"""versions that the pinned llama.cpp reads"""

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME = 63  # bytes of a tensor's name
_MAX_ITEMS = 1 << 30  # of an array
_MAX_COUNT = 1 << 14
"""tensors, metadata entries, and arrays in arrays, of a file. Real models have about a thousand, a
hundred and none. llama.cpp compares each with all others, and our tables print every one"""
_STRING, ARRAY = 8, 9
"""GGUF's numbers of types"""
_MAX_DEPTH = 8  # of arrays in arrays
# little-endian struct codes by GGUF's number of the scalar type
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_COUNTS = struct.Struct("<Iqq")
_ARRAY_HEAD = struct.Struct("<IQ")
# by the number of dimensions: ne, the storage type, the offset
_TENSOR = [struct.Struct(f"<{n_dims}qIQ") for n_dims in range(_MAX_DIMS + 1)]

_WINDOW = 1 << 18
_MAX_TEXT = 1 << 24
"""bytes of all names and texts outside arrays, which are kept in memory. Real models have a
hundredth of this"""

Scalar = int | float | bool | str


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header."""

    name: str
    type: int
    """the storage type, as ggml's number"""
    ne: tuple[int, ...]
    """in ggml's order: the length of a row first"""
    offset: int
    """bytes from the start of the file's data section"""


@dataclass(frozen=True)
class ArrayInfo:
    """An array of the metadata; `read_array` reads it."""

    type: int
    """the type of the items, as GGUF's number"""
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
    """offsets of the metadata's arrays; a vocabulary may be larger than all the rest"""
    tensors: list[TensorInfo]
    alignment: int
    """alignment of the tensors, in bytes"""
    infos_start: int
    """bytes from the start of the file to the tensors' entries: the end of the metadata"""
    data_start: int
    """bytes from the start of the file"""
    file_size: int
    """bytes"""


def read_header(path: Path) -> Header:
    """The header of the GGUF file at `path`. Raises `UsageError` if the file is something else, or
    truncated."""
    with _opened(path, _WINDOW) as file:
        _check_start(path, file.read(64))
        return _Reader(path, file).header()


def read_array(path: Path, array: ArrayInfo, limit: int) -> list[Scalar]:
    """The first `limit` items of an array from `read_header`, which must be of the same file."""
    return list(read_items(path, array, range(min(array.count, limit))).values())


def read_items(path: Path, array: ArrayInfo, numbers: Iterable[int]) -> dict[int, Scalar]:
    """Items of an array from `read_header`, by number; numbers beyond its end are left out. Reads
    the array once."""
    wanted = sorted({number for number in numbers if 0 <= number < array.count})
    # a header with many arrays must not make us read the same bytes for each
    with _opened(path, min(_WINDOW, 4096 + 64 * len(wanted))) as file:
        return dict(zip(wanted, _Reader(path, file).items(array, wanted), strict=True))


@contextlib.contextmanager
def _opened(path: Path, window: int) -> Iterator[BufferedReader]:
    try:
        with path.open("rb", buffering=0) as file:
            yield BufferedReader(file, window)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _check_start(path: Path, start: bytes) -> None:
    if not start:
        raise UsageError(f"{path} is empty; it is not a GGUF model")
    if start.startswith(b"version https://git-lfs"):
        raise UsageError(
            f"{path} is a Git LFS pointer, not the model; fetch it with `git lfs pull`"
        )
    if start[:4] != b"GGUF":
        shown = "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in start[:4])
        raise UsageError(f"{path} is not a GGUF model: it starts with {shown!r} instead of 'GGUF'")
    if len(start) < 24:
        raise UsageError(
            f"{path} is truncated: it ends inside the header, after {len(start)} bytes"
        )
    version, what = int.from_bytes(start[4:8], "little"), f"{path} has GGUF version"
    if version & 0xFFFF == 0:
        raise UsageError(
            f"{path} is big-endian (GGUF version bytes {start[4:8].hex(' ')}); "
            "llama.cpp cannot load it on this machine: convert it with gguf-py's "
            "gguf_convert_endian"
        )
    oldest, newest = GGUF_VERSIONS
    if version > newest:
        raise UsageError(
            f"{what} {version}; this llama.cpp reads up to {newest}: it is newer than this program"
        )
    if version < oldest:
        raise UsageError(
            f"{what} {version}; this llama.cpp reads {oldest} and {newest}: convert the model again"
        )


def quoted(value: Scalar | None) -> str:
    """A metadata value for a message: in quotes, and shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Reader:
    """Parses the header; every read is first checked against the end of the file.

    The file is buffered, so memory depends neither on its size nor on the skipped bytes. If it is
    truncated meanwhile, reading raises an error; with a mapped file the process would crash.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.go_to(4)
        self.text = 0
        self.nested = 0  # arrays in arrays
        self.metadata: dict[str, Scalar] = {}
        self.arrays: dict[str, ArrayInfo] = {}

    def header(self) -> Header:
        version, n_tensors, n_metadata = self.unpack(_COUNTS, "the counts")
        if n_tensors < 0 or n_metadata < 0:
            self.damaged(f"it claims {n_tensors} tensors and {n_metadata} metadata entries")
        for n, things in ((n_tensors, "tensors"), (n_metadata, "metadata entries")):
            if n > _MAX_COUNT:
                self.damaged(f"it claims {n:,} {things}, more than {_MAX_COUNT:,}")
        # these counts allocate nothing: the loops stop where the file ends
        for index in range(n_metadata):
            self.entry(f"the key of metadata entry {index}")
        infos_start = self.at
        tensors: dict[str, TensorInfo] = {}
        for index in range(n_tensors):
            tensor = self.tensor(index)
            if tensor.name in tensors:
                self.damaged(f"it has tensor {tensor.name!r} twice")
            tensors[tensor.name] = tensor

        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment < 2**32 or alignment & (alignment - 1):
            self.damaged(f"general.alignment is {quoted(alignment)}, not a power of two")
        return Header(
            version=version,
            metadata=self.metadata,
            arrays=self.arrays,
            tensors=list(tensors.values()),
            alignment=alignment,
            infos_start=infos_start,
            data_start=-(-self.at // alignment) * alignment,
            file_size=self.size,
        )

    def tensor(self, index: int) -> TensorInfo:
        before = self.text
        name = self.string(f"the name of tensor {index}")
        if self.text - before > _MAX_NAME:
            self.damaged(f"the name of tensor {index} is longer than {_MAX_NAME} bytes")
        what = f"tensor {name!r}"
        (n_dims,) = self.unpack(_U32, what)
        if n_dims > _MAX_DIMS:
            self.damaged(f"{what} has {n_dims} dimensions, at most {_MAX_DIMS} are allowed")
        *ne, type_, offset = self.unpack(_TENSOR[n_dims], what)
        if ne and min(ne) < 0:
            self.damaged(f"{what} has a negative dimension: {ne}")
        if math.prod(ne) >= 2**63:
            self.damaged(f"{what} has more elements than can be counted: {ne}")
        return TensorInfo(name, type_, tuple(ne), offset)

    def entry(self, which: str) -> None:
        """Adds an entry to `metadata`, or to `arrays`, whose items are skipped."""
        key = self.string(which)
        if not key:
            self.damaged(f"{which} is empty")
        if key in self.metadata or key in self.arrays:
            self.damaged(f"the metadata has {quoted(key)} twice")
        what = f"the value of {quoted(key)}"
        (type_,) = self.unpack(_U32, what)
        if type_ == _STRING:
            self.metadata[key] = self.string(what)
        elif type_ in _SCALARS:
            (self.metadata[key],) = self.unpack(_SCALARS[type_], what)
        elif type_ == ARRAY:
            self.arrays[key] = self.array(what)
        else:
            self.damaged(f"{quoted(key)} has the unknown value type {type_}")

    def array(self, what: str, depth: int = 0) -> ArrayInfo:
        """Skips an array; returns where it is."""
        item, count = self.unpack(_ARRAY_HEAD, what)
        if count > _MAX_ITEMS:
            self.damaged(f"{what} is an array of {count:,} items")
        array = ArrayInfo(item, count, self.at)
        if item in _SCALARS:
            self.skip(count * _SCALARS[item].size, what)
        elif item == _STRING:
            if count > (self.size - self.at) // 8:
                self.truncated(what)
            self.skip_strings(count, what)
        elif item == ARRAY and depth < _MAX_DEPTH:
            self.nested += count
            if self.nested > _MAX_COUNT:
                self.damaged(f"its arrays contain more than {_MAX_COUNT:,} arrays")
            for _ in range(count):
                self.array(what, depth + 1)
        else:
            self.damaged(f"{what} is an array of the unknown value type {item}")
        return array

    def items(self, array: ArrayInfo, numbers: Iterable[int]) -> Iterator[Scalar]:
        """The items with these numbers, which must be ascending and inside the array. An item that
        is an array is given by its length."""
        what = "an array"
        self.go_to(array.start)
        passed = 0
        code = _SCALARS.get(array.type)
        for number in numbers:
            if code:
                self.go_to(array.start + number * code.size)
                yield self.unpack(code, what)[0]
            elif array.type == _STRING:
                self.skip_strings(number - passed, what)
                yield self.string(what)
            else:
                inner = [self.array(what) for _ in range(passed, number + 1)]
                yield f"{inner[-1].count:,} values"
            passed = number + 1

    def skip_strings(self, count: int, what: str) -> None:
        # a vocabulary has hundreds of thousands of items, so the inner loop does only arithmetic
        length_at, left = _U64.unpack_from, count
        while left:
            window, at = self.file.peek(8), 0
            if len(window) < 8:
                self.skip(self.unpack(_U64, what)[0], what)
                left -= 1
                continue
            end = len(window) - 8
            while left and at <= end:
                at += 8 + length_at(window, at)[0]
                left -= 1
            self.skip(at, what)

    def string(self, what: str) -> str:
        (length,) = self.unpack(_U64, what)
        if length > self.size - self.at:
            self.truncated(what)
        self.text += length
        if self.text > _MAX_TEXT:
            self.damaged(f"{what} makes its names and texts longer than {_MAX_TEXT:,} bytes")
        return self.take(length, what).decode(errors="backslashreplace")

    def unpack(self, code: struct.Struct, what: str) -> tuple[Any, ...]:
        return code.unpack(self.take(code.size, what))

    def take(self, n_bytes: int, what: str) -> bytes:
        data = self.file.read(n_bytes) if n_bytes <= self.size - self.at else b""
        if len(data) < n_bytes:
            self.truncated(what)
        self.at += n_bytes
        return data

    def skip(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.at:
            self.truncated(what)
        self.go_to(self.at + n_bytes)

    def go_to(self, at: int) -> None:
        self.at = at
        self.file.seek(at)

    def truncated(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self.path} is truncated or damaged: it ends after {self.size:,} bytes, inside "
            f"{what}; fetch it again"
        )

    def damaged(self, finding: str) -> NoReturn:
        raise UsageError(f"{self.path} is damaged: {finding}; fetch it again")
