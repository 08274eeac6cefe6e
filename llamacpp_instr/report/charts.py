"""Charts of a report, drawn by matplotlib as SVG text or PNG.

Invariant: the same numbers give the same bytes, whatever the user's settings. Text is never
interpreted as markup or mathematics, and has the text colour of the page. matplotlib is imported
only to draw; `missing_note` says whether it is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import logging
import math
import os
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import how_to_install, missing_modules, start_owner
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.colors import norm_of
from llamacpp_instr.report.label_places import cost, offsets
from llamacpp_instr.report.report import shown

COLORS = (
    "#4393c3", "#e08214", "#3aa569", "#b07aa1", "#d6604d",
    "#8f8f2f", "#1fa3b3", "#c2785c", "#7f7fbf", "#8c8c8c",
)  # fmt: skip
"""Visible on white and on black."""

AXIS = 96
"""number of characters that fit along the axis of layers"""

_INK = "#010203"  # replaced by the text colour of the page
_STYLES = ("-", "--", ":", "-.")
_STEPS = [n * 10**power for power in range(9) for n in (1, 2, 5)]  # distances between ticks
_COLUMNS = 40  # labels of columns that fit below a map
_WIDTH, _HEIGHT = 8.0, 4.0  # inches of 72 points


@dataclass(frozen=True)
class Point:
    """A candidate with its two coordinates."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Chart:
    """A chart, drawn on demand."""

    title: str
    draw: Callable[[Any], None]
    """draws into a matplotlib figure"""

    def svg(self) -> str:
        """An `<svg>` element for a page, without the title, which is the heading above it."""
        with _settings(_INK):
            figure = _figure()
            self.draw(figure)
            file = io.StringIO()
            nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        return _inline(file.getvalue(), self.title)

    def png(self) -> bytes:
        """A picture on white, with the title on top."""
        with _settings("black"):
            figure = _figure()
            figure.suptitle(drawn_text(self.title), fontsize="large")
            self.draw(figure)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=144, metadata={"Software": None})
        return file.getvalue()


Values: TypeAlias = "Sequence[float | None]"
"""None, NaN and infinities give a gap"""


_owners: list[subprocess.Popen[bytes]] = []


def import_matplotlib() -> Any:
    """matplotlib, without its warnings about a home that is not writable, which do not matter."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    chosen = os.environ.get("MPLCONFIGDIR")
    try:
        import matplotlib as mpl
    except OSError:
        raise UsageError(
            "matplotlib found no writable directory for its settings; set MPLCONFIGDIR"
        ) from None
    made = os.environ.get("MPLCONFIGDIR")
    if made is not None and made != chosen:
        # a temporary directory, which matplotlib would leave behind if a signal kills this process
        _owners.append(start_owner(Path(made)))

    return mpl


def missing_note() -> str | None:
    """A sentence for the report if matplotlib is not installed, else None."""
    if not missing_modules("report"):
        return None
    return f"Charts need matplotlib: {how_to_install('report')}."


def bar_by_layer(
    title: str, axis: str, layers: Sequence[str], parts: Mapping[str, Values]
) -> Chart:
    """A stacked bar for each layer. `parts` has one value per layer for each name; `axis` says what
    the height measures."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        below = [0.0] * len(layers)
        bars = []
        for i, values in enumerate(parts.values()):
            heights = [value or 0.0 for value in _finite(values)]
            color = COLORS[i % len(COLORS)]
            bars.append(axes.bar(range(len(layers)), heights, 0.8, below, color=color))
            below = [low + height for low, height in zip(below, heights, strict=True)]
        _layer_axis(axes, layers)
        axes.set_ylabel(drawn_text(axis))
        add_legend(figure, bars, list(parts))

    return Chart(title, draw)


