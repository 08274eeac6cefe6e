"""The columns of an event: whether they are consistent and possible, and when its intervals are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log import schema

Int64 = NDArray[np.int64]


def sequence_problems(event: schema.StepBegin) -> list[str]:
    """Why the columns of a step's sequences are invalid, one message each."""
    columns = {
        "seq_pos": event.seq_pos or [],
        "seq_tokens": event.seq_tokens,
        "seq_outputs": event.seq_outputs,
    }
    return _of_other_length(columns, len(event.seq or []), "seq")


def _of_other_length(columns: dict[str, list[int] | None], n: int, other: str) -> list[str]:
    """Which columns do not have the length `n` of the `other`, one message each."""
    problems = []
    for name, column in columns.items():
        if column is not None and len(column) != n:
            problems.append(f"column `{name}` has {len(column)} entries, `{other}` has {n}")
    return problems


def interval_problems(
    event: schema.Layers | schema.Ops | schema.Splits, **columns: list[int] | None
) -> list[str]:
    """Why intervals are invalid, one message each; `columns` must be as long as `dur`."""
    problems = _of_other_length(columns, len(event.dur), "dur")
    if sum(event.gap or (), sum(event.dur)) > schema.LATEST:
        problems.append("an impossible time")
    return problems


_CLIENTS, _SERVERS = ("queue", "send", "wait"), ("receive", "work", "answer")
_MERGED = (*_SERVERS, "arrive", "start", "run")


def call_problems(event: schema.Rpc, side: str) -> list[str]:
    """Why the commands of one end of a connection are invalid, one message each."""
    columns = {name: getattr(event, name) for name in event.__struct_fields__[3:]}
    needed: tuple[str, ...] = _CLIENTS if side == "client" else _SERVERS
    if side == "client" and event.arrive is not None:
        needed += _MERGED
    problems = [f"column `{name}` is missing" for name in needed if columns[name] is None]
    others = {*_CLIENTS, *_MERGED, "step", "split"}.difference(needed)
    if side == "client":
        others -= {"step", "split"}
    found = [name for name in columns if name in others and columns[name] is not None]
    problems += [f"column `{name}` does not belong to a {side}" for name in found]
    n = len(event.command)
    problems += _of_other_length(columns, n, "command")
    times = [columns[name] or () for name in ("gap", *needed)]
    if sum(abs(ns or 0) for of in times for ns in of) > schema.LATEST:
        problems.append("an impossible time")
    return problems


def interval_columns(
    event: schema.Ops | schema.Layers | schema.Splits,
) -> tuple[Int64 | None, Int64]:
    """The `gap` (None if absent) and the `dur` of the intervals of a whole event (`resolve`)."""
    gap = None if event.gap is None else np.array(event.gap, np.int64)
    return gap, np.array(event.dur, np.int64)


def kernel_times(event: schema.Ops | schema.Layers) -> tuple[Int64, Int64]:
    """Begin and end of each kernel or layer, in ns."""
    gap, dur = interval_columns(event)
    end = event.t + np.cumsum(dur if gap is None else gap + dur)
    return end - dur, end
