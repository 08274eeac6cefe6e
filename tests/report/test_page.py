"""The HTML page of a report in the real Chromium: sorting, no requests, no markup, any width."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from converters.report.charts import bar_by_layer
from converters.report.page import Picture, render_page
from converters.report.report import Column, Report
from tests.conftest import Instr
from tests.kit import ui_kit

pytestmark = pytest.mark.native

HOSTILE = '</td><script>document.title="taken"</script><img src="https://evil.invalid/x.png">'
COLUMNS = [Column("Name"), Column("size", "bytes"), Column("error", "ratio")]
ROWS = [
    ["blk.10", 999, 0.5],
    ["blk.2", 1 << 30, math.inf],
    ["blk.1", 3 << 20, None],
    [HOSTILE, 2048, -1.5],
]
REPORT = Report("Tensors", COLUMNS, [list(row) for row in ROWS], ["All of them."])


@pytest.fixture(scope="module", autouse=True)
def _kit() -> None:
    ui_kit.need_ui()


def names(sorted_: dict[str, list[list[str]]]) -> list[str]:
    return [row[0] for row in sorted_["rows"]]


def test_a_click_on_a_heading_sorts_by_the_raw_number(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page("Sizes", [REPORT]))
    sorts = [(0, "size", "click"), (0, "size", "Enter"), (0, "size", "Space"),
             (0, "error", "click"), (0, "error", "click"), (0, "Name", "Enter")]  # fmt: skip
    seen = ui_kit.look_at_page(page, sorts)
    largest, smallest, as_it_was, worst, best, by_name = seen.sorted
    # the cells show 1.00 GiB, 3.00 MiB, 2.00 KiB and 999 B
    assert names(largest) == ["blk.2", "blk.1", HOSTILE, "blk.10"]
    assert largest["order"] == [None, "descending", None]
    assert names(smallest) == ["blk.10", HOSTILE, "blk.1", "blk.2"]
    assert smallest["order"] == [None, "ascending", None]
    assert names(as_it_was) == ["blk.10", "blk.2", "blk.1", HOSTILE]
    assert as_it_was["order"] == [None, None, None]
    assert names(worst) == ["blk.2", "blk.10", HOSTILE, "blk.1"], "what was not measured is last"
    assert names(best) == [HOSTILE, "blk.10", "blk.2", "blk.1"]
    assert names(by_name) == [HOSTILE, "blk.1", "blk.2", "blk.10"]
    assert by_name["order"] == ["ascending", None, None]
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])


def test_nothing_is_loaded_even_if_markup_came_through(tmp_path: Path) -> None:
    # inserts what escaping prevents: the policy blocks it as well
    markup = (
        '<svg><image href="https://evil.invalid/x.png"/></svg><img src="http://127.0.0.1:1/y.png">'
        '<script>document.title = "taken"</script><script src="http://evil.invalid/z.js"></script>'
    )
    page = tmp_path / "page.html"
    page.write_text(render_page("Page", [Picture("Chart", markup), REPORT]))
    seen = ui_kit.look_at_page(page, [(0, "size", "click")])
    assert seen.foreign == []
    assert len(seen.console) >= 3, "the browser said that it was stopped"
    assert names(seen.sorted[0])[0] == "blk.2", "our own script runs"


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1200, False)])
def test_the_page_of_inspect(instr: Instr, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "demo.html"
    assert instr("inspect", "demo", "--html", "-o", page).returncode == 0
    seen = ui_kit.look_at_page(page, [(6, "bytes", "click")], (width, 800), dark)
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])
    assert seen.overflow == 0, "tables and charts scroll by themselves"
    assert {"bits per weight", "layer", "none", "F16", "F32"} <= set(seen.texts)
    assert names(seen.sorted[0])[0] == "token_embd.weight"


def test_a_name_in_a_chart_is_what_it_is(tmp_path: Path) -> None:
    hostile = [
        "<script>alert(1)</script>",
        "$x_1$",
        "_hidden",
        "$",
        'a" id="b',
        "#010203",
        "\x1b[31m",
    ]
    chart = bar_by_layer("T", "bits", ["0"], {name: [1.0] for name in hostile})
    page = tmp_path / "page.html"
    page.write_text(render_page("Page", [Picture(chart.title, chart.svg())]))
    seen = ui_kit.look_at_page(page)
    assert {name.strip() for name in seen.texts} >= {*hostile[:-1], "\\x1b[31m"}
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])