def lines_by_layer(
    title: str, axis: str, layers: Sequence[str], lines: Mapping[str, Values]
) -> Chart:
    """A line for each candidate; `lines` has one value per layer for each name. What belongs to no
    layer, if it is last, is a point beside the line: there is nothing between it and a layer."""
    x = list(range(len(layers)))
    apart = [len(layers) - 1] if layers and layers[-1] == shown(-1, "layer") else []
    for at in apart:
        x.insert(at, at)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        drawn = []
        for i, values in enumerate(lines.values()):
            heights = [math.nan if value is None else value for value in _finite(values)]
            for at in apart:
                heights.insert(at, math.nan)
            style = _STYLES[i // len(COLORS) % len(_STYLES)]
            drawn += axes.plot(
                x, heights, style, color=COLORS[i % len(COLORS)], marker="o",
                markersize=3.5, linewidth=1.6,
            )  # fmt: skip
        _layer_axis(axes, layers)
        axes.set_ylabel(drawn_text(axis))
        add_legend(figure, drawn, list(lines))

    return Chart(title, draw)


def scatter_size_error(title: str, x_axis: str, y_axis: str, points: Sequence[Point]) -> Chart:
    """A labelled point for each candidate: error against size. The axis of the error is logarithmic
    if all errors are above zero and span more than a decade. Points that are not finite are
    omitted."""
    kept = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        errors = [point.y for point in kept]
        if errors and min(errors) > 0 and max(errors) > 10 * min(errors):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda error, _: f"{error:g}")
            axes.yaxis.set_minor_formatter(lambda _error, _: "")
        axes.margins(x=0.12, y=0.14)
        axes.scatter([point.x for point in kept], errors, s=36, color=COLORS[0], zorder=3)
        axes.set_xlabel(drawn_text(x_axis))
        axes.set_ylabel(drawn_text(y_axis))
        _label_points(figure, axes, kept)

    return Chart(title, draw)


def roofline_chart(
    title: str, slopes: Mapping[str, float], roofs: Mapping[str, float], points: Sequence[Point]
) -> Chart:
    """FLOP/s over FLOPs per byte, both logarithmic: a slope for each bandwidth in bytes/s, a level
    for each roof in FLOP/s, and a labelled point for each op. Points that are not above zero are
    omitted."""
    kept = [p for p in points if 0 < p.x < math.inf and 0 < p.y < math.inf]
    peak = max(roofs.values())

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        low = min([peak / max(slopes.values()) / 10, *(p.x / 2 for p in kept)])
        high = max([peak / min(slopes.values()) * 10, *(p.x * 2 for p in kept)])
        drawn = []
        for number, (_, slope) in enumerate(slopes.items()):
            ends = [low, peak / slope]
            color = COLORS[(number + 1) % len(COLORS)]
            drawn += axes.plot(ends, [slope * x for x in ends], color=color)
        for number, (_, roof) in enumerate(roofs.items(), len(slopes)):
            color = COLORS[(number + 1) % len(COLORS)]
            ends = [roof / max(slopes.values()), high]
            drawn += axes.plot(ends, [roof, roof], color=color, linestyle="--")
        axes.scatter([p.x for p in kept], [p.y for p in kept], s=30, color=COLORS[0], zorder=3)
        axes.set_xlabel("FLOPs per byte")
        axes.set_ylabel("GFLOP/s")
        axes.xaxis.set_major_formatter(lambda intensity, _: f"{intensity:g}")
        axes.yaxis.set_major_formatter(lambda rate, _: f"{rate / 1e9:g}")
        add_legend(figure, drawn, [*slopes, *roofs])
        _label_points(figure, axes, kept)

    return Chart(title, draw)


# --- what the charts share ---


def map_by_layer(
    title: str, axis: str, layers: Sequence[str], rows: Sequence[Values], columns: Sequence[str]
) -> Chart:
    """A map with a row for each layer, the first at the bottom, and a column for each value of a
    row; as many of the labels `columns` are written as fit. Cells without a finite value stay
    empty."""

    def draw(figure: Any) -> None:
        import numpy as np

        cells = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for i, row in enumerate(rows):
            cells[i, : len(row)] = [np.nan if v is None else v for v in _finite(row)]
        norm = norm_of(cells)
        axes = figure.subplots()
        axes.grid(visible=False)
        image = axes.imshow(cells, aspect="auto", origin="lower", norm=norm, interpolation="none")
        step = next(n for n in _STEPS if n * 20 >= len(layers))
        at = range(0, len(layers), step)
        axes.set_yticks(list(at), [drawn_text(layers[i]) for i in at])
        axes.set_ylabel("layer")
        step = next(n for n in _STEPS if n * _COLUMNS >= len(columns))
        marks = range(0, len(columns), step)
        axes.set_xticks(list(marks), [drawn_text(columns[i]) for i in marks], rotation=90)
        axes.set_xlabel(drawn_text(axis))
        # matplotlib's own labels would be formulas, and those of 6 to 9 would overlap
        bar = figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:g}")
        if norm is not None and norm.vmax > 100 * norm.vmin:
            bar.minorticks_off()
        else:
            bar.ax.yaxis.set_minor_formatter(
                lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else ""
            )

    return Chart(title, draw)


