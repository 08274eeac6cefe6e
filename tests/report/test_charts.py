"""Charts show the numbers, their bytes are reproducible, and no two labels overlap."""

from __future__ import annotations

import html
import itertools
import math
import random
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pytest

from llamacpp_instr.converters.analyses.memory import (
    chart_bits_by_layer,
    draw_memory,
    stored_in_file,
)
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.report import charts
from llamacpp_instr.report.charts import Chart, Point, norm_of, placed
from llamacpp_instr.report.plain_charts import heat_map
from llamacpp_instr.report.report import Cell, Column, Report, columns_of
from tests.kit.figures import drawn
from tests.kit.in_process import printed

LAYERS = ["0", "1", "none"]
CHARTS: dict[str, Callable[[], Chart]] = {
    "bars": lambda: charts.bar_by_layer(
        "Bits", "bits", LAYERS, {"Q4_K": [4, 3, 0], "F32": [0, 1, 32]}
    ),
    "lines": lambda: charts.lines_by_layer("Error", "dB", LAYERS, {"a": [1, None, math.inf]}),
    "map": lambda: charts.map_by_layer(
        "Values", "token", LAYERS, [[1, 20], [None, 2], [math.nan]], ["$Hi$", "<b>\x1b[31m"]
    ),
    "ranges": lambda: charts.lines_by_range(
        "Growth", "tokens", "KL", ["1-32", "33-64"], {"a": [1, 20], "b": [2, None]}
    ),
    "points": lambda: charts.scatter_size_error("Cost", "MiB", "KL", [Point("a", 1, 2)]),
}


@pytest.mark.parametrize("kind", CHARTS)
def test_the_same_numbers_give_the_same_bytes(kind: str) -> None:
    chart = CHARTS[kind]()
    svg = chart.svg()
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert CHARTS[kind]().svg() == svg, "whatever the user has set"
    assert ET.fromstring(svg).attrib["aria-label"] == chart.title
    assert "http://www.w3.org" in svg
    assert re.findall(r'(?:href|src)="(?!#|data:)[^"]*"', svg) == [], "nothing is loaded"
    assert "<metadata" not in svg
    assert "currentColor" in svg


def test_a_picture_has_its_size_and_the_same_bytes() -> None:
    """Also with labels that are placed by measuring, those of points."""
    pictures = [CHARTS[kind]().png() for kind in ("map", "points", "points")]
    assert pictures[1] == pictures[2]
    assert [struct.unpack(">II", png[16:24]) for png in pictures] == [(1152, 576)] * 3


def test_bars_are_stacked_and_add_up() -> None:
    figure = drawn(CHARTS["bars"]())
    boxes = [(p.get_y(), p.get_height()) for p in figure.axes[0].patches]
    assert boxes == [(0, 4), (0, 3), (0, 0), (4, 0), (3, 1), (0, 32)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Q4_K", "F32"]


def test_bits_of_the_demo_models_layers() -> None:
    model = load_model_file("demo")
    figure = drawn(chart_bits_by_layer(stored_in_file(model).tensors))
    tops = [sum(p.get_height() for p in figure.axes[0].patches[i::5]) for i in range(5)]
    for layer, top in zip([0, 1, 2, 3, -1], tops, strict=True):
        weights = [weight for weight in model.weights if weight.layer == layer]
        bits = 8 * sum(w.n_bytes for w in weights) / sum(w.n_elements for w in weights)
        assert top == pytest.approx(bits)


def test_bars_of_memory_have_the_kind_and_the_buffer() -> None:
    """What was measured, and what was predicted where not all was; without the total."""
    columns = [Column("memory"), Column("buffer"), *columns_of("bytes", "predicted", "measured")]
    rows: list[list[Cell]] = [
        ["weights", "CPU_Mapped", 1024, 2048], ["weights", "CPU", 512, 4096],
        ["total", "", 1536, 6144],
    ]  # fmt: skip
    other = Report("Types", columns, rows)
    (figure,) = draw_memory([other, Report("Memory", columns, rows)])
    assert re.findall("<dt>(.*?)</dt>.*?<dd>([^<]+)</dd>", figure.markup) == [
        ("weights, CPU_Mapped", "2.00 KiB"),
        ("weights, CPU", "4.00 KiB"),
    ]
    assert "measured" in figure.markup
    rows[0][3] = None
    (figure,) = draw_memory([Report("Memory", columns, rows)])
    assert re.findall("<dd>([^<]+)</dd>", figure.markup) == ["1.00 KiB", "512 B"]


def test_a_line_has_a_gap_where_there_is_no_number() -> None:
    (line,) = drawn(CHARTS["lines"]()).axes[0].lines
    assert [math.isnan(y) for y in line.get_ydata()] == [False, True, True, True]


def test_no_line_leads_from_the_last_layer_to_what_is_in_none() -> None:
    for layers, joined in (
        (["0", "1", "none"], [("0", "1")]),
        (["0", "1"], [("0", "1")]),
        (["none"], []),
    ):
        chart = charts.lines_by_layer("T", "bits", layers, {"a": [1.0] * len(layers)})
        axes = drawn(chart).axes[0]
        (line,) = axes.lines
        points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        found = [
            (layers[int(a)], layers[int(b)])
            for (a, y), (b, z) in itertools.pairwise(points)
            if not math.isnan(y + z)
        ]
        assert found == joined
        assert [x for x, y in points if not math.isnan(y)] == list(range(len(layers)))


def test_of_many_layers_some_are_named() -> None:
    chart = charts.lines_by_layer("E", "dB", [str(i) for i in range(126)], {"a": [1.0] * 126})
    ticks = [tick.get_text() for tick in drawn(chart).axes[0].get_xticklabels()]
    assert ticks == [*(str(i) for i in range(0, 120, 10)), "125"]


@pytest.mark.parametrize("seed", range(2))
def test_labels_of_points_overlap_neither_each_other_nor_the_edge(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        Point(f"model-{i}-Q{i % 8}_K_M", 3 + rng.gauss(0, 1), 10 ** rng.gauss(-3, 0.5))
        for i in range(12)
    ]
    points.append(Point("the same place", points[0].x, points[0].y))
    figure = drawn(charts.scatter_size_error("Cost", "MiB", "KL", points))
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    extents = [text.get_window_extent() for text in axes.texts]
    texts = [mpl.text.Text.get_window_extent(text) for text in axes.texts]
    assert len(extents) == 13
    for a, b in itertools.combinations(texts, 2):
        assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)
    room = axes.get_window_extent()
    assert all(room.x0 <= t.x0 and t.x1 <= room.x1 for t in texts)
    assert all(room.y0 <= t.y0 and t.y1 <= room.y1 for t in texts)


