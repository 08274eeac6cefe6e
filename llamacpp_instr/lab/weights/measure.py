"""Reads the tensors of model files as numbers, and measures them, alone or against a reference.

Stored bytes become numbers with ggml's own code, or with gguf-py if it is missing. Invariants:
memory is bounded however large a model is: a part of a piece is read when a thread gets to it, and
only a few tensors are in progress at a time. ggml is called only with whole blocks of a type that
it converts, with enough input and output memory: it checks none of this, or aborts the process.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamacpp_instr.base.errors import NativeError, UsageError, reason
from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.base.terminal import OnProgress, first_names
from llamacpp_instr.lab.weights.blocks import Bytes, Floats, no_tensor
from llamacpp_instr.lab.weights.figures import (
    CHUNK,
    PieceError,
    PieceStats,
    WeightError,
    WeightStats,
    block_of,
    join_pieces,
    join_stats,
    sample_stride,
)
from llamacpp_instr.llama.native import load
from llamacpp_instr.log.schema import Leaf
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import TYPES, GgmlType

PIECE = 1 << 22
"""elements that a thread processes in one task: whole chunks"""

_TOKENS, _OUTPUT = "token_embd.weight", "output.weight"

Part = TypeVar("Part")
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Job(Generic[Part, Whole]):
    """A tensor: its pieces, which may be computed at once, and what joins them in order."""

    n_bytes: int
    pieces: Sequence[Callable[[], Part]]
    join: Callable[[list[Part]], Whole]


def work(
    jobs: Sequence[Job[Part, Whole]], threads: int, on_progress: OnProgress = lambda *_: None
) -> Iterator[Whole]:
    """What the jobs joined, in order; `threads` pieces are computed at once. `on_progress` gets
    (bytes read, bytes to read). No new piece is started after an error or Ctrl-C."""
    total = sum(job.n_bytes for job in jobs)
    done = 0
    queue: deque[tuple[Job[Part, Whole], list[Future[Part]]]] = deque()
    todo = iter(jobs)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        while True:
            while len(queue) <= threads and (job := next(todo, None)):
                queue.append((job, [pool.submit(piece) for piece in job.pieces]))
            if not queue:
                return
            job, pieces = queue.popleft()
            parts = []
            for piece in pieces:
                parts.append(piece.result())
                on_progress(done + job.n_bytes * len(parts) // len(pieces), total)
            done += job.n_bytes
            yield job.join(parts)
    finally:
        pool.shutdown(cancel_futures=True)


def choose_weights(model: ModelFile, pattern: str) -> ModelFile:
    """The model with only the tensors whose names match `pattern` (`base.patterns`). Raises
    `UsageError`, which suggests names, if none does."""
    weights = [weight for weight in model.weights if name_matches(weight.name, pattern)]
    if not weights:
        raise no_tensor(model, pattern)
    return replace(model, weights=weights)


# ggml has no `to_float` for these: they are numbers already. F64 and I64 are rounded to float32.
_NUMBERS: dict[str, DTypeLike] = {
    "F32": "<f4", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
# blocks start with a 16-bit scale, and numbers have up to 8 bytes
_ALIGNMENT = 8

Convert: TypeAlias = "Callable[[Bytes, Floats], None]"
"""writes the numbers in whole blocks to an array of as many elements"""


class Dequantizer:
    """Converts stored bytes to numbers."""

    def __init__(self, name: str, converters: Mapping[str, Convert]) -> None:
        self.name = name
        """whose code it uses: `ggml` or `gguf-py`"""
        self._converters = converters
        """by name of a type"""

    def reads(self, type_: GgmlType) -> bool:
        """Whether it can convert this type."""
        return type_.name in _NUMBERS or type_.name in self._converters

    def fill(self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats) -> None:
        """Writes the `n_elements` numbers in `data` to the beginning of `room`, in stored order.

        `data` has whole blocks, of one or more rows. Raises `UsageError` for a type that it cannot
        convert, for parts of a block, and for the wrong number of bytes.
        """
        if not self.reads(type_):
            raise UsageError(f"{self.name} has no conversion of {type_} to numbers")
        if n_elements < 0 or n_elements % type_.block:
            raise UsageError(
                f"{n_elements:,} elements are not a whole number of blocks of {type_}, "
                f"which have {type_.block}"
            )
        stored = np.frombuffer(data, np.uint8)
        if stored.size != type_.row_bytes(n_elements):
            raise UsageError(
                f"{n_elements:,} elements of {type_} have {type_.row_bytes(n_elements):,} bytes, "
                f"not {stored.size:,}"
            )
        if room.dtype != np.float32 or not room.flags.carray or room.size < n_elements:
            raise UsageError(f"the output must have room for {n_elements:,} float32")
        if not n_elements:
            return
        if stored.ctypes.data % _ALIGNMENT:
            stored = stored.copy()
        if type_.name in _NUMBERS:
            with np.errstate(over="ignore"):
                room[:n_elements] = stored.view(_NUMBERS[type_.name])
        else:
            self._converters[type_.name](stored, room[:n_elements])

    def to_float(self, type_: GgmlType, data: bytes | Bytes, n_elements: int) -> Floats:
        """(n_elements,) all numbers in `data`, in a new array; otherwise like `fill`."""
        numbers = np.empty(max(n_elements, 0), np.float32)
        self.fill(type_, data, n_elements, numbers)
        return numbers


def load_dequantizer() -> Dequantizer:
    """ggml's own code if the patched library is installed, else gguf-py's, which lacks some
    types."""
    try:
        lib = load().lib
    except NativeError:
        return gguf_dequantizer()
    # on Windows a library exports only its own symbols, and ggml is another library
    return _ggml_dequantizer(lib) if hasattr(lib, "ggml_get_type_traits") else gguf_dequantizer()


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits` (ggml.h) of the pinned upstream."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


# from, to, elements. ctypes releases the GIL during the call.
_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def _ggml_dequantizer(lib: ctypes.CDLL) -> Dequantizer:
    """ggml's `to_float` of every type except Q8_1 and Q8_K, which hold activations during a matrix
    product and never occur in a file. Raises `NativeError` if the library's types differ from those
    that this package knows."""
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    functions: dict[str, Any] = {}
    for type_ in TYPES.values():
        traits = lib.ggml_get_type_traits(type_.number).contents
        reported = (traits.type_name.decode().upper(), traits.blck_size, traits.type_size)
        if reported != (type_.name, type_.block, type_.block_bytes):
            raise NativeError(
                f"the installed library stores {type_} differently from what this package "
                "expects; run `instr build`"
            )
        if traits.to_float:
            functions[type_.name] = _TO_FLOAT(traits.to_float)
    # The CPU backend converts F16 with vector instructions: bit-identical, in a tenth of the time.
    # Backends loaded at run time do not export it.
    with suppress(AttributeError):
        function, initialize = lib.ggml_cpu_fp16_to_fp32, lib.ggml_cpu_init
        # the elements after the last full vector are converted through a table that this fills
        initialize.restype = None
        initialize()
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        functions["F16"] = function

    def convert(function: Any, data: Bytes, room: Floats) -> None:
        function(data.ctypes.data, room.ctypes.data, room.size)

    return Dequantizer("ggml", {name: partial(convert, of) for name, of in functions.items()})


def gguf_dequantizer() -> Dequantizer:
    """gguf-py's conversions in numpy, which lack Q1_0, Q2_0, Q8_1 and Q8_K."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def convert(qtype: GGMLQuantizationType, data: Bytes, room: Floats) -> None:
        # NaN scales cause warnings; the caller sees the result
        with np.errstate(all="ignore"):
            room[:] = dequantize(data, qtype)

    converters: dict[str, Convert] = {}
    for type_ in TYPES.values():
        with suppress(ValueError, NotImplementedError):
            qtype = GGMLQuantizationType(type_.number)
            dequantize(np.zeros(type_.block_bytes, np.uint8), qtype)
            converters[type_.name] = partial(convert, qtype)
    return Dequantizer("gguf-py", converters)