def _figure() -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # one pixel is one point, so measurements are valid in both
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextlib.contextmanager
def _settings(ink: str) -> Iterator[None]:
    """matplotlib's defaults with our changes, independent of the user's settings."""
    mpl = import_matplotlib()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "llamacpp-instr",
                "text.parse_math": False,
                "font.size": 10,
                "axes.edgecolor": ink,
                "axes.labelcolor": ink,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "axes.grid": True,
                "axes.grid.axis": "y",
                "grid.color": ink,
                "grid.alpha": 0.15,
                "text.color": ink,
                "xtick.color": ink,
                "ytick.color": ink,
                "legend.frameon": False,
            }
        )
        yield


def drawn_text(text: str) -> str:
    """A name as drawn; a legend would omit one that begins with `_`."""
    text = printable(text)
    return f" {text}" if text.startswith("_") else text


def _finite(values: Values) -> list[float | None]:
    return [v if v is not None and math.isfinite(v) else None for v in values]


def _layer_axis(axes: Any, layers: Sequence[str]) -> None:
    room = AXIS // (max(map(len, layers), default=1) + 1)
    step = next(n for n in _STEPS if n * max(room, 1) >= len(layers))
    ticks = list(range(0, len(layers), step))
    if ticks and len(layers) - 1 not in ticks:  # the last one may be "no layer"
        if len(layers) - 1 - ticks[-1] < 0.6 * step:
            ticks.pop()
        ticks.append(len(layers) - 1)
    axes.set_xticks(ticks, [drawn_text(layers[i]) for i in ticks])
    axes.set_xlim(-0.6, max(len(layers), 1) - 0.4)
    axes.set_xlabel("layer")


def add_legend(figure: Any, drawn: Sequence[Any], names: Sequence[str]) -> None:
    """A legend below the axes, of as many columns as fit."""
    if drawn:
        figure.legend(
            drawn, [drawn_text(name) for name in names], loc="outside lower center",
            ncols=min(len(names), max(1, 90 // (6 + max(map(len, names))))),
        )  # fmt: skip


def _label_points(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Write every name beside its point, where it covers no other name or point. If that is far
    away, draw a line to the point."""
    figure.canvas.draw()  # fixes the position of the axes
    figure.set_layout_engine("none")
    renderer, ink = figure.canvas.get_renderer(), axes.xaxis.label.get_color()
    at = [tuple(axes.transData.transform((point.x, point.y))) for point in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    room = axes.get_window_extent(renderer).extents
    for point, (x, y) in zip(points, at, strict=True):
        text = axes.annotate(
            drawn_text(point.name), (point.x, point.y), (0, 0), textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": ink, "alpha": 0.4, "linewidth": 0.8},
        )  # fmt: skip
        extent = text.get_window_extent(renderer)
        places = [
            (x + dx, y + dy, x + dx + extent.width, y + dy + extent.height)
            for dx, dy in offsets(extent.width, extent.height)
        ]
        best = min(range(len(places)), key=lambda i: (cost(places[i], taken, room), i))
        place = places[best]
        text.set_position((place[0] - x, place[1] - y))
        if best < 8:
            text.arrow_patch.set_visible(False)
        taken.append(place)


def _inline(svg: str, title: str) -> str:
    """The element for a page: without the XML header, in the page's colour, with unique ids."""
    svg = svg[svg.index("<svg") :].strip()
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    prefix = hashlib.sha256(svg.encode()).hexdigest()[:8]

    def identity(found: re.Match[str]) -> str:
        return f' id="{prefix}-{found[1]}"' if found[1] in used else ""

    def tag(found: re.Match[str]) -> str:
        text = found[0].replace(_INK, "currentColor")
        text = re.sub(r' id="([^"]*)"', identity, text)
        return re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)

    svg = re.sub(r"<[^>]*>", tag, svg)  # only tags, not the text between them
    label = html.escape(printable(title))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
