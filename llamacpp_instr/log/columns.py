"""Measurements as columns: columns that grow with each event, and complete tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.schema import LATEST, Event, Layers, Ops, Splits, StepBegin

Int64 = NDArray[np.int64]


class Table:
    """Columns of equal length by name: int64, bool or float64 if possible, else objects (text, and
    numbers that may be absent)."""

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def rows(self, selected: NDArray[Any]) -> Table:
        """The rows that a mask or an array of indices selects."""
        return Table({name: column[selected] for name, column in self.columns.items()})

    def tuples(self, *names: str) -> Iterator[Any]:
        """The values of these columns, row by row, as Python's own numbers."""
        return zip(*(self[name].tolist() for name in names), strict=True)


class Columns:
    """Collects rows with 8 bytes per number. `kinds` is the kind of each column: `q` integers, `b`
    booleans, `O` the rest. The schema limits numbers to 64 bits."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._columns: dict[str, Any] = {
            name: [] if kind == "O" else array(kind) for name, kind in kinds.items()
        }
        self._append = [column.append for column in self._columns.values()]

    @classmethod
    def of(cls, event: type[Event]) -> Columns:
        """A column for each key of an event."""
        return cls(kinds_of(event))

    def add(self, values: Sequence[Any]) -> None:
        for append, value in zip(self._append, values, strict=True):
            append(value)

    def add_event(self, event: Event) -> None:
        self.add([getattr(event, name) for name in self._kinds])

    def table(self) -> Table:
        """The rows so far, which share their memory with these columns: add none after it."""
        types = {"q": np.int64, "b": np.bool_}
        return Table({
            name: np.array(self._columns[name], object) if kind == "O"
            else np.frombuffer(self._columns[name], types[kind])
            for name, kind in self._kinds.items()
        })  # fmt: skip


@cache
def kinds_of(event: type[Event]) -> Mapping[str, str]:
    """The kind of a column for each key of an event."""
    plain = {f.name: getattr(f.type, "__origin__", f.type) for f in msgspec.structs.fields(event)}
    return {name: {int: "q", bool: "b"}.get(of, "O") for name, of in plain.items()}


def interval_columns(event: Ops | Layers | Splits) -> tuple[Int64 | None, Int64]:
    """The `gap` (None if absent) and the `dur` of the intervals of a whole event (`resolve`)."""
    gap = None if event.gap is None else np.array(event.gap, np.int64)
    return gap, np.array(event.dur, np.int64)


def kernel_times(event: Ops | Layers) -> tuple[Int64, Int64]:
    """Begin and end of each kernel or layer, in ns."""
    gap, dur = interval_columns(event)
    end = event.t + np.cumsum(dur if gap is None else gap + dur)
    return end - dur, end


def sequence_problems(event: StepBegin) -> Iterator[str]:
    """Why the columns of a step's sequences are invalid, one message each."""
    n = len(event.seq or ())
    for name in ("seq_pos", "seq_tokens", "seq_outputs"):
        column = getattr(event, name)
        if len(column or ()) != n and (column is not None or name == "seq_pos"):
            yield f"column `{name}` has {len(column or ())} entries, `seq` has {n}"


def interval_problems(event: Layers | Ops | Splits, **columns: list[int] | None) -> Iterator[str]:
    """Why the intervals of an event are invalid, one message each; `columns` must be as long as
    `dur`."""
    for name, column in columns.items():
        if column is not None and len(column) != len(event.dur):
            n = len(event.dur)
            yield f"column `{name}` has {len(column)} entries, `dur` has {n}"
    if sum(event.dur) + sum(event.gap or ()) > LATEST:
        yield "an impossible time"
