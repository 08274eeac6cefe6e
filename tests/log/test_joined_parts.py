"""What is left out when the parts of a log are read as one, event by event."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import LogEnd, LogReader
from llamacpp_instr.log.runs import Joiner, find_runs, read_run
from tests.kit.made_log import encode, make_log
from tests.kit.split_log import split_log
from tests.kit.steady_log import write

EVENTS = make_log(Random(3).randint, n_contexts=1, level="minimal")
END: dict[str, Any] = {"t": 0, "reason": "closed", "dropped": 1, "dropped_ops": 2, "bytes": 3,
                       "decode_ns": 4, "overhead_ns": 5}  # fmt: skip


def one(kind: type[s.Event]) -> Any:
    return next(event for event in EVENTS if isinstance(event, kind))


def mark(number: int, phase: Any) -> s.Mark:
    return s.Mark(t=0, mark=number, name="m", phase=phase)


def token(ctx: int, index: int) -> s.Token:
    return s.Token(t=0, ctx=ctx, index=index, id=1, text="x", dur=1)


def test_a_session_starts_once_and_a_part_repeats_models_and_contexts() -> None:
    start, model, tensor, context = (
        one(of) for of in (s.SessionStart, s.Model, s.Tensor, s.Context)
    )
    joiner = Joiner()
    joiner.begin_part(())
    assert [joiner.take(of) for of in (start, model, tensor, context)] == [True] * 4
    joiner.begin_part(())
    assert [joiner.take(of) for of in (start, model, tensor, context)] == [False] * 4
    new = [replace(model, model=1), replace(tensor, model=1), replace(context, ctx=1)]
    assert [joiner.take(of) for of in new] == [True] * 3
    joiner.begin_part(())
    assert joiner.take(replace(tensor, model=1)), "of a model that this part did not repeat"
    assert joiner.take(one(s.StepBegin))


def test_the_index_of_a_token_counts_through_the_parts() -> None:
    joiner = Joiner()
    found = []
    for part in ([(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0), (1, 1)], [(1, 0), (0, 0)]):
        joiner.begin_part(())
        for ctx, index in part:
            event = token(ctx, index)
            assert joiner.take(event)
            found.append((ctx, event.index))
    assert found == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2), (1, 3), (0, 3)]


def test_an_open_mark_goes_on_in_the_next_part() -> None:
    """Mark 1 is open at the rotation, mark 2 ends in the first part, and 3 is new in the second."""
    joiner = Joiner()
    joiner.begin_part({1, 3})
    first = [mark(1, "begin"), mark(2, "begin"), mark(2, "end"), mark(1, "end"), mark(3, "end")]
    assert [joiner.take(of) for of in first] == [True, True, True, False, True]
    joiner.begin_part(())
    second = [mark(1, "begin"), mark(3, "begin"), mark(4, "instant"), mark(1, "end")]
    assert [joiner.take(of) for of in second] == [False, True, True, True]


def test_the_last_end_has_the_sums_of_all_parts() -> None:
    joiner = Joiner()
    joiner.last = False
    joiner.begin_part({})
    assert not joiner.take(s.SessionEnd(**END, events={"token": 1, "kv": 2}))
    joiner.begin_part({})
    assert not joiner.take(s.SessionEnd(**END, events={"token": 10}))
    joiner.last = True
    joiner.begin_part({})
    last = s.SessionEnd(**END, events={"kv": 5, "note": 1})
    assert joiner.take(last)
    assert last.events == {"token": 11, "kv": 7, "note": 1}
    names = ("dropped", "dropped_ops", "bytes", "decode_ns", "overhead_ns")
    assert [getattr(last, name) for name in names] == [3, 6, 9, 12, 15]


def parts_of(directory: Path) -> list[Path]:
    parts = split_log(make_log(Random(9).randint, 2, "minimal"), 3, Random(5))
    return [write(directory / f"{i}.log", part) for i, part in enumerate(parts)]


def test_progress_counts_the_bytes_of_all_parts(tmp_path: Path) -> None:
    paths = parts_of(tmp_path)
    sizes = [path.stat().st_size for path in paths]
    (run,) = find_runs(paths)
    calls: list[tuple[int, int]] = []
    reader = read_run(run, on_progress=lambda *of: calls.append(of))
    assert reader.path == str(paths[0])
    list(reader)
    assert {total for _, total in calls} == {sum(sizes)}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert {0, sizes[0], sizes[0] + sizes[1], sum(sizes)} <= set(done)
    assert reader.path == str(paths[0])


def test_what_is_missing_or_was_not_closed_is_reported(tmp_path: Path) -> None:
    paths = parts_of(tmp_path)
    cut = paths[0].read_bytes()
    paths[0].write_bytes(cut[: cut.rindex(b"\n", 0, -1) + 1] + b"bad\n")
    (run,) = find_runs([paths[0], paths[2]])
    reader = read_run(run, lenient=True)
    list(reader)
    assert reader.end is not None
    assert (reader.end.state, reader.end.skipped) == ("closed", 1)
    assert reader.end.parts == ("part 2 is missing", f"{paths[0]} was not closed")
    assert reader.end.sentence() == (
        f"1 damaged line was skipped; part 2 is missing; {paths[0]} was not closed"
    )


# --- one log ---


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (LogEnd("closed", 9, 0, 0), ""),
        (LogEnd("unclosed", 9, 0, 0), "the log was not closed"),
        (LogEnd("truncated", 9, 0, 0), "the log was not closed and ends in the middle of line 10"),
        (LogEnd("closed", 9, 1, 0), "1 damaged line was skipped"),
        (LogEnd("closed", 9, 2, 0, 1),
         "2 damaged lines were skipped; 1 event that refers to missing ones was left out"),
        (LogEnd("closed", 9, 0, 0, 2, ("x",)),
         "2 events that refer to missing ones were left out; x"),
    ],
)  # fmt: skip
def test_the_end_of_a_log_in_words(end: LogEnd, sentence: str) -> None:
    assert end.sentence() == sentence
    assert end.notes() == ([f"{sentence[0].upper()}{sentence[1:]}."] if sentence else [])


@pytest.mark.parametrize(("newline", "lines"), [(True, 3), (False, 3)])
def test_the_last_line_may_lack_its_newline(newline: bool, lines: int, tmp_path: Path) -> None:
    start, end = EVENTS[0], s.SessionEnd(**END, events={})
    data = encode([start, one(s.Model), end])
    path = tmp_path / "a.log"
    path.write_bytes(data if newline else data[:-1])
    reader = LogReader(path)
    assert len(list(reader)) == lines
    before = len(encode([start, one(s.Model)]))
    assert reader.end == LogEnd("closed", lines, 0, before)


def test_progress_is_that_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", EVENTS)
    calls: list[tuple[int, int]] = []
    list(LogReader(path, on_progress=lambda *of: calls.append(of)))
    size = path.stat().st_size
    assert calls[0] == (0, size)
    assert calls[-1] == (size, size)
