"""Measures the tensors of a model, and reads parts of them as numbers.

Invariant: memory is bounded however large the model is, see `pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.weights.blocks import no_tensor
from llamacpp_instr.lab.weights.dequantize import Dequantizer, load_dequantizer
from llamacpp_instr.lab.weights.distribution import PieceStats, StatsSum, WeightStats, join_stats
from llamacpp_instr.lab.weights.error import CHUNK, sample_stride
from llamacpp_instr.lab.weights.layout import Bytes, Floats
from llamacpp_instr.lab.weights.pieces import PIECE, Files, Job, open_files, read_stored, work
from llamacpp_instr.llama.threads import usable_cpus
from llamacpp_instr.model.file import ModelFile, Weight


def choose_weights(model: ModelFile, pattern: str) -> ModelFile:
    """The model with only the tensors whose names match `pattern` (`base.patterns`). Raises
    `UsageError`, which suggests names, if none does."""
    weights = [weight for weight in model.weights if name_matches(weight.name, pattern)]
    if not weights:
        raise no_tensor(model, pattern)
    return replace(model, weights=weights)


class WeightReader:
    """Reads tensors of a model as numbers."""

    def __init__(self, model: ModelFile) -> None:
        """Raises `UsageError` if a file cannot be read."""
        self._files = open_files(model.headers)
        self._dequantizer = load_dequantizer()

    def check(self, weight: Weight) -> None:
        """Raises `UsageError` if the tensor's type has no conversion to numbers."""
        if not self._dequantizer.reads(weight.type):
            cure = " (`instr build` installs one that has)" * (self._dequantizer.name != "ggml")
            raise UsageError(
                f"{weight.path}: tensor {weight.name!r} is {weight.type}, and "
                f"{self._dequantizer.name} cannot convert that to numbers{cure}"
            )

    def read(self, weight: Weight, row: int, end: int, column: int, column_end: int) -> Floats:
        """(end - row, column_end - column) a part of a tensor as rows of `ne[0]` elements. Raises
        `UsageError` if the file became shorter."""
        type_ = weight.type
        first = column // type_.block * type_.block
        last = -(-column_end // type_.block) * type_.block
        n = weight.ne[0] if weight.ne else 1
        data = read_stored(self._files, weight, row * n, end * n)
        rows = data.reshape(end - row, type_.row_bytes(n))
        part = rows[:, type_.row_bytes(first) : type_.row_bytes(last)].ravel()
        values = self._dequantizer.to_float(type_, part, (end - row) * (last - first))
        return values.reshape(end - row, last - first)[:, column - first : column_end - first]

    def pieces(self, weight: Weight) -> Iterator[Floats]:
        """All elements of a tensor in stored order, some millions at a time."""
        for start in range(0, weight.n_elements, PIECE):
            end = min(start + PIECE, weight.n_elements)
            data = read_stored(self._files, weight, start, end)
            yield self._dequantizer.to_float(weight.type, data, end - start)

    def bytes(self, weight: Weight) -> Iterator[Bytes]:
        """The stored bytes of a tensor, some millions at a time."""
        for start in range(0, weight.n_elements, PIECE):
            end = min(start + PIECE, weight.n_elements)
            yield read_stored(self._files, weight, start, end)

    def raw(self, weight: Weight) -> Bytes:
        """(rows, bytes of a row) the stored bytes of a tensor, mapped, not read."""
        row = weight.type.row_bytes(weight.ne[0] if weight.ne else 1)
        if not weight.n_elements:
            return np.empty((weight.n_rows, row), np.uint8)
        try:
            return np.memmap(weight.path, np.uint8, "r", weight.offset, (weight.n_rows, row))
        except (OSError, ValueError) as error:
            raise UsageError(f"{weight.path} cannot be read: {reason(error)}") from None

    def measure(
        self,
        weights: Sequence[Weight],
        threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Iterator[WeightStats]:
        """The figures of tensors, in order. `threads` pieces are computed at once, by default one
        per CPU; the result does not depend on it. `on_progress` gets (bytes read, bytes to read).
        Raises `UsageError` for a tensor that `check` refuses, or if a file became shorter."""
        for weight in weights:
            self.check(weight)
        jobs = [
            Job(
                weight.n_bytes,
                [
                    partial(_piece, self._files, self._dequantizer, weight, *at)
                    for at in _at(weight)
                ],
                partial(join_stats, weight),
            )
            for weight in weights
        ]
        return work(jobs, threads or usable_cpus(), on_progress)


def _at(weight: Weight) -> Iterator[tuple[int, int]]:
    """The ranges of elements of the pieces; of a tensor with several rows, whole rows."""
    step = PIECE
    if weight.n_rows > 1:
        step = max(PIECE // weight.ne[0], 1) * weight.ne[0] if weight.ne[0] else 1
    for start in range(0, weight.n_elements, step):
        yield start, min(start + step, weight.n_elements)


def _piece(
    files: Files, dequantizer: Dequantizer, weight: Weight, start: int, end: int
) -> PieceStats:
    row = weight.ne[0] if weight.n_rows > 1 else 0
    stride = sample_stride(weight.n_elements, weight.ne[0] if weight.ne else 1)
    stats = StatsSum(start, stride, row)
    room = np.empty(max(CHUNK // row, 1) * row if row else CHUNK, np.float32)
    for at in range(start, end, room.size):
        n = min(room.size, end - at)
        data = read_stored(files, weight, at, at + n)
        list(dequantizer.fill(weight.type, data, n, room))
        stats.add(room[:n])
    return stats.finish()
