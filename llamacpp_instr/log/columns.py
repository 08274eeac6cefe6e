"""Whether the columns of an event fit each other, and its intervals the time."""

from __future__ import annotations

from llamacpp_instr.log import schema


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
