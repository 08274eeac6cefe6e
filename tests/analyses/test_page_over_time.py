"""The charts over time of a page, of batches that are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses import page
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.plain_charts import BINS, Line
from tests.kit.batched_log import PERIOD_NS, STEP_NS, Batch, batched_log
from tests.kit.reports import session_of

PROMPT = Batch([(0, 0, 8)])


def decodes(n: int) -> list[Batch]:
    return [Batch([(0, 8 + i, 1)]) for i in range(n)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the charts, which are not drawn."""
    found: list[tuple[Any, ...]] = []

    def keep(*given: Any, areas: Sequence[Line] = (), **_: Any) -> None:
        found.append((*given, areas) if areas else given)

    for name in ("lines_over_time", "timed_text"):
        monkeypatch.setattr(page, name, keep)
    return found


def first_step(session: Session) -> int:
    """When the first step began, in ns since the session began."""
    return int(session.steps["begin"][0]) - session.start.t


# --- speed ---


def test_a_step_is_a_dot_in_its_middle(tmp_path: Path, drawn: list[tuple[Any, ...]]) -> None:
    session = session_of(tmp_path / "a.log", batched_log([PROMPT, *decodes(2)]))
    list(page.speed_over_time(session))
    ((_, axis, (prefill, decode), span, notes),) = drawn
    begin = first_step(session)
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.x.tolist() == [begin + STEP_NS // 2]
    assert decode.x.tolist() == [begin + PERIOD_NS * i + STEP_NS // 2 for i in (1, 2)]
    assert prefill.middle.tolist() == pytest.approx([8 * 1e9 / STEP_NS])
    assert decode.middle.tolist() == pytest.approx([1e9 / STEP_NS] * 2)
    assert span == (begin, begin + 2 * PERIOD_NS + STEP_NS)
    assert notes == []
    assert not axis.logarithmic, "the fastest is 8 times as fast as the slowest"


def test_speeds_that_are_more_than_eightfold_apart_have_a_logarithmic_axis(
    tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    session = session_of(tmp_path / "a.log", batched_log([Batch([(0, 0, 9)]), *decodes(2)]))
    list(page.speed_over_time(session))
    assert drawn[0][1].logarithmic


@pytest.mark.parametrize(("more", "grouped"), [(0, False), (1, True)])
def test_dots_that_stand_for_several_steps_are_explained(
    more: int, grouped: bool, tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    session = session_of(tmp_path / "a.log", batched_log([PROMPT, *decodes(BINS + more)]))
    list(page.speed_over_time(session))
    note = f"Each dot is the median of 1/{BINS} of the time, with its range."
    assert drawn[0][4] == [note] * grouped


def test_steps_without_a_duration_have_no_speed(
    tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    session = session_of(tmp_path / "a.log", batched_log([PROMPT, *decodes(2)]))
    session.steps["end"][1] = session.steps["begin"][1]
    list(page.speed_over_time(session))
    assert [len(line.x) for line in drawn[0][2]] == [1, 1]
    session.steps["n_tokens"][:] = 0
    assert list(page.speed_over_time(session)) == []


# --- memory ---


def memory(ctx: int, t: int, rss: int = 0, **of: int) -> s.Memory:
    return s.Memory(t=t, ctx=ctx, rss=rss, buffers=[s.BufferUse(buffer="CPU", **of)])


def with_contexts(models: list[int]) -> list[s.Event]:
    """A log whose contexts are of these models."""
    events = batched_log([PROMPT])
    (context,) = (event for event in events if isinstance(event, s.Context))
    (model,) = (event for event in events if isinstance(event, s.Model))
    at = events.index(context)
    others = [replace(context, ctx=i, model=of) for i, of in enumerate(models)]
    loaded = [replace(model, model=i, n_tensors=0) for i in range(1, max(models) + 1)]
    return [*events[:at], *loaded, *others, *events[at + 1 :]]


@pytest.mark.parametrize(("models", "weights"), [([0, 0], [100, 100]), ([0, 1], [100, 200])])
def test_the_weights_of_a_model_count_once(
    models: list[int], weights: list[int], tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    events = with_contexts(models)
    t = events[-1].t
    events += [memory(i, t + 10 * i, rss=7, model=100, context=10, compute=1) for i in range(2)]
    session = session_of(tmp_path / "a.log", events)
    list(page.memory_over_time(session))
    ((_, _, (line,), span, areas),) = drawn
    for of in areas:
        assert of.x.tolist() == [t - session.start.t, t + 10 - session.start.t]
    assert {of.name: of.middle.tolist() for of in areas} == {
        "weights": weights,
        "KV cache, state": [10, 20],
        "compute buffers": [1, 2],
    }
    assert line.middle.tolist() == [7, 7]
    assert span == (first_step(session), t + 10 - session.start.t)


def test_memory_that_changes_replaces_what_a_context_had(
    tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    events = batched_log([PROMPT])
    t = events[-1].t
    events += [memory(0, t, context=10, compute=5), memory(0, t + 10, context=30, compute=2)]
    list(page.memory_over_time(session_of(tmp_path / "a.log", events)))
    (_, _, lines, _, (_, cache, compute)) = drawn[0]
    assert cache.middle.tolist() == [10, 30]
    assert compute.middle.tolist() == [5, 2]
    assert lines == [], "the resident memory is unknown"


@pytest.mark.parametrize(("n", "left"), [(BINS, BINS), (BINS + 1, 1)])
def test_many_readings_of_one_moment_are_the_last(
    n: int, left: int, tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    events = batched_log([PROMPT])
    t = events[-1].t - STEP_NS
    # the span is a step, and a bin of it is more than 1 ns
    events += [memory(0, t, rss=i + 1, context=i) for i in range(n)]
    list(page.memory_over_time(session_of(tmp_path / "a.log", events)))
    (_, _, (line,), _, (_, cache, _)) = drawn[0]
    assert len(cache.x) == left
    assert cache.middle[-1] == n - 1
    assert line.middle[-1] == n


# --- cells ---


def kv(ctx: int, t: int, used: int, cache: int = 0, size: int = 512) -> s.Kv:
    return s.Kv(t=t, ctx=ctx, step=-1, op="clear", used=used, size=size, cache=cache)


def test_each_cache_has_a_line_of_its_cells(tmp_path: Path, drawn: list[tuple[Any, ...]]) -> None:
    """The one with the most comes first; a cache is named if its context has several."""
    events = with_contexts([0, 0, 0])
    t = events[-1].t
    events += [
        kv(0, t, 1), kv(1, t + 1, 5), kv(1, t + 2, 7, cache=1, size=2048), kv(0, t + 3, 3),
        kv(1, t + 4, 6), kv(2, t + 5, 2, cache=0),
    ]  # fmt: skip
    session = session_of(tmp_path / "a.log", events)
    list(page.cells_over_time(session))
    ((_, _, lines, span, notes),) = drawn
    assert {line.name: line.middle.tolist() for line in lines} == {
        "context 1, cache 1, of 2,048 cells": [7],
        "context 1, cache 0, of 512 cells": [5, 6],
        "context 0, of 512 cells": [1, 3],
        "context 2, of 512 cells": [2],
    }
    assert [line.middle.max() for line in lines] == [7, 6, 3, 2]
    assert lines[1].x.tolist() == [t + i - session.start.t for i in (1, 4)]
    assert span == (first_step(session), t + 5 - session.start.t)
    assert notes == []


@pytest.mark.parametrize("n", [page.MOST_LINES, page.MOST_LINES + 2])
def test_the_caches_with_the_fewest_cells_are_counted(
    n: int, tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    events = with_contexts([0] * n)
    events += [kv(i, events[-1].t, i + 1) for i in range(n)]
    list(page.cells_over_time(session_of(tmp_path / "a.log", events)))
    ((_, _, lines, _, notes),) = drawn
    most = page.MOST_LINES
    assert [line.middle[0] for line in lines] == list(range(n, n - most, -1))
    left = n - most
    assert notes == [f"{left} caches with fewer used cells are left out."] * (left > 0)


def test_without_memory_and_caches_there_are_no_charts(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", batched_log([PROMPT]))
    assert list(page.memory_over_time(session)) == []
    assert list(page.cells_over_time(session)) == []
    assert list(page.tokens_with_times(session)) == []


# --- tokens ---


def test_a_passage_for_each_sequence_that_goes_on(
    tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    """Times count from the previous token of the sequence, the first from the beginning."""
    batches = [
        Batch([(0, 0, 4), (3, 0, 4)], sampled=[(0, 1, "a"), (3, 2, "b" * 120)]),
        Batch([(0, 4, 1), (3, 4, 1)], sampled=[(0, 3, "c"), (3, 4, "d")]),
    ]
    session = session_of(tmp_path / "a.log", batched_log(batches))
    list(page.tokens_with_times(session))
    ((_, passages, notes),) = drawn
    began = STEP_NS + 10 + 9
    assert [pieces for _, pieces in passages] == [
        [("a", began), ("c", PERIOD_NS)],
        [("b" * page.MOST_TEXT, began), ("d", PERIOD_NS)],
    ]
    headings = [heading.rpartition(", from ")[0] for heading, _ in passages]
    assert headings == ["Context 0", "Context 0, sequence 3"]
    assert notes == ["Milliseconds are below each token; the background marks slow ones."]


@pytest.mark.parametrize(("n", "shown"), [(6, "abcdef"), (7, "abcefg")])
def test_of_many_tokens_the_first_and_the_last_are_shown(
    n: int, shown: str, tmp_path: Path, drawn: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(page, "MOST_TOKENS", 6)
    batches = [
        Batch([(0, 3 + i, 1) if i else (0, 0, 4)], sampled=[(0, i, "abcdefg"[i])]) for i in range(n)
    ]
    list(page.tokens_with_times(session_of(tmp_path / "a.log", batched_log(batches))))
    ((_, ((_, pieces),), notes),) = drawn
    assert "".join(text for text, _ in pieces) == shown
    assert notes[1:] == ["The first and the last 3 of 7 tokens."] * (n > 6)


def test_tokens_of_steps_that_failed_are_not_shown(
    tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    batches = [
        Batch([(0, 0, 4)], sampled=[(0, 1, "a")], status=1),
        Batch([(0, 0, 4)], sampled=[(0, 1, "b")]),
    ]
    list(page.tokens_with_times(session_of(tmp_path / "a.log", batched_log(batches))))
    assert [[text for text, _ in pieces] for _, pieces in drawn[0][1]] == [["b"]]
