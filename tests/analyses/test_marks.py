"""Marks of the application: the table, and the innermost mark of a step."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.stats import NO_MARK, compute_stats
from llamacpp_instr.converters.analyses.summary import compute_marks
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from tests.kit.made_log import make_log
from tests.kit.reports import session_of


def marked(directory: Path, seed: int) -> Session:
    """Two contexts in two threads, with marks at any times of their threads."""
    random = Random(seed)
    events = [e for e in make_log(lambda _low, high: high, 2, "detailed") if type(e) is not s.Mark]
    steps = [e for e in events if isinstance(e, s.StepBegin)]
    low, high = steps[0].t, max(e.t for e in steps) + 10_000
    for number in range(12):
        name, thread = random.choice(["retrieval", "answer", "turn"]), random.choice([100, 101])
        begin, end = sorted((random.randint(low, high), random.randint(low, high)))
        mark = s.Mark(t=begin, mark=number, name=name, phase="begin", thread=thread)
        kind = random.choice(["span", "span", "span", "open", "instant"])
        events.append(mark if kind != "instant" else replace(mark, phase="instant"))
        if kind == "span":
            events.append(replace(mark, t=end, phase="end"))
    return session_of(directory / "session.log", events)


@pytest.mark.parametrize("seed", range(8))
def test_marks_by_looking_at_every_pair(tmp_path: Path, seed: int) -> None:
    session = marked(tmp_path, seed)
    steps, marks = session.steps, session.marks
    inner: dict[str, int] = {}
    held = {name: np.zeros(3, np.int64) for name in marks["name"]}
    columns = ("begin", "end", "thread", "n_tokens")
    for begin, end, thread, n_tokens in zip(*(steps[of].tolist() for of in columns), strict=True):
        around = [
            (since, name)
            for name, since, until, of in zip(
                *(marks[c].tolist() for c in ("name", "begin", "end", "thread")), strict=True
            )
            if of == thread and since <= begin and (until < 0 or until > begin)
        ]
        innermost = max(around)[1] if around else NO_MARK
        inner[innermost] = inner.get(innermost, 0) + end - begin
        for _, name in around:
            held[name] += [1, end - begin, n_tokens]

    report = compute_stats(session, "mark")[0]
    assert {row[0]: row[2] for row in report.rows} == inner
    both = compute_stats(session, "mark,context")[0]
    assert sum(int(row[3] or 0) for row in both.rows) == sum(inner.values())

    report = compute_marks(session)
    assert {row[0]: row[6:] for row in report.rows} == {k: v.tolist() for k, v in held.items()}
    for name, count, total, _mean, _median, longest, *_ in report.rows:
        of = marks.rows(marks["name"] == name)
        spans = (of["end"] - of["begin"])[of["end"] > of["begin"]]
        assert count == len(of)
        assert total == (spans.sum() if len(spans) else None)
        assert longest == (spans.max() if len(spans) else None)


def test_without_marks_there_are_no_rows(tmp_path: Path) -> None:
    events = [e for e in make_log(Random(3).randint) if type(e) is not s.Mark]
    assert compute_marks(session_of(tmp_path / "session.log", events)).rows == []