def test_errors_of_ranges_are_lines_over_their_names() -> None:
    lines = {"a": [1.0, 20.0], "b": [3.0, 4.0]}
    figure = drawn(charts.lines_by_range("Growth", "tokens", "KL", ["1-32", "33-64"], lines))
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == list(lines.values())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1-32", "33-64"]
    assert (axes.get_xlabel(), axes.get_yscale()) == ("tokens", "log")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_points_that_are_nowhere_are_left_out() -> None:
    points = [Point("a", 1, 2), Point("b", 1, math.inf), Point("c", math.nan, 1), Point("d", 2, 0)]
    axes = drawn(charts.scatter_size_error("Cost", "MiB", "KL", points)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["a", "d"]
    assert axes.get_yscale() == "linear", "a logarithm of zero is nowhere"


def test_a_point_has_its_interval() -> None:
    points = [Point("a", 1, 2, 0.5), Point("b", 2, 3)]
    axes = drawn(charts.scatter_size_error("Cost", "MiB", "KL", points)).axes[0]
    (bars,) = axes.containers[0][2]
    assert [bar.tolist() for bar in bars.get_segments()] == [[[1, 1.5], [1, 2.5]]]


def test_a_chart_of_nothing() -> None:
    assert "<svg" in charts.bar_by_layer("B", "b", [], {}).svg()
    assert "<svg" in charts.lines_by_layer("B", "b", [], {"a": []}).svg()
    assert "<svg" in charts.scatter_size_error("B", "x", "y", []).svg()


def test_without_matplotlib_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert charts.missing_note() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    note = 'Charts need matplotlib: pip install "llamacpp-instr[report]".'
    assert charts.missing_note() == note
    page = printed("inspect", "demo", "--html")
    assert f"<p>{html.escape(note)}</p>" in page
    assert "<svg" not in page


def test_a_home_that_cannot_be_written_to_is_no_matter(environment: dict[str, str]) -> None:
    """matplotlib would print two lines about its cache directory."""
    code = "from llamacpp_instr.report import charts; charts.import_matplotlib().get_cachedir()"
    places = {"HOME": "/proc", "XDG_CONFIG_HOME": "/proc", "XDG_CACHE_HOME": "/proc"}
    kept = {name: value for name, value in environment.items() if name != "MPLCONFIGDIR"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=kept | places, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_colours_of_amounts_that_differ_tenfold_are_logarithmic() -> None:
    """Also with zeros, which are pale; three of them are as far apart as their logarithms."""
    amounts = np.array([[0.0, 1.0, 10.0, 100.0]])
    assert placed(amounts, amounts).tolist() == [[0, 0, 0.5, 1]]
    assert placed(np.array([5.0, 1e9]), amounts).tolist() == [pytest.approx(math.log10(5) / 2), 1]
    assert placed(np.array([2.0, 4.0, 8.0]), np.array([0.0, 4.0, 8.0])).tolist() == [0.25, 0.5, 1]
    assert placed(np.zeros((2, 2)), np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]
    (norm,) = (norm_of(np.array([[0.0, math.nan, 1.0, 500.0]])),)
    assert (norm.vmin, norm.vmax) == (1, 500)
    assert norm_of(np.array([-1.0, 1.0, 500.0])) is norm_of(np.array([])) is None
    page = heat_map("Time", ["a"], list("0123"), amounts, "ns", "layer")
    assert re.findall(r'opacity="([\d.]+)"', page.markup) == ["0.10", "0.55", "1.00"]
