"""The parts of a log as one session, in memory that does not grow with its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from llamacpp_instr.log import schema
from llamacpp_instr.log.session import Session, Table, with_result_times


class JoinedParts:
    """Keeps what the steps in the parts of a log need (about 230 bytes a step), for readers whose
    memory does not grow with the kernels."""

    def __init__(self) -> None:
        self._tables: dict[str, list[Table]] = {
            name: [] for name in ("steps", "sequences", "tokens", "marks", "machine", "syncs")
        }
        self._contexts: dict[int, schema.Context] = {}

    def add(self, part: Session) -> None:
        """The next part."""
        self._part = part
        self._contexts |= part.contexts
        for name, tables in self._tables.items():
            table = getattr(part, name)
            if name == "tokens":  # without their texts
                table = Table({key: table[key] for key in ("ctx", "seq", "step", "t", "dur")})
            tables.append(table)

    def session(self) -> Session:
        """The last part, with these tables and the contexts of the whole log. Call it once."""
        joined: dict[str, Any] = {}
        while self._tables:
            name, tables = self._tables.popitem()
            columns = {key: np.concatenate([of[key] for of in tables]) for key in tables[0].columns}
            joined[name] = Table(columns)
        joined["steps"] = with_result_times(joined["steps"], joined["syncs"])
        return replace(self._part, contexts=self._contexts, **joined)