class WeightReader:
    """Reads tensors of a model as numbers. All methods that read raise `UsageError` if the file
    became shorter."""

    def __init__(self, model: ModelFile) -> None:
        """Raises `UsageError` if a file cannot be read."""
        try:
            # not mapped: a page of a map that is no longer in the file would end the process
            self._files = {path: path.open("rb", buffering=0) for path in model.headers}
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be read: {reason(error)}") from None
        self.dequantizer = load_dequantizer()

    def check(self, weight: Weight) -> None:
        """Raises `UsageError` if the tensor's type has no conversion to numbers."""
        if not self.dequantizer.reads(weight.type):
            cure = " (after `instr build`, ggml does)" * (self.dequantizer.name != "ggml")
            raise UsageError(
                f"{weight.path}: tensor {weight.name!r} is {weight.type}, and "
                f"{self.dequantizer.name} cannot convert that to numbers{cure}"
            )

    def _stored(self, weight: Weight, start: int, end: int) -> Bytes:
        """The bytes of elements `start` to `end`."""
        size = weight.type.row_bytes(end - start)
        begin = weight.offset + weight.type.row_bytes(start)
        data = os.pread(self._files[weight.path].fileno(), size, begin)  # threads share no position
        if len(data) < size:
            raise UsageError(f"{weight.path} became shorter while it was read")
        return np.frombuffer(data, np.uint8)

    def fill(self, weight: Weight, start: int, room: Floats) -> None:
        """Fills `room` with elements, from element `start` on."""
        data = self._stored(weight, start, start + room.size)
        self.dequantizer.fill(weight.type, data, room.size, room)

    def read(self, weight: Weight, row: int, end: int, column: int, column_end: int) -> Floats:
        """(end - row, column_end - column) a part of a tensor as rows of `ne[0]` elements."""
        type_ = weight.type
        first = column // type_.block * type_.block
        last = -(-column_end // type_.block) * type_.block
        n = weight.row_length
        rows = self._stored(weight, row * n, end * n).reshape(end - row, type_.row_bytes(n))
        part = rows[:, type_.row_bytes(first) : type_.row_bytes(last)].ravel()
        values = self.dequantizer.to_float(type_, part, (end - row) * (last - first))
        return values.reshape(end - row, last - first)[:, column - first : column_end - first]

    def pieces(self, weight: Weight) -> Iterator[Floats]:
        """All elements of a tensor in stored order, a few million at a time."""
        for data in self.bytes(weight):
            n = data.size // weight.type.block_bytes * weight.type.block
            yield self.dequantizer.to_float(weight.type, data, n)

    def bytes(self, weight: Weight) -> Iterator[Bytes]:
        """The stored bytes of a tensor, a few million at a time."""
        for start, end in _ranges(weight):
            yield self._stored(weight, start, end)

    def raw(self, weight: Weight) -> Bytes:
        """(rows, bytes of a row) the stored bytes of a tensor, mapped, not read."""
        shape = raw_shape(weight)
        if not weight.n_elements:
            return np.empty(shape, np.uint8)
        try:
            return np.memmap(weight.path, np.uint8, "r", weight.offset, shape)
        except (OSError, ValueError) as error:
            raise UsageError(f"{weight.path} cannot be read: {reason(error)}") from None

    def measure(
        self,
        weights: Sequence[Weight],
        threads: int | None = None,
        on_progress: OnProgress = lambda *_: None,
    ) -> Iterator[WeightStats]:
        """The figures of tensors, in order. `threads` pieces are computed at once, by default one
        per CPU; the result does not depend on it. `on_progress` gets (bytes read, bytes to read).
        Raises `UsageError` for a tensor that `check` refuses."""
        for weight in weights:
            self.check(weight)
        jobs = [
            Job(
                weight.n_bytes,
                [partial(self._measure, weight, *at) for at in _ranges(weight, whole_rows=True)],
                partial(join_stats, weight),
            )
            for weight in weights
        ]
        return work(jobs, threads or usable_cpus(), on_progress)

    def _measure(self, weight: Weight, start: int, end: int) -> PieceStats:
        row = weight.ne[0] if weight.n_rows > 1 else 0
        stride = sample_stride(weight.n_elements, weight.row_length)
        stats = PieceStats(start, stride, row)
        room = np.empty(max(CHUNK // row, 1) * row if row else CHUNK, np.float32)
        for at in range(start, end, room.size):
            values = room[: end - at]
            self.fill(weight, at, values)
            stats.add(values)
        return stats


def raw_shape(weight: Weight) -> tuple[int, int]:
    """(rows, bytes of a row) of the stored bytes."""
    return (weight.n_rows, weight.type.row_bytes(weight.row_length))


def _ranges(weight: Weight, whole_rows: bool = False) -> list[tuple[int, int]]:
    """The ranges of elements of pieces: of `PIECE`, or of whole rows if the tensor has several."""
    row = max(weight.ne[0], 1) if whole_rows and weight.n_rows > 1 else 1
    n, step = weight.n_elements, max(PIECE // row, 1) * row
    return [(start, min(start + step, n)) for start in range(0, n, step)]


class LeafWeights:
    """The weights of a model file, as the leafs of a graph name them."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._reader = WeightReader(model)

    def check(self, leaf: Leaf) -> None:
        """Raises `UsageError` for a weight that the file does not have in this shape."""
        weight = self._model.by_name.get(leaf.name)
        if weight is None or [n for n in weight.ne if n > 1] != [n for n in leaf.ne if n > 1]:
            raise UsageError(f"{self._model.path} has no tensor {leaf.name!r} of this shape")
        self._reader.check(weight)

    def pieces(self, leaf: Leaf) -> Iterator[NDArray[Any]]:
        """The weight in stored order: float16 if it is of type F16, else float32."""
        weight = self._model.by_name[leaf.name]
        if leaf.type == "f16":
            return (piece.view("<f2") for piece in self._reader.bytes(weight))
        return self._reader.pieces(weight)


def compute_weight_errors(
    reference: ModelFile,
    candidate: ModelFile,
    threads: int | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> list[WeightError]:
    """The error of every tensor of `candidate` against `reference`, in the file's order. `threads`
    and `on_progress` as in `WeightReader.measure`.

    If only one model has an `output.weight`, it is compared with the other's token embedding,
    which llama.cpp then uses as the output; that embedding adds no bytes. A tensor of a type that
    the dequantizer cannot read has no numbers, and the reason in `skipped`.

    Raises `UsageError`, which names the tensor, if the models differ in architecture, tensors or
    shapes.
    """
    readers = WeightReader(reference), WeightReader(candidate)

    def error_of_piece(theirs: Weight, ours: Weight, start: int, end: int) -> PieceError:
        stride = sample_stride(ours.n_elements, ours.row_length)
        errors = PieceError(block_of(ours.type), stride, start)
        room = np.empty((3, CHUNK), np.float32)
        for at in range(start, end, CHUNK):
            n = min(CHUNK, end - at)
            readers[0].fill(theirs, at, room[0, :n])
            readers[1].fill(ours, at, room[1, :n])
            errors.add(room, n)
        return errors

    jobs = [
        Job(
            theirs.n_bytes + ours.n_bytes,
            [
                partial(error_of_piece, theirs, ours, *at)
                for at in ([] if error.skipped else _ranges(ours))
            ],
            partial(join_pieces, error),
        )
        for theirs, ours, error in _match(reference, candidate, readers[0].dequantizer)
    ]
    return list(work(jobs, threads or usable_cpus(), on_progress))


def _match(
    reference: ModelFile, candidate: ModelFile, dequantizer: Dequantizer
) -> Iterator[tuple[Weight, Weight, WeightError]]:
    """Each tensor of both models, and what is known of its error before it is measured."""
    what = f"{candidate.path} and {reference.path} are not versions of the same model"
    if reference.architecture != candidate.architecture:
        raise UsageError(
            f"{what}: one's architecture is {candidate.architecture!r}, the other's "
            f"{reference.architecture!r}"
        )
    theirs, ours = _weights(reference, candidate), _weights(candidate, reference)
    only = [
        f"only {path} has {first_names(lone)}"
        for one, other, path in ((ours, theirs, candidate.path), (theirs, ours, reference.path))
        if (lone := [repr(name) for name in one if name not in other])
    ]
    if only:
        raise UsageError(f"{what}: {'; '.join(only)}")
    for name, weight in ours.items():
        peer = theirs[name]
        if weight.ne != peer.ne:
            raise UsageError(
                f"{what}: tensor {name!r} has the shape {list(weight.ne)} in one, "
                f"{list(peer.ne)} in the other"
            )
        lacking = [type_ for type_ in (weight.type, peer.type) if not dequantizer.reads(type_)]
        error = WeightError(
            name=weight.name,
            layer=weight.layer,
            role=weight.role,
            reference_type=peer.type,
            type=weight.type,
            n_elements=weight.n_elements,
            n_bytes=weight.n_bytes if name in candidate.by_name else 0,
            skipped=f"{dequantizer.name} has no conversion of {lacking[0]}" if lacking else "",
        )
        yield peer, weight, error


def _weights(model: ModelFile, other: ModelFile) -> dict[str, Weight]:
    """The weights by name, with an output even if only the other model has one of its own."""
    weights = dict(model.by_name)
    if _TOKENS in weights and _OUTPUT not in weights and _OUTPUT in other.by_name:
        weights[_OUTPUT] = replace(weights[_TOKENS], name=_OUTPUT)
    return weights
