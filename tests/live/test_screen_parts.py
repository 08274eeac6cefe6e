"""The parts of the text view that have bounds: series, groups of layers, cells, and the phases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamacpp_instr.converters.live.server import LiveServer
from llamacpp_instr.converters.live.tui import (
    CELLS,
    DIM,
    GOOD,
    RSS,
    SHADES,
    STRONG,
    TOKENS,
    LiveApp,
    _background,
    _cell,
    _lanes,
    _range,
    _row_ranges,
    _series,
    _sparks,
)


def frame(t: int, *seconds: tuple[int, int]) -> dict[str, Any]:
    """At `t` ns; each second has its number and a value of every column."""
    return {"t": t, "seconds": [[number, *[value] * 8] for number, value in seconds]}


@pytest.mark.parametrize(
    ("column", "expected"),
    [(TOKENS, [0, 7, 0, 9]), (CELLS, [5, 7, 7, 9]), (RSS, [5, 7, 7, 9])],
)
def test_cells_and_memory_stay_while_nothing_happens(column: int, expected: list[int]) -> None:
    of = frame(10 * 10**9, (3, 4), (5, 5), (7, 7), (9, 9), (10, 99))
    assert _series(of, column, 4) == expected
    assert _series(of, column, 1) == [9]
    assert _series(of, column, 0) == []


def test_the_highest_bar_is_the_largest_value() -> None:
    of = frame(4 * 10**9, (0, 1), (1, 4), (2, 8), (3, 7))
    assert _sparks(of, TOKENS, 4) == "▂▅██"
    assert _sparks(frame(2 * 10**9), TOKENS, 2) == "▁▁"
    assert _sparks(of, TOKENS, -1) == ""


@pytest.mark.parametrize(
    ("n", "height", "ranges"),
    [
        (5, 9, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        (5, 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]), (5, 4, [(0, 1), (1, 3), (3, 5)]),
        (6, 3, [(0, 1), (1, 4), (4, 6)]), (5, 2, [(0, 1), (1, 5)]), (5, 1, [(0, 1), (1, 5)]),
        (5, 0, [(0, 1), (1, 5)]), (1, 3, [(0, 1)]),
    ],
)  # fmt: skip
def test_layers_are_in_groups_that_fit(n: int, height: int, ranges: list[tuple[int, int]]) -> None:
    assert list(_row_ranges(n, height)) == ranges


def test_a_group_of_one_layer_is_that_layer() -> None:
    assert (_range(3, 3), _range(3, 4), _range(0, 0)) == ("3", "3-4", "0")


@pytest.mark.parametrize(
    ("value", "share", "shade"),
    [(0, 0, 0), (1, 0, 1), (1, 0.01, 1), (1, 0.25, 1), (1, 0.26, 2), (1, 0.75, 3), (1, 1, 4),
     (1, 2, 4)],
)  # fmt: skip
def test_a_narrow_cell_is_a_shade(value: float, share: float, shade: int) -> None:
    assert _cell(value, share, 8).plain == SHADES[shade] * 7 + " "
    assert _cell(value, share, 2).plain == SHADES[shade] + " "


def test_a_wide_cell_has_its_time() -> None:
    assert _cell(5000, 0.5, 9).plain == "5.00 µs  "
    assert _cell(5000, 0.5, 12).plain == "  5.00 µs   "
    assert _cell(0, 0, 9).plain == " " * 9


@pytest.mark.parametrize(("share", "ink"), [(0.0, "white"), (0.6, "white"), (0.61, "black")])
def test_letters_can_be_read_on_their_background(share: float, ink: str) -> None:
    color = _background(share).color
    assert color is not None
    assert color.name == ink


@pytest.mark.parametrize(
    ("phases", "now", "then"),
    [(["prefill", "decode"], None, "prefill"), (["prefill", "decode"], "prefill", "decode"),
     (["decode", "encode"], None, "encode"), (["a", "b", "c"], "c", "a"), ([], None, None),
     (["decode"], None, "decode")],
)  # fmt: skip
def test_the_next_phase_follows_the_one_that_is_shown(
    phases: list[str], now: str | None, then: str | None
) -> None:
    session: Any = SimpleNamespace()
    app = LiveApp(session)
    app.action_phase()
    assert app.phase is None, "there is no frame yet"
    app.frame, app.phase = {"heat": dict.fromkeys(phases)}, now
    app.action_phase()
    assert app.phase == then


@pytest.mark.parametrize(
    ("after", "n"),
    [("0", 0), ("17", 17), ("9" * 18, 10**18 - 1), ("9" * 19, -1), ("-1", -1), ("x", -1),
     ("", -1), (None, -1)],
)  # fmt: skip
def test_a_viewer_says_what_it_has(after: str | None, n: int) -> None:
    """Anything else than a number is that of a viewer without a frame."""
    import asyncio

    asked: list[int] = []

    class Viewer:
        query_params = {} if after is None else {"after": after}

        async def accept(self) -> None:
            pass

        async def receive(self) -> dict[str, str]:
            await asyncio.sleep(0)
            return {"type": "websocket.disconnect"}

    async def send(_viewer: object, number: int) -> None:
        asked.append(number)

    server: Any = SimpleNamespace(_send=send)
    viewer: Any = Viewer()
    asyncio.run(LiveServer._frames(server, viewer))
    assert asked == [n]


@pytest.mark.parametrize("under_way", [True, False])
def test_a_request_under_way_stands_out(under_way: bool) -> None:
    lane = {"lane": 7, "task": None, "name": "chat", "seq": 1, "over": False, "prompt": 3,
            "to_first": None, "between": None, "n_tokens": 1,
            "tokens": [[0, "One", 0, None]]}  # fmt: skip
    of = {"lanes": [lane], "active": [7] if under_way else [], "n_requests": 1, "between": None}
    (_, _, line) = _lanes(of, 80, 3)
    styles = {line.plain[span.start : span.end].strip(): span.style for span in line.spans}
    assert styles["▸" if under_way else "·"] == (GOOD if under_way else DIM)
    assert styles["chat"] == (STRONG if under_way else DIM)
    assert (DIM in styles.values()) == (not under_way)
