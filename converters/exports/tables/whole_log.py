"""The tables that need the whole log, and what of it they need.

A request may go on in the next part of a log, and a `machine` event covers the steps before it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from llamacpp_instr.converters.exports.tables.cells import int64, optional, text
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session, Table

WHOLE_LOG = ("sessions", "steps", "requests")
_TOKEN = ("ctx", "seq", "step", "t", "dur")


class Kept:
    """The steps, sequences, tokens (without their text), marks and machine events of the parts of
    a log: 8 bytes for each of their numbers."""

    def __init__(self) -> None:
        self._tables: dict[str, list[Table]] = defaultdict(list)

    def add(self, part: Session) -> None:
        for name in ("steps", "sequences", "marks", "machine"):
            self._tables[name].append(getattr(part, name))
        tokens = Table({name: part.tokens[name] for name in _TOKEN})
        self._tables["tokens"].append(tokens)

    def session(self, last: Session) -> Session:
        """The last part with these of all parts, which are then no longer kept."""
        whole: dict[str, Any] = {
            name: _joined(self._tables.pop(name)) for name in tuple(self._tables)
        }
        return replace(last, **whole)


def request_columns(session: Session) -> dict[str, Any]:
    _, requests = find_requests(session)
    first = [of.token_times[0] if of.token_times else None for of in requests]
    return {
        "request": np.arange(1, len(requests) + 1, dtype=np.int64),
        "ctx": int64([of.ctx for of in requests]),
        "sequence": int64([of.seq for of in requests]),
        "name": text([of.name or None for of in requests]),
        "arrival": optional([None if of.arrival < 0 else of.arrival for of in requests]),
        "begin": int64([of.begin for of in requests]),
        "first_token": optional(first),
        "end": int64([of.end for of in requests]),
        "queued": optional([of.queued for of in requests]),
        "prompt": int64([of.prompt for of in requests]),
        "reused": int64([of.reused for of in requests]),
        "output": int64([len(of.token_times) for of in requests]),
    }


def _joined(tables: list[Table]) -> Table:
    return Table({name: np.concatenate([of[name] for of in tables]) for name in tables[0].columns})
