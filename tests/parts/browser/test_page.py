"""The HTML page of a report in the real Chromium: sorting, no requests, no markup, any width."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.analyses.tree import build_tree
from llamacpp_instr.log.session import load_session
from llamacpp_instr.report.charts import bar_by_layer
from llamacpp_instr.report.page import Figure, render_page
from llamacpp_instr.report.plain_charts import Group, bars
from llamacpp_instr.report.report import Column, Report
from tests.conftest import ROOT, Instr
from tests.kit import ui_kit
from tests.kit.browser_kit import browser

pytestmark = pytest.mark.native

HOSTILE = '</td><script>document.title="taken"</script><img src="https://evil.invalid/x.png">'
RECORDED = ROOT / "tests" / "fixtures" / "demo-verbose.log"
HOSTILE_LOG = ROOT / "tests" / "fuzz" / "corpus" / "log" / "seed-hostile.log"
COLUMNS = [Column("Name"), Column("size", "bytes"), Column("error", "ratio")]
ROWS = [
    ["blk.10", 999, 0.5],
    ["blk.2", 1 << 30, math.inf],
    ["blk.1", 3 << 20, None],
    [HOSTILE, 2048, -1.5],
]
REPORT = Report("Tensors", COLUMNS, [list(row) for row in ROWS], ["All of them."])


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
    page.write_text(render_page("Page", [Figure("Chart", markup), REPORT]))
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
    assert seen.overflow == 0, "tables and charts scroll on their own"
    assert {"bits per weight", "layer", "none", "F16", "F32"} <= set(seen.texts)
    assert names(seen.sorted[0])[0] == "token_embd.weight"


def test_the_speeds_of_a_comparison_are_in_sight(instr: Instr, tmp_path: Path) -> None:
    other, page = tmp_path / "other.log", tmp_path / "comparison.html"
    shutil.copyfile(RECORDED, other)
    assert instr("compare", RECORDED, other, "-o", page).returncode == 0
    seen = ui_kit.look_at_page(page, size=(1280, 800), measure="th, .bars i, .bars dd")
    assert (seen.foreign, seen.errors, seen.console, seen.overflow) == ([], [], [], 0)
    tables = [seen.measured.index(cell) for cell in seen.measured if cell[0] in ("model", "tensor")]
    for at, name in zip(tables, ("decode tokens/s", "decode B / A"), strict=True):
        right = next(right for text, _, right in seen.measured[at:] if text == name)
        assert right < 1280
    lengths = [right - left for text, left, right in seen.measured if not text]
    assert lengths, "the speeds have a chart"
    assert min(lengths) > 100


def test_a_bar_is_as_long_as_its_value(tmp_path: Path) -> None:
    values = [10.0, 5.0, 9.9, None, 0.0]
    figure = bars("T", [f"model {i}" * i for i in range(5)], [Group("x", values)])
    page = tmp_path / "page.html"
    page.write_text(render_page("Page", [figure]))
    seen = ui_kit.look_at_page(page, size=(400, 600), measure=".bars i")
    lengths = [right - left for _, left, right in seen.measured]
    assert [of / lengths[0] for of in lengths[:3]] == pytest.approx([1, 0.5, 0.99], abs=0.01)
    assert len(lengths) == 4
    assert seen.overflow == 0


def test_nothing_is_cut_where_there_is_room(tmp_path: Path) -> None:
    """A wide table on a screen of 1,440 pixels, findings and a chart on 400, every row on paper."""
    wide = [Column("layer"), *(Column(f"percentile {i}", "ns") for i in range(9))]
    findings = [Column("Costs"), Column("share", "fraction"), Column("why, and what to try")]
    chart = bar_by_layer("T", "bits", ["0"], {"a": [1.0]})
    sections = [
        Report("Wide", wide, [[f"layer {i}", *[123_456] * 9] for i in range(200)]),
        Report("Findings", findings, [["the CPU time", 0.5, "Stop the other work. " * 9]]),
        chart,
    ]
    (tmp_path / "page.html").write_text(render_page("Page", sections))
    cut = (
        "[...document.querySelectorAll('.scroll')].map((of) => "
        "[of.scrollWidth > of.clientWidth, of.scrollHeight > of.clientHeight])"
    )
    with browser() as page:
        page.do("size", [1440, 900])
        page.do("goto", (tmp_path / "page.html").as_uri())
        assert page.read(cut) == [[False, True], [False, False], [False, False]]
        page.do("size", [400, 900])
        assert page.read(cut) == [[True, True], [False, False], [False, False]]
        page.do("print", True)
        assert not any(low for _, low in page.read(cut))


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
    page.write_text(render_page("Page", [chart]))
    seen = ui_kit.look_at_page(page)
    assert {name.strip() for name in seen.texts} >= {*hostile[:-1], "\\x1b[31m"}
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_page_of_a_session(instr: Instr, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "session.html"
    assert instr("page", RECORDED, "-o", page).returncode == 0
    steps = ["", "click decode", "click layer 2", "ArrowDown", "ArrowRight", "Enter", "Escape",
             "Escape", "Escape", "click FLOPs", "click decode"]  # fmt: skip
    seen = ui_kit.look_at_page(page, size=(width, 800), dark=dark, icicle=steps)
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])
    assert seen.overflow == 0
    assert seen.ink == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
    whole, phase, layer, block, second, zoomed, out, phase_again, up, flops, decode = seen.boxes

    def boxes(of: dict[str, list[Any]]) -> dict[tuple[str, int], list[tuple[float, float]]]:
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for name, left, box, top in of["boxes"]:
            found.setdefault((name, top), []).append((left, box))
        return found

    tree = build_tree(load_session(RECORDED))
    phases = {child.name: child for child in tree.root.children}
    for name, node in phases.items():
        (box,) = boxes(whole)[name, 30]
        assert box[1] == pytest.approx(node.amount / tree.root.amount, abs=2e-3)
    layers = [node for node in phases["decode"].children if node.name == "layer 2"]
    assert boxes(phase)["decode", 30] == [(0, 1)], "it is as wide as the page"
    assert [name for name, *_ in layer["boxes"]][:3] == ["session", "decode", "layer 2"]
    assert boxes(layer)["layer 2", 60] == [(0, 1)]
    widths = [box for (_, top), found in boxes(layer).items() if top == 90 for _, box in found]
    assert sum(widths) == pytest.approx(1, abs=1e-2)
    first, other = layers[0].children[:2]
    assert block["focus"].startswith(f"{first.name}: ")
    assert second["focus"].startswith(f"{other.name}: ")
    share = f"{100 * other.amount / layers[0].amount:.1f} % of layer 2"
    assert second["caption"].startswith(
        f"session \u203a decode \u203a layer 2 \u203a {other.name}: "
    )
    assert second["caption"].endswith(share)
    assert boxes(zoomed)[other.name, 90] == [(0, 1)]
    assert boxes(out)["layer 2", 60] == [(0, 1)]
    assert phase_again["boxes"] == phase["boxes"]
    assert up["boxes"] == whole["boxes"]
    work = build_tree(load_session(RECORDED), "flops").root
    parts = {child.name: child.amount / work.amount for child in work.children}
    assert boxes(flops)["decode", 30][0][1] == pytest.approx(parts["decode"], abs=2e-3)
    assert boxes(decode)["decode", 30] == [(0, 1)]


def test_hostile_names_in_the_page_of_a_session(instr: Instr, tmp_path: Path) -> None:
    page = tmp_path / "session.html"
    assert instr("page", HOSTILE_LOG, "-o", page).returncode == 0
    seen = ui_kit.look_at_page(page, size=(400, 800), icicle=["", "ArrowDown", "Enter"])
    assert (seen.foreign, seen.errors, seen.console) == ([], [], [])
    assert seen.overflow == 0
    assert any("<script>" in name for name, *_ in seen.boxes[0]["boxes"])
