"""The contents of an importance matrix: its text, what it has seen of each tensor and expert, and
the channels whose inputs are far larger than those of the others.

A channel is an outlier if its mean square is above `OUTLIER` times the median of the channels of
its tensor, or of its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.model.file import layer_of, role_of
from llamacpp_instr.model.imatrix import ImportanceMatrix
from llamacpp_instr.report.report import Cell, Figures, Report

OUTLIER = 100
"""ten times the root mean square of the median channel"""
MOST_CHANNELS = 20
"""outlier channels that are listed"""
FEW_EXPERTS = 8
"""numbers of experts that are listed for a tensor"""


@dataclass(frozen=True)
class _Entry:
    """What a matrix has of a tensor."""

    name: str
    mean_squares: NDArray[np.float32]
    """(experts, columns), only of experts that were reached"""
    reached: NDArray[np.intp]
    """their numbers"""
    counts: NDArray[np.float32] | None
    """the inputs of each expert; None in the older format"""

    @property
    def medians(self) -> NDArray[np.float32]:
        return np.asarray(np.median(self.mean_squares, axis=1))

    @property
    def has_experts(self) -> bool:
        return self.counts is not None and self.counts.size > 1

    def outliers(self) -> list[tuple[int, int, float, float]]:
        """Expert, channel, mean square, and the ratio of that to the median."""
        medians = self.medians[:, None]
        places = np.argwhere((medians > 0) & (self.mean_squares > OUTLIER * medians))
        return [
            (int(self.reached[row]), int(column), value, value / float(medians[row, 0]))
            for row, column in places
            for value in [float(self.mean_squares[row, column])]
        ]


def imatrix_reports(matrix: ImportanceMatrix) -> list[Report]:
    """The reports of `instr inspect`: the matrix, its coverage by role, the experts that it never
    reached, and its outlier channels, the largest first."""
    entries = _entries(matrix)
    return [
        _overview(matrix),
        *filter(lambda of: of.rows, [_coverage(entries), _never_reached(matrix)]),
        _outliers(entries),
    ]


def imatrix_tensors(matrix: ImportanceMatrix) -> Report:
    """Every tensor: layer, role, columns, experts and those never reached, the least inputs of one;
    the mean, median and largest of the columns' mean squares, how many of these are outliers, and
    how many are zero."""
    columns = header(
        "Tensor", ("layer", "layer"), "role", ("count", "columns", "experts", "never reached"),
        ("count", "least inputs"), ("number", "mean", "median", "largest"),
        ("count", "outliers", "zeros"),
    )  # fmt: skip
    return Report("Tensors", columns, list(map(_row, _entries(matrix))))


def _row(entry: _Entry) -> list[Cell]:
    values = entry.mean_squares
    figures: list[Cell] = [None] * 3
    if values.size:
        mean = float(values.mean(dtype=np.float64))
        figures = [mean, float(np.median(values)), float(values.max())]
    return [
        entry.name, layer_of(entry.name), role_of(entry.name), values.shape[1],
        *_experts([entry]), *figures, len(entry.outliers()), int((values == 0).sum()),
    ]  # fmt: skip


def _entries(matrix: ImportanceMatrix) -> list[_Entry]:
    found = []
    for name, values in matrix.entries.items():
        counts = matrix.counts.get(name)
        reached = np.flatnonzero(counts > 0) if counts is not None else np.arange(1)
        by_expert = values.reshape(1 if counts is None else counts.size, -1)
        found.append(_Entry(name, by_expert[reached], reached, counts))
    return found


def _overview(matrix: ImportanceMatrix) -> Report:
    texts = [text for text in (matrix.dataset, *matrix.more_datasets) if text is not None]
    rows: list[list[Cell]] = [["file", str(matrix.path), None]]
    rows += [["text", text, None] for text in texts] or [["text", "not stated", None]]
    tokens = f"of {matrix.chunk_size:,} tokens" if matrix.chunk_size else None
    rows += [
        ["chunks", matrix.n_chunks or "not stated", tokens],
        ["tensors", len(matrix.entries), None],
    ]
    notes = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in matrix.poor_coverage()]
    if not matrix.counts:
        notes.append("The older format does not say which experts were reached.")
    columns = header("fact", "value", "explained")
    return Report("Importance matrix", columns, rows, notes, headed=False)


def _coverage(entries: Sequence[_Entry]) -> Report:
    columns = header("Role", ("count", "tensors", "experts", "never reached", "least inputs"))
    rows: list[list[Cell]] = [
        [role, len(of), *_experts(of)]
        for role, of in grouped(entries, lambda entry: role_of(entry.name)).items()
    ]
    note = "Least inputs: of the tensor, or the expert, that has seen the fewest tokens."
    return Report("Coverage by role", columns, rows, [note])


def _experts(entries: Sequence[_Entry]) -> list[Cell]:
    """How many there are, how many of them were never reached, and the least inputs of one."""
    counts = [entry.counts for entry in entries if entry.counts is not None]
    if not counts:
        return [None] * 3
    every = np.concatenate(counts)
    n_experts = every.size if any(entry.has_experts for entry in entries) else None
    return [n_experts, int((every <= 0).sum()), int(every.min())]


def _never_reached(matrix: ImportanceMatrix) -> Report:
    rows: list[list[Cell]] = []
    for name, experts in matrix.never_reached.items():
        more = ", …" if len(experts) > FEW_EXPERTS else ""
        numbers = ", ".join(map(str, experts[:FEW_EXPERTS])) + more
        rows.append([name, len(experts), matrix.counts[name].size, numbers])
    columns = header("Tensor", ("count", "experts", "of"), "numbers")
    return Report("Never reached", columns, rows, most=MOST_CHANNELS)


def _outliers(entries: Sequence[_Entry]) -> Report:
    found = [
        (entry.name, expert if entry.has_experts else None, channel, square, ratio)
        for entry in entries
        for expert, channel, square, ratio in entry.outliers()
    ]
    found.sort(key=lambda of: -of[-1])
    rows: list[list[Cell]] = [list(of) for of in found[:MOST_CHANNELS]]
    columns = header(
        "Tensor", ("id", "expert", "channel"), ("number", "mean square"),
        ("ratio", "times the median"),
    )  # fmt: skip
    notes = [
        f"An outlier is a channel whose mean square is above {OUTLIER} times the median of the "
        "channels of its tensor, or of its expert."
    ]
    if len(found) > MOST_CHANNELS:
        notes.append(f"The {MOST_CHANNELS} furthest above their median, of {len(found):,}.")
    elif not found:
        notes.append("No channel is an outlier.")
    figures: Figures = {"outlier channels": (len(found), "count")}
    return Report("Outlier channels", columns, rows, notes, figures=figures)
