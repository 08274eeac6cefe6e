"""The time that is shown first: the end of a prefill and three decodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamacpp_instr.converters.exports.traced import first_look
from llamacpp_instr.log.schema import Event, Mark, StepBegin, StepEnd, Sync


def step(number: int, begin: int, end: int, phase: str = "decode") -> Iterator[tuple[int, Event]]:
    yield 0, StepBegin(
        t=begin, step=number, ctx=0, kind="decode", phase=phase, n_tokens=1, n_outputs=1, n_seqs=1,
    )  # fmt: skip
    yield 0, StepEnd(t=end, step=number, status=0, n_ubatch=1, n_reused=0, prepare=0, readback=0)


DECODES = [*step(1, 1000, 1100), *step(2, 1100, 1200), *step(3, 1200, 1300), *step(4, 1300, 1400)]


SHORT, LONG = [*step(0, 900, 990, "prefill")], [*step(0, 0, 1000, "prefill")]
WARM_UP = [
    (0, Mark(t=0, mark=0, name="warm-up", phase="begin")),
    *step(5, 1, 2, "prefill"), *step(6, 2, 3), *step(7, 3, 4), *step(8, 4, 5), *step(9, 5, 6),
    (0, Mark(t=7, mark=0, name="warm-up", phase="end")),
]  # fmt: skip
SHOWN = {
    "a short prefill whole": ([*SHORT, *DECODES], (900, 1300)),
    "of a long prefill so much as of the decodes": ([*LONG, *DECODES], (700, 1300)),
    "a warm-up is passed over": ([*WARM_UP, *SHORT, *DECODES], (900, 1300)),
    "the last prefill before the decodes": (
        [*step(8, 100, 200, "prefill"), *SHORT, *DECODES[:2], *step(9, 1101, 1110, "prefill")],
        (900, 1100),
    ),
    "a prefill as long as the decodes whole": (
        [*step(0, 700, 1000, "prefill"), *DECODES],
        (700, 1300),
    ),
    "a prefill that ends after the decodes began": (
        [*step(0, 0, 1050, "prefill"), *DECODES[:2]],
        (900, 1100),
    ),
    "an encode like a prefill": ([*step(0, 900, 990, "encode"), *DECODES], (900, 1300)),
    "a step that ends before it began": ([*step(1, 1000, 900)], (1000, 1000)),
    "decodes of a warm-up that never ended": (WARM_UP[:-1], (1, 6)),
    "two decodes": (DECODES[:4], (1000, 1200)),
    "another mark": (
        [
            (0, Mark(t=0, mark=0, name="turn", phase="begin")),
            *SHORT,
            *DECODES[:2],
            (0, Mark(t=0, mark=0, name="turn", phase="end")),
        ],
        (900, 1100),
    ),
    "a mark that ends in a warm-up": (
        [
            (0, Mark(t=0, mark=4, name="turn", phase="begin")),
            *WARM_UP[:3],
            (0, Mark(t=0, mark=4, name="turn", phase="end")),
            *WARM_UP[3:],
            *SHORT,
        ],
        (900, 990),
    ),
    "a prefill alone until the wait for its result ends": (
        [*SHORT, (0, Sync(t=991, ctx=0, dur=50_000))],
        (900, 50_991),
    ),
    "three decodes and the wait for the last": (
        [*DECODES[:6], (0, Sync(t=1300, ctx=0, dur=90_000)), *step(4, 91_300, 91_400)],
        (1000, 91_300),
    ),
    "nothing": ([], None),
    "a prefill alone": (SHORT, (900, 990)),
    "a decode alone": (DECODES[:2], (1000, 1100)),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_is_shown_first(case: str) -> None:
    events, shown = SHOWN[case]
    assert first_look(events) == shown


def test_it_reads_no_further_than_it_has_to() -> None:
    def events() -> Iterator[tuple[int, Event]]:
        yield from DECODES
        raise AssertionError("read on")

    assert first_look(events()) is not None
