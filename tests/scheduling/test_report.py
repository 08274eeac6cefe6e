"""The tables of a schedule add up, its pictures show it, and a sweep is a curve."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from llamacpp_instr.converters.scheduling.optimum import compute_bounds
from llamacpp_instr.converters.scheduling.report import (
    MOST_LANES,
    critical_path,
    gantt_chart,
    schedule_reports,
    sweep_chart,
    sweep_point,
    sweep_reports,
)
from llamacpp_instr.converters.scheduling.schedule import schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, Label, equal_engines
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Report
from tests.kit.figures import drawn
from tests.kit.schedule_kit import fed_core, graphs, machines, make_tasks

# two products at once, their sum, and a soft-max beside
TASKS = make_tasks(
    [("MUL_MAT", 40, []), ("MUL_MAT", 30, []), ("ADD", 10, [0, 1]), ("SOFT_MAX", 5, [0])],
    bytes=[100, 200, 0, 50],
)


def column(report: Report, name: str) -> list[Any]:
    at = [c.name for c in report.columns].index(name)
    return [row[at] for row in report.rows]


@settings(max_examples=25)
@given(graphs(), machines())
def test_the_tables_add_up_to_the_makespan_and_the_work(tasks, engines) -> None:
    for made in (schedule_list(tasks, engines), schedule_program(tasks, engines)):
        whole, of_engines, causes, *by = schedule_reports(made, ["A note."])
        assert column(whole, "time")[:2] == [tasks.ns.sum(), made.makespan]
        assert whole.figures["makespan"] == (made.makespan, "ns")
        assert whole.figures["bound"] == (compute_bounds(tasks, engines)[0].ns, "ns")
        assert 0 <= whole.figures["gap"][0] < 1
        assert whole.notes[-1] == "A note."
        work = int((made.end - made.begin).sum())
        brought = int((made.transfer_end - made.transfer_begin).sum())
        assert sum(column(of_engines, "busy")) == work + brought
        assert sum(column(of_engines, "tasks")) == len(tasks)
        assert sum(n or 0 for n in column(of_engines, "bytes")) == tasks.bytes.sum()
        assert all(0 <= share <= 1 for share in column(of_engines, "utilization"))
        assert [report.title for report in by] == [
            f"Critical path, by {name}" for name in ("layer", "block", "op")
        ]
        for report in (causes, *by):
            assert sum(column(report, "time")) == made.makespan
        for report in by[:2]:
            assert sum(column(report, "of the makespan")) == pytest.approx(1)
        assert sum(column(by[1], "of all engines")) <= work


def test_the_text_says_what_a_reader_asks() -> None:
    made = schedule_list(TASKS, equal_engines(2))
    text = render_text(schedule_reports(made, []))
    assert "Schedule of 4 tasks on 2 engines" in text
    assert "No schedule on these engines is shorter. Tightest bound: the longest path." in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "one engine, in sequence 85 ns 1.000" in rows
    assert "makespan, list scheduling 50 ns 1.700" in rows
    assert "bound: the longest path 50 ns 1.700" in rows
    assert "engine everything 2 4 85 ns 85.0 % ████████▌ 350 B" in rows


def test_a_gap_and_what_was_proven_are_reported() -> None:
    tasks = make_tasks([("ADD", ns, []) for ns in (3, 3, 2, 2, 2)])
    made = schedule_list(tasks, equal_engines(2))
    note = schedule_reports(made, [])[0].notes[0]
    assert note.startswith("A schedule on these engines can be at most 14.3 % shorter.")
    whole = schedule_reports(replace(made, proven=7), [])[0]
    assert whole.notes[0].startswith("No schedule on these engines is shorter.")
    assert ["proven: no schedule is shorter", 7, 12 / 7] in whole.rows


def test_the_causes_of_the_critical_path_are_listed() -> None:
    kinds = (EngineKind("m", 1, frozenset({"MUL_MAT"})), EngineKind("v", 1, frozenset({"vector"})))
    made = schedule_list(TASKS, Engines(kinds, handover_ns=4))
    causes = schedule_reports(made, [])[2]
    assert {row[0]: row[2] for row in causes.rows} == {
        "tasks that could begin at once": 40,
        "tasks that waited for an engine": 30,
        "tasks that waited for a source": 10,
        "hand-over to another engine": 4,
    }


def boxes(axes: Any, least: float, most: float = 1.0) -> list[Any]:
    """The extents of what is drawn, between these heights: bars are higher than stripes."""
    found = (path.get_extents() for drawn in axes.collections for path in drawn.get_paths())
    return [box for box in found if least < box.height <= most]


def test_the_picture_has_a_row_for_each_engine_and_a_bar_for_each_task() -> None:
    made = schedule_list(TASKS, equal_engines(2))
    chart = gantt_chart(made, "Two engines")
    assert chart is not None
    figure = drawn(chart)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["engine 0", "engine 1"]
    spans = sorted(zip(made.begin.tolist(), made.end.tolist(), strict=True))
    assert sorted((box.x0, box.x1) for box in boxes(axes, 0.5)) == spans
    marked = {(part.begin, part.end) for part in critical_path(made)}
    assert {(box.x0, box.x1) for box in boxes(axes, 0, 0.5)} == marked
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["attention", "feed-forward", "critical path"]
    assert {text.get_text() for text in axes.texts} == {"t0", "t1", "t2", "t3"}
    svg = chart.svg()
    assert ET.fromstring(svg).attrib["aria-label"] == "Two engines"
    assert chart.svg() == svg


def test_texts_stay_inside_their_bars() -> None:
    rows = [("ADD", 3 + 7 * (i % 13), [i - 1] if i % 5 else []) for i in range(60)]
    chart = gantt_chart(schedule_list(make_tasks(rows), equal_engines(4)), "Sixty")
    assert chart is not None
    figure = drawn(chart)
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    bars = [axes.transData.transform_bbox(box) for box in boxes(axes, 0.5)]
    assert len(bars) == 60
    assert len(axes.texts) > 20, "most are wide enough"
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        assert any(
            bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.ymin <= box.y0 and box.y1 <= bar.ymax
            for bar in bars
        )


def test_what_is_too_large_has_no_picture() -> None:
    assert gantt_chart(schedule_list(TASKS, equal_engines(MOST_LANES + 1)), "Many") is None


def test_a_sweep_is_a_curve_that_the_bound_is_above() -> None:
    tasks = make_tasks([("ADD", 10, [i - 4] if i > 7 else []) for i in range(40)])
    points = [sweep_point(schedule_list(tasks, equal_engines(n))) for n in range(1, 9)]
    (report,) = sweep_reports(points, ["A note."])
    assert column(report, "engines") == list(range(1, 9))
    assert column(report, "makespan")[:2] == [400, 200]
    assert column(report, "speed-up")[:2] == [1.0, 2.0]
    assert all(a <= b for a, b in zip(column(report, "speed-up"), column(report, "at most")))  # noqa: B905
    assert column(report, "what binds")[0] == "the work of all engines"
    assert column(report, "what binds")[-1] == "the longest path"
    assert report.notes[-1] == "A note."
    (axes,) = drawn(sweep_chart(points, "Engines")).axes
    speed_up, most = axes.lines
    assert speed_up.get_xdata().tolist() == list(range(1, 9))
    assert speed_up.get_ydata().tolist() == column(report, "speed-up")
    assert most.get_ydata().tolist() == column(report, "at most")


def titled(n: int) -> Any:
    """A chain of n tasks, each of an op of its own; the first ones take longest."""
    tasks = make_tasks([("ADD", 100 - i, [i - 1] if i else []) for i in range(n)])
    labels = [
        Label(f"t{i}", f"ADD number {i}", "ADD", "vector", i % 3 - 1, "other") for i in range(n)
    ]
    return replace(tasks, labels=labels)


@pytest.mark.parametrize(("n", "shown", "notes"), [
    (15, 15, []),
    (16, 15, ["Not shown: 1 other op, 5.7 % of it."]),
    (18, 15, ["Not shown: 3 other ops, 15.3 % of it."]),
])  # fmt: skip
def test_fifteen_ops_of_the_critical_path_are_shown(n: int, shown: int, notes: list[str]) -> None:
    tasks = titled(n)
    report = schedule_reports(schedule_list(tasks, equal_engines(1)), [])[-1]
    assert column(report, "op") == [f"ADD number {i}" for i in range(shown)]
    assert column(report, "time") == [100 - i for i in range(shown)]
    assert column(report, "of all engines") == [100 - i for i in range(shown)]
    assert list(report.notes) == notes


def test_layers_are_in_their_order_and_what_has_none_is_last() -> None:
    report = schedule_reports(schedule_list(titled(6), equal_engines(1)), [])[3]
    assert column(report, "layer") == [0, 1, -1]
    assert column(report, "time") == [99 + 96, 98 + 95, 100 + 97]


def test_starts_that_could_be_earlier_are_reported() -> None:
    made = schedule_list(TASKS, equal_engines(2))
    late = replace(made, begin=made.begin + 5, end=made.end + 5)
    causes = {row[0]: row[1:3] for row in schedule_reports(late, [])[2].rows}
    assert causes["starts that could be earlier"] == [1, 5]


def test_a_row_of_engines_has_what_they_ran_brought_and_moved() -> None:
    tasks = make_tasks([("MUL_MAT", 300, [])] * 3, load=[100] * 3, bytes=[150] * 3)
    made = schedule_list(tasks, fed_core())
    core, dma = schedule_reports(made, [])[1].rows
    # the first load, then the three tasks
    assert made.makespan == 1000
    assert core == ["core", "matrix", 1, 3, None, 900, 0.9, 150]
    assert dma == ["dma", "memory", 1, 0, 3, 300, 0.3, 300]


def test_a_picture_has_as_many_lanes_and_bars_as_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gantt_chart(schedule_list(TASKS, equal_engines(MOST_LANES)), "Most") is not None
    made = schedule_list(TASKS, equal_engines(1))
    monkeypatch.setattr("llamacpp_instr.converters.scheduling.report.MOST_BARS", 4)
    assert gantt_chart(made, "Four") is not None
    monkeypatch.setattr("llamacpp_instr.converters.scheduling.report.MOST_BARS", 3)
    assert gantt_chart(made, "Four") is None


def test_a_point_of_a_sweep_has_its_figures() -> None:
    tasks = make_tasks([("ADD", 10, []), ("ADD", 30, [])])
    point = sweep_point(schedule_list(tasks, equal_engines(2)))
    assert (point.engines, point.makespan, point.sequence, point.busy) == (2, 30, 40, 40)
    (row,) = sweep_reports([point], [])[0].rows
    assert row == [2, 30, 40 / 30, 40 / 30, 40 / 60, 30, "the longest path"]
