"""Extends a real log by repeating its last decodes at later times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_NUMBERS = re.compile(r'"(t|step|compute|index)":(\d+)')


def write_long_log(real: Path, out: Path, n_bytes: int) -> int:
    """Writes a log of about `n_bytes` bytes to `out`; returns its number of op slices.

    It repeats the steps after the last graph, so that every line keeps its meaning.
    """
    lines = real.read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    built = max(i for i, e in enumerate(events) if e["event"] in ("graph", "plan"))
    first = next(i for i in range(built, len(events)) if events[i]["event"] == "step_begin")
    last = max(i for i, e in enumerate(events) if e["event"] in ("step_end", "token"))
    repeated = [i for i in range(first, last + 1) if events[i]["event"] not in _LEFT_OUT]
    block = [events[i] for i in repeated]
    others = {e["event"] for e in block} - _REPEATED
    assert not others, f"the steps have events that cannot be repeated: {others}"
    ids = {key: [e[key] for e in block if key in e] for key in ("step", "compute", "index")}
    times = [e["t"] for e in block]
    # a copy begins where the previous one ended
    ahead = {key: max(found) - min(found) + 1 for key, found in ids.items() if found}
    ahead["t"] = max(times) - min(times) + 100_000
    parts = [_cut(lines[i]) for i in repeated]
    n_ops = sum(len(e["dur"]) for e in events if e["event"] == "ops" and not e.get("thread"))
    per_copy = sum(len(e["dur"]) for e in block if e["event"] == "ops" and not e.get("thread"))
    with out.open("w", encoding="utf-8") as file:
        size = file.write("\n".join(lines[: last + 1]) + "\n")
        copy = 0
        while size < n_bytes:
            copy += 1
            n_ops += per_copy
            shift = {key: step * copy for key, step in ahead.items()}
            size += file.write("".join(_shifted(part, shift) for part in parts))
    return n_ops


def _cut(line: str) -> list[Any]:
    """A line as alternating text and (key, number)."""
    parts: list[Any] = []
    at = 0
    for found in _NUMBERS.finditer(line):
        parts += [line[at : found.start(2)], (found[1], int(found[2]))]
        at = found.end(2)
    return [*parts, line[at:] + "\n"]


def _shifted(parts: list[Any], shift: dict[str, int]) -> str:
    return "".join(
        part if isinstance(part, str) else str(part[1] + shift[part[0]]) for part in parts
    )


_REPEATED = {"step_begin", "kv", "compute", "layers", "ops", "step_end", "token"}
_LEFT_OUT = {"machine"}
"""counts since the session began, ten times a second"""
