"""Reads and writes importance matrices, which state how much each column of a tensor matters, from
observed activations.

Reads both formats of llama-imatrix: GGUF, and the older one that ends in `.dat`. Writes GGUF.
Invariant: the values are finite and bit-identical to those that llama-quantize passes to the
quantizer.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.model.header import Header, TensorInfo, read_array, read_header

_ENDS = (".in_sum2", ".counts")
_F32 = 0
_MOST_TEXTS = 100
_TEXT_BYTES = 127  # maximum of a text in `llama_model_kv_override`; llama-quantize truncates it

FEW_TOKENS = 8192
"""after this many, the importance of a column of the demo model is, at the median, 2 % off that
after four times as many; the how-to has more"""


class Sums(NamedTuple):
    """For one tensor: the sum of the squares of each column's inputs, one expert after the other;
    and the number of inputs of each expert, or one number for all matrices of a tensor without
    experts."""

    squares: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Computed:
    """What a model computed from `n_chunks` chunks of `chunk_size` tokens."""

    sums: Mapping[str, Sums]
    n_chunks: int
    chunk_size: int


@dataclass(frozen=True)
class ImportanceMatrix:
    path: Path
    entries: dict[str, npt.NDArray[np.float32]]
    """by tensor: a value per column, one expert after the other"""
    dataset: str | None
    """the first text that it was computed from"""
    n_chunks: int
    """of that text; 0 if unknown"""
    chunk_size: int = 0
    """tokens of a chunk; 0 if unknown"""
    more_datasets: Sequence[str] = ()
    """the other texts"""
    counts: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """by tensor: the inputs that each expert has seen, or those of all matrices; empty in the older
    format"""

    @property
    def never_reached(self) -> dict[str, list[int]]:
        """The numbers of the experts that have seen no input, by tensor; 0 for a tensor without
        experts."""
        unseen = {name: np.flatnonzero(counts <= 0) for name, counts in self.counts.items()}
        return {name: of.tolist() for name, of in unseen.items() if of.size}

    def poor_coverage(self) -> list[str]:
        """Sentences, without a capital and a period, about what it has seen too little of."""
        found = []
        n_tokens = self.n_chunks * self.chunk_size
        if 0 < n_tokens < FEW_TOKENS:
            found.append(
                f"it was computed from only {n_tokens:,} tokens; give it {FEW_TOKENS:,} or more"
            )
        if unseen := self.never_reached:
            n = sum(map(len, unseen.values()))
            found.append(
                f"{counted(n, 'expert')} of {first_names([*unseen])} saw no token, so all columns "
                "there count the same; a longer or more varied text reaches more"
            )
        return found

    def metadata(self) -> dict[str, str | int]:
        """The metadata that llama-quantize writes about it into a quantized model."""
        found = {
            "quantize.imatrix.file": _cut(str(self.path)),
            "quantize.imatrix.dataset": _cut(self.dataset) if self.dataset is not None else None,
            "quantize.imatrix.entries_count": len(self.entries),
            "quantize.imatrix.chunks_count": self.n_chunks if self.n_chunks > 0 else None,
        }
        return {key: value for key, value in found.items() if value is not None}


def load_imatrix(path: Path) -> ImportanceMatrix:
    """The importance matrix in the file at `path`. Raises `UsageError` if the file is something
    else or incomplete."""
    mode = file_mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a file; give an importance matrix")
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            matrix = _load_gguf(path) if is_gguf else _load_legacy(path, file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not matrix.entries:
        raise UsageError(f"{path} is not an importance matrix: it has no entries")
    for name, values in matrix.entries.items():
        if not np.isfinite(values).all():
            raise UsageError(f"{path}: the importances of {name!r} are not all finite")
    return matrix


def _load_gguf(path: Path) -> ImportanceMatrix:
    """Sums of squared activations, and counts by which they are divided, by expert."""
    header = read_header(path)
    keys = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
    missing = [key for key in keys if key not in header.metadata and key not in header.arrays]
    if missing:
        raise UsageError(f"{path} is not an importance matrix: it has no {missing[0]}")
    infos = {tensor.name: tensor for tensor in header.tensors}
    if 4 * sum(math.prod(tensor.ne) for tensor in header.tensors) > header.file_size:
        raise UsageError(f"{path} is truncated or damaged: it has more values than bytes for them")
    entries, all_counts = {}, {}
    for name in sorted({n.removesuffix(end) for n in infos for end in _ENDS if n.endswith(end)}):
        sums, counts = (_values(path, header, name, infos.get(name + end)) for end in _ENDS)
        if not counts.size or sums.size % counts.size:
            raise UsageError(
                f"{path}: {name!r} has {sums.size} sums for {counts.size} counts; compute it again"
            )
        if not np.isfinite(counts).all():
            raise UsageError(f"{path}: the counts of {name!r} are not all finite")
        # as llama-quantize does: rounded half away from zero, and an expert never seen counts as 1
        rounded = np.trunc(counts + np.copysign(np.float32(0.5), counts)).astype(np.float32)
        by_expert, all_counts[name] = sums.reshape(counts.size, -1), rounded
        seen = rounded > 0
        divisor = np.where(seen, rounded, np.float32(1))[:, None]
        entries[name] = np.where(seen[:, None], by_expert / divisor, np.float32(1)).ravel()
    datasets = header.arrays.get("imatrix.datasets")
    texts = read_array(path, datasets, _MOST_TEXTS) if datasets else []
    names = [text for text in texts if isinstance(text, str)]
    n_chunks, size = (
        value if isinstance(value, int) else 0
        for value in (header.metadata.get(f"imatrix.chunk_{of}", 0) for of in ("count", "size"))
    )
    first = names[0] if names else None
    return ImportanceMatrix(path, entries, first, n_chunks, size, names[1:], all_counts)


def write_imatrix(path: Path, computed: Computed, dataset: str) -> None:
    """Write an importance matrix in llama-imatrix's format; `dataset` is the name of the text."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", [dataset])
    writer.add_uint32("imatrix.chunk_count", computed.n_chunks)
    writer.add_uint32("imatrix.chunk_size", computed.chunk_size)
    for name, (squares, counts) in sorted(computed.sums.items()):
        of_expert = squares.reshape(counts.size, -1)
        for end, values in zip(_ENDS, (of_expert, counts[:, None]), strict=True):
            writer.add_tensor(name + end, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(
    path: Path, header: Header, name: str, info: TensorInfo | None
) -> npt.NDArray[np.float32]:
    if info is None:
        raise UsageError(f"{path}: {name!r} has sums or counts, but not both; compute it again")
    if info.type != _F32:
        raise UsageError(f"{path}: tensor {info.name!r} is not F32")
    count = math.prod(info.ne)
    start = header.data_start + info.offset
    if start + 4 * count > header.file_size:
        raise UsageError(f"{path} is truncated inside {info.name!r}; fetch it again")
    return np.fromfile(path, np.dtype("<f4"), count, offset=start)


def _load_legacy(path: Path, file: BinaryIO) -> ImportanceMatrix:
    """Each entry has the length of the name, the name, a number of calls, a number of values, and
    the values."""
    size = path.stat().st_size

    def left() -> int:
        return size - file.tell()

    def take(n_bytes: int) -> bytes:
        # checked against the size of the file before memory is allocated
        if not 0 <= n_bytes <= left():
            at = f"after {file.tell():,} of {size:,} bytes"
            raise UsageError(f"{path} is not an importance matrix, or it is truncated ({at})")
        return file.read(n_bytes)

    def number() -> int:
        return int.from_bytes(take(4), "little", signed=True)

    entries = {}
    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        n_calls, n_values = number(), number()
        values = np.frombuffer(take(4 * n_values), np.dtype("<f4"))
        entries[name] = values / np.float32(n_calls) if n_calls > 0 else values.copy()
    n_chunks, dataset = 0, None
    if left() >= 4:
        n_chunks = number()
        if left() >= 4 and 0 < (length := number()) <= left():
            dataset = take(length).decode(errors="replace")
    return ImportanceMatrix(path, entries, dataset, n_chunks)


def _cut(text: str) -> str:
    return text.encode(errors="surrogateescape")[:_TEXT_BYTES].decode(errors="ignore")
