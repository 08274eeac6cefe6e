"""The text view of `instr live`: what each place of the screen shows, at any size."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.style import Style
from rich.text import Text

from llamacpp_instr.converters.live.frames import glance
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.converters.live.tui import draw, usual_phase
from llamacpp_instr.log.schema import Message
from tests.kit.made_log import encode, make_log
from tests.live.followed_logs import open_log
from tests.live.test_state import state_of

STEERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;owned\x07\x9b2J\u202e[red]\x7f\x0b"
SIZES = [(80, 24), (160, 48), (40, 12), (20, 5), (300, 90), (79, 24), (1, 1)]
NOW = 3725
"""seconds, the last of which has just begun"""


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_screen_is_full_and_no_line_is_too_long(
    size: tuple[int, int], seed: int, tmp_path: Path
) -> None:
    width, height = size
    events = make_log(Random(seed).randint)
    for n in (1, -2):
        events.insert(n, Message(t=events[n].t, level="error", text=EVIL))
    (tmp_path / "it.log").write_bytes(encode(events))
    state, _ = state_of(tmp_path / "it.log")
    for model in state.models.values():
        model.name = model.ftype = EVIL
    frame = {**glance(state, False, height, width), "over": "closed"}
    for phase in (None, *frame["heat"]):
        lines = draw(frame, width, height, phase, paused=seed == 1)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
        assert not any(STEERS.search(line.plain) for line in lines)


def test_before_the_first_event_there_is_a_screen() -> None:
    lines = draw(frame_of(late=True), 80, 24, None, paused=False)
    assert len(lines) == 24
    assert lines[0].plain == "instr live  catching up with the log … · 0:00:00 · 0 steps · 0 tokens"
    assert lines[1].plain.split() == ["tokens/s", "0", "▁" * 10, "prompt", "tok/s", "0", "▁" * 10]


def test_the_output_of_a_large_vocabulary_does_not_hide_the_layers(tmp_path: Path) -> None:
    (tmp_path / "it.log").write_bytes(encode(make_log(Random(0).randint)))
    state, _ = state_of(tmp_path / "it.log")
    frame = {**glance(state, False, 24, 80), "over": None}
    heat = frame["heat"]["decode"]
    times = [[0] * 7 + [300_000_000], [1_000_000, 20_000_000] * 4]
    heat.update(blocks=list("abcdefgh"), last=times, mean=times)
    lines = [line.plain for line in draw(frame, 70, 24, "decode", paused=False)]
    (first,) = (i for i, line in enumerate(lines) if line.startswith("outside"))
    drawn = [line[12:].split() for line in lines[first : first + 2]]
    assert drawn == [["██"] * 2, ["░░", "▓▓"] * 8]


def test_a_step_that_takes_long_is_named(tmp_path: Path) -> None:
    log, rest = open_log(tmp_path, seed=6)
    begin = rest.index(b'"event":"step_begin"')
    with log.open("ab") as file:
        file.write(rest[: rest.index(b"\n", begin) + 1])
    state, _ = state_of(log)
    (step,) = state.under_way
    for ns, named in ((10**9, None), (10**9 + 1, "1.00 s"), (5 * 10**9, "5.00 s")):
        state.idle = ns
        first = draw({**glance(state, False, 24, 160), "over": None}, 160, 24, None, False)[0]
        assert f"{step.phase} of {step.event.n_tokens} for" in first.plain or not named
        assert first.plain.endswith(named or "tokens")


# --- a frame whose figures are written down ---


def frame_of(**figures: Any) -> dict[str, Any]:
    """A frame before the first event, with these figures in it."""
    return {**glance(LiveState(), False, 24, 80), "over": None, **figures}


def second(number: int, of: int, memory: int) -> list[int]:
    """A second with `of` of everything, which stays while nothing happens, or not."""
    return [number, of, 10 * of, of, of, 8 * of, memory, of * 10**9, of * 10**8]


def plain(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_the_heading_names_the_latest_model_and_how_far_it_is() -> None:
    frame = frame_of(
        session={"models": [[0, "tiny", "F16", 9], [1, "demo", "Q4_K", 10]]},
        t=NOW * 10**9 + 999_999_999, n_steps=1, n_tokens=1234, n_failed=2,
        computing=["prefill", 1500, 1_500_000_000],
    )  # fmt: skip
    done = "1:02:05 · 1 step · 1,234 tokens · 2 steps failed · prefill of 1,500 for 1.50 s"
    (line, *_) = draw(frame, 160, 24, None, False)
    assert line.plain == f"demo Q4_K  recording · {done}"
    (line, *_) = draw(frame, 160, 24, None, True)
    assert line.plain == f"demo Q4_K  PAUSED · recording · {done}"
    for over, why in (
        ("closed", "the session has ended"),
        ("not closed", "the program ended without closing the log"),
        ("line 9 is no JSON", "reading stopped: line 9 is no JSON"),
    ):
        (line, *_) = draw({**frame, "over": over, "late": True}, 160, 24, None, False)
        assert line.plain == f"demo Q4_K  {why} · {done}"
    # a third of the width for the name
    (line, *_) = draw({**frame, "over": None}, 24, 24, None, False)
    assert line.plain == "demo Q4…  recording · 1…"


def test_every_figure_has_its_latest_seconds() -> None:
    """The second that has just begun is not shown; used cells and memory stay during a pause."""
    rising = [second(NOW - 9 + i, i, 5) for i in range(9) if i != 4]
    seconds = [second(NOW - 24, 1, 1), *rising, second(NOW, 99, 99)]
    frame = frame_of(
        t=NOW * 10**9 + 1, seconds=seconds, rate=1012, cells=(1200, 2048), rss=3 << 20,
        to_first=2_500_000.0, between=31_000.0, working=0.873, n_requests=1001, active=[7],
        machine={"cpus": 4, "dur": 2000, "cpu": 1000},
    )  # fmt: skip
    drawn = [line.plain for line in draw(frame, 160, 24, None, False)[1:5]]
    cells = [[line[i : i + 53] for i in range(0, len(line), 53)] for line in drawn]
    idle, rise = "▁" * 14, "▁▂▃▄▁▆▇██"
    empty = " " * 23
    expected = [
        [
            "tokens/s              1,012 " + idle + rise,
            "prompt tok/s             80 " + idle + rise,
            "cache cells     1,200/2,048 " + "▂" * 14 + "▁▂▃▄▄▆▇██",
        ],
        [
            "memory             3.00 MiB " + "▂" * 14 + "█" * 9,
            "first token         2.50 ms " + empty,
            "then each           31.0 µs " + empty,
        ],
        [
            "CPUs              0.50 of 4 " + idle + rise,
            "wait for CPU           80 % " + idle + rise,
            "threads work           87 % " + empty,
        ],
        ["requests         1 of 1,001 " + empty],
    ]
    assert cells == [[f"{cell}  " for cell in row] for row in expected]
    for cpu, shown in ((2000, "1.0 of 4"), (1990, "0.99 of 4"), (7000, "3.5 of 4")):
        frame["machine"]["cpu"] = cpu
        assert shown in draw(frame, 160, 24, None, False)[3].plain
    frame["machine"] = None
    assert drawn_value(frame, "CPUs") == "-"


def drawn_value(frame: dict[str, Any], label: str) -> str:
    """The value beside a label on a screen with one figure a line."""
    (line,) = (x for x in draw(frame, 60, 24, None, False) if x.plain.startswith(label))
    return line.plain[13:27].strip()


@pytest.mark.parametrize(("width", "columns"), [(79, 1), (80, 2), (119, 2), (120, 3), (300, 3)])
def test_as_many_figures_a_line_as_have_room(width: int, columns: int) -> None:
    lines = plain(draw(frame_of(), width, 24, None, False))
    rule = next(i for i, line in enumerate(lines) if line.startswith("── Requests"))
    assert rule - 1 == -(-10 // columns)
    assert all(len(line) <= width for line in lines)


LANES = [
    {"lane": 7, "task": None, "name": "chat", "seq": 1, "over": False, "prompt": 1200,
     "to_first": 1e6, "between": None, "n_tokens": 3,
     "tokens": [[0, "One", 0, None], [1, "\n two", 1000, None], [2, " three", 2_000_000, None]]},
    {"lane": 6, "task": None, "name": "", "seq": 11, "over": True, "prompt": 1, "to_first": None,
     "between": 5e6, "n_tokens": 1300, "tokens": []},
    {"lane": 5, "task": None, "name": "a name without an end", "seq": 12, "over": False,
     "prompt": 2, "to_first": None, "between": None, "n_tokens": 0, "tokens": []},
]  # fmt: skip
ROWS = [
    "                 prompt    first then each tokens  text",
    "▸ chat            1,200  1.00 ms         -      3  One  two three",
    "✓ sequence 11         1        -   5.00 ms  1,300",
    "· a name withou       2        -         -      0",
]


def test_each_request_has_a_line_and_those_without_room_are_counted() -> None:
    frame = frame_of(lanes=LANES, active=[7], n_requests=1001)
    lines = plain(draw(frame, 80, 24, None, False))
    assert lines[6].startswith("── Requests 998 more are not shown ──")
    assert lines[7:11] == ROWS
    for height, n_lines in ((12, 4), (11, 3), (10, 2), (9, 1), (8, 0)):
        lines = plain(draw(frame, 80, height, None, False))
        # the last line is empty
        assert lines[7:] == [*ROWS[:n_lines], ""]
        hidden = 1001 - max(n_lines - 1, 0)
        assert lines[6].startswith(f"── Requests {hidden:,} more are not shown")
    frame["n_requests"] = 3
    assert set(plain(draw(frame, 80, 24, None, False))[6].split("Requests ")[1]) == {"─"}


def test_a_line_ends_with_the_end_of_the_text() -> None:
    """And only with whole tokens."""
    frame = frame_of(lanes=LANES, active=[7], n_requests=3)
    for width, text in ((65, "One  two three"), (64, "  two three"), (62, "  two three"),
                        (61, " three"), (57, " three"), (56, "")):  # fmt: skip
        lines = [of.plain for of in draw(frame, width, 24, None, False)]
        (line,) = (of for of in lines if of.startswith("▸ chat"))
        assert line[51:] == text


def test_a_token_that_came_late_has_a_colour() -> None:
    """From twice the usual time, without a colour, to sixteen times."""
    usual = 31_000.0
    times = [0, usual, usual + 4 * usual, 5 * usual + 16 * usual, 21 * usual + 99 * usual]
    tokens = [[i, f"t{i}", t, None] for i, t in enumerate([*times, times[-1] + 1.3 * usual])]
    lane = {**LANES[0], "tokens": tokens}
    drawn = draw(frame_of(lanes=[lane], active=[7], between=usual), 90, 24, None, False)
    (line,) = (of for of in drawn if of.plain.startswith("▸"))
    colours = {line.plain[of.start : of.end]: Style.parse(str(of.style)) for of in line.spans}
    half, full = colours["t2"], colours["t3"]
    assert half.bgcolor is not None
    assert full.bgcolor is not None
    # the middle between #28221e and #e85d14
    assert half.bgcolor.triplet == (136, 63, 25)
    assert full.bgcolor.triplet == (232, 93, 20)
    assert colours["t4"] == full
    assert [half.color.name, full.color.name] == ["white", "black"]  # type: ignore[union-attr]
    assert {colours[name].bgcolor for name in ("t0", "t1", "t5")} == {None}


HEAT = {
    "blocks": ["a1234567890123456789", "b"],
    "steps": 1200,
    "last": [[0, 5000], [1000, 2000], [3000, 2000], [0, 7000]],
    "mean": [[0, 2500], [1000, 2000], [3000, 2000], [0, 6000]],
}


def test_layers_that_do_not_fit_are_averages_of_groups() -> None:
    frame = frame_of(heat={"decode": HEAT, "prefill": {**HEAT, "steps": 1}})
    lines = plain(draw(frame, 80, 24, None, False))
    first = next(i for i, line in enumerate(lines) if line.startswith("── Layers"))
    figures = "decode: latest 20.0 µs, average 16.5 µs of 1,200"
    assert lines[first] == f"── Layers × blocks {figures} ".ljust(80, "─")
    table = [re.split(r" {2,}", line.strip()) for line in lines[first + 1 : first + 6]]
    assert table == [
        ["a12345678901234 b", "a12345678901234 b"],
        ["outside", "5.00 µs", "2.50 µs"],
        ["layer 0", "1.00 µs", "2.00 µs", "1.00 µs", "2.00 µs"],
        ["layer 1", "3.00 µs", "2.00 µs", "3.00 µs", "2.00 µs"],
        ["layer 2", "7.00 µs", "6.00 µs"],
    ]
    outside = ["outside", "5.00 µs", "2.50 µs"]
    all_layers = ["layer 0-2", "1.33 µs", "3.67 µs", "1.33 µs", "3.33 µs"]
    for height, rows in (
        (13, [["layer 0-1", *["2.00 µs"] * 4], ["layer 2", "7.00 µs", "6.00 µs"]]),
        (12, [all_layers]),
        (11, [all_layers]),
    ):
        lines = plain(draw(frame, 80, height, "prefill", False))
        first = next(i for i, line in enumerate(lines) if line.startswith("── Layers"))
        assert "prefill: latest 20.0 µs, average 16.5 µs of 1 " in lines[first]
        table = [re.split(r" {2,}", line.strip()) for line in lines[first + 2 :] if line]
        assert table == [outside, *rows]
    assert not any("Layers" in line for line in plain(draw(frame, 80, 10, "prefill", False)))
    # only blanks would be cut
    assert not any(line.endswith("…") for line in plain(draw(frame, 79, 24, None, False)))


def test_decodes_are_shown_unless_there_are_none() -> None:
    assert usual_phase(frame_of(heat={"prefill": HEAT, "decode": HEAT})) == "decode"
    assert usual_phase(frame_of(heat={"encode": HEAT, "prefill": HEAT})) == "encode"
    assert usual_phase(frame_of()) == ""


def test_the_latest_messages_are_at_the_bottom_of_a_high_screen() -> None:
    messages = [[i, 0, "error" if i == 4 else "warn", f" message {i}\n"] for i in range(5)]
    frame = frame_of(messages=messages, n_messages=1005)
    lines = draw(frame, 80, 21, None, False)
    assert plain(lines)[-4:] == [
        "── Messages 1,005 so far ".ljust(80, "─"), "message 2", "message 3", "message 4",
    ]  # fmt: skip
    assert [str(line.style) for line in lines[-2:]] == ["none", "red"]
    assert not any("essage" in line for line in plain(draw(frame, 80, 20, None, False)))
