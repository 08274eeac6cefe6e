"""The time that is shown first: the end of a prefill and three decodes."""

from __future__ import annotations

from collections.abc import Iterator

from converters.exports.first_look import first_look
from llamacpp_instr.schema import Event, Mark, StepBegin, StepEnd


def step(number: int, begin: int, end: int, phase: str = "decode") -> Iterator[tuple[int, Event]]:
    yield 0, StepBegin(
        t=begin, step=number, ctx=0, kind="decode", phase=phase, n_tokens=1, n_outputs=1, n_seqs=1,
    )  # fmt: skip
    yield 0, StepEnd(t=end, step=number, status=0, n_ubatch=1, n_reused=0, prepare=0, readback=0)


DECODES = [*step(1, 1000, 1100), *step(2, 1100, 1200), *step(3, 1200, 1300), *step(4, 1300, 1400)]


def test_a_short_prefill_is_shown_whole() -> None:
    assert first_look([*step(0, 900, 990, "prefill"), *DECODES]) == (900, 1300)


def test_of_a_long_prefill_so_much_as_of_the_decodes() -> None:
    begin, end = first_look([*step(0, 0, 1000, "prefill"), *DECODES]) or (0, 0)
    assert (begin, end) == (700, 1300)


def test_a_warm_up_is_passed_over() -> None:
    warm_up = [
        (0, Mark(t=0, mark=0, name="warm-up", phase="begin")),
        *step(0, 1, 2, "prefill"), *step(1, 2, 3), *step(2, 3, 4), *step(3, 4, 5), *step(4, 5, 6),
        (0, Mark(t=7, mark=0, name="warm-up", phase="end")),
    ]  # fmt: skip
    assert first_look([*warm_up, *step(0, 900, 990, "prefill"), *DECODES]) == (900, 1300)


def test_what_there_is_when_there_is_less() -> None:
    assert first_look([]) is None
    assert first_look([*step(0, 900, 990, "prefill")]) == (900, 990)
    assert first_look(DECODES[:2]) == (1000, 1100)


def test_it_reads_no_further_than_it_has_to() -> None:
    def events() -> Iterator[tuple[int, Event]]:
        yield from DECODES
        raise AssertionError("read on")

    assert first_look(events()) is not None
