"""Charts of a report, drawn by matplotlib as SVG text or PNG.

Invariant: the same numbers give the same bytes, whatever the user's settings. Text is never
interpreted as markup or mathematics, and has the text colour of the page. matplotlib is imported
only to draw; `missing_note` says whether it is installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import io
import itertools
import logging
import math
import os
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import how_to_install, missing_modules, start_owner
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.report import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

COLORS = (
    "#4393c3", "#e08214", "#3aa569", "#b07aa1", "#d6604d",
    "#8f8f2f", "#1fa3b3", "#c2785c", "#7f7fbf", "#8c8c8c",
)  # fmt: skip
"""Visible on white and on black."""

AXIS = 96
"""number of characters that fit along the axis of layers"""

_INK = "#010203"  # replaced by the text colour of the page
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 40  # labels of columns that fit below a map
_WIDTH, _HEIGHT = 8.0, 4.0  # inches of 72 points


@dataclass(frozen=True)
class Point:
    """A candidate with its two coordinates."""

    name: str
    x: float
    y: float
    spread: float = 0.0
    """half of the 95 % interval of `y`"""


@dataclass(frozen=True)
class Chart:
    """A chart, drawn on demand."""

    title: str
    draw: Callable[[Any], None]
    """draws into a matplotlib figure"""

    def svg(self) -> str:
        """An `<svg>` element for a page, without the title, which is the heading above it."""
        with _figure(_INK) as figure:
            self.draw(figure)
            file = io.StringIO()
            nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        return _inline(file.getvalue(), self.title)

    def png(self) -> bytes:
        """A picture on white, with the title on top."""
        with _figure("black") as figure:
            figure.suptitle(drawn_text(self.title), fontsize="large")
            self.draw(figure)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=144, metadata={"Software": None})
        return file.getvalue()


Values: TypeAlias = "Sequence[float | None]"
"""None, NaN and infinities give a gap"""
Box: TypeAlias = "tuple[float, float, float, float]"
"""its lower left and its upper right corner"""


_owners: list[subprocess.Popen[bytes]] = []


def import_matplotlib() -> Any:
    """matplotlib, without its warnings about a home that is not writable, which do not matter."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    chosen = os.environ.get("MPLCONFIGDIR")
    try:
        import matplotlib as mpl

        mpl.get_configdir()  # with MATPLOTLIBRC, the import needs none
    except OSError:
        reason = "matplotlib found no writable directory for its settings; set MPLCONFIGDIR"
        raise UsageError(reason) from None
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


P = ParamSpec("P")


def _chart(
    draw: Callable[Concatenate[Any, Any, P], None],
) -> Callable[Concatenate[str, P], Chart]:
    """Makes `draw`, which draws into a figure and its axes, a function that returns a chart."""

    @functools.wraps(draw)
    def chart(title: str, /, *args: P.args, **named: P.kwargs) -> Chart:
        return Chart(title, lambda figure: draw(figure, figure.subplots(), *args, **named))

    return chart


@_chart
def bar_by_layer(
    figure: Any, axes: Any, axis: str, layers: Sequence[str], parts: Mapping[str, Values]
) -> None:
    """A stacked bar for each layer. `parts` has one value per layer for each name; `axis` says what
    the height measures."""
    import numpy as np

    below = np.zeros(len(layers))
    bars = []
    for i, values in enumerate(parts.values()):
        heights = np.nan_to_num(_gapped(values))
        bars.append(axes.bar(range(len(layers)), heights, 0.8, below, color=color_of(i)))
        below = below + heights
    _layer_axis(axes, layers)
    axes.set_ylabel(drawn_text(axis))
    add_legend(figure, bars, list(parts))


@_chart
def lines_by_layer(
    figure: Any, axes: Any, axis: str, layers: Sequence[str], lines: Mapping[str, Values]
) -> None:
    """A line for each candidate; `lines` has one value per layer for each name. What belongs to no
    layer, if it is last, is a point beside the line: there is nothing between it and a layer."""
    import numpy as np

    x = list(range(len(layers)))
    apart = [len(layers) - 1] if layers and layers[-1] == shown(-1, "layer") else []
    drawn = []
    for i, values in enumerate(lines.values()):
        style = _STYLES[i // len(COLORS) % len(_STYLES)]
        drawn += axes.plot(
            np.insert(x, apart, apart), np.insert(_gapped(values), apart, math.nan), style,
            color=color_of(i), marker="o", markersize=3.5, linewidth=1.6,
        )  # fmt: skip
    _layer_axis(axes, layers)
    axes.set_ylabel(drawn_text(axis))
    add_legend(figure, drawn, list(lines))


@_chart
def scatter_size_error(
    figure: Any, axes: Any, x_axis: str, y_axis: str, points: Sequence[Point]
) -> None:
    """Errors with their intervals against sizes, labelled. The axis of errors is logarithmic if all
    are above zero and span more than a decade. Points that are not finite are omitted."""
    kept = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    errors = [point.y for point in kept]
    _error_axis(axes, errors)
    axes.margins(x=0.12, y=0.14)
    axes.scatter([point.x for point in kept], errors, s=36, color=COLORS[0], zorder=3)
    for of in [point for point in kept if point.spread > 0]:
        axes.errorbar(of.x, of.y, of.spread, fmt="none", ecolor=COLORS[0], capsize=3)
    axes.set(xlabel=drawn_text(x_axis), ylabel=drawn_text(y_axis))
    _label_points(figure, axes, kept)


@_chart
def lines_by_range(
    figure: Any,
    axes: Any,
    x_axis: str,
    y_axis: str,
    ranges: Sequence[str],
    lines: Mapping[str, Values],
) -> None:
    """A line for each candidate: its error in each of `ranges`, which are consecutive. The axis of
    the error is that of `scatter_size_error`."""
    import numpy as np

    values = [_gapped(line) for line in lines.values()]
    _error_axis(axes, [error for line in values for error in line[np.isfinite(line)].tolist()])
    drawn = []
    for i, line in enumerate(values):
        drawn += axes.plot(ranges, line, color=color_of(i), marker="o", markersize=3.5)
    axes.set(xlabel=drawn_text(x_axis), ylabel=drawn_text(y_axis))
    add_legend(figure, drawn, list(lines))


@_chart
def roofline_chart(
    figure: Any,
    axes: Any,
    slopes: Mapping[str, float],
    roofs: Mapping[str, float],
    points: Sequence[Point],
) -> None:
    """FLOP/s over FLOPs per byte, both logarithmic: a slope for each bandwidth in bytes/s, a level
    for each roof in FLOP/s, and a labelled point for each op. Points that are not above zero are
    omitted."""
    kept = [p for p in points if 0 < p.x < math.inf and 0 < p.y < math.inf]
    peak = max(roofs.values())
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="GFLOP/s")
    low = min([peak / max(slopes.values()) / 10, *(p.x / 2 for p in kept)])
    high = max([peak / min(slopes.values()) * 10, *(p.x * 2 for p in kept)])
    lines = [([low, peak / slope], [slope * low, peak], "-") for slope in slopes.values()]
    lines += [([roof / max(slopes.values()), high], [roof] * 2, "--") for roof in roofs.values()]
    drawn: list[Any] = []
    for i, (x, y, style) in enumerate(lines, 1):
        drawn += axes.plot(x, y, color=color_of(i), linestyle=style)
    axes.scatter([p.x for p in kept], [p.y for p in kept], s=30, color=COLORS[0], zorder=3)
    axes.xaxis.set_major_formatter(lambda intensity, _: f"{intensity:g}")
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate / 1e9:g}")
    add_legend(figure, drawn, [*slopes, *roofs])
    _label_points(figure, axes, kept)


@_chart
def map_by_layer(
    figure: Any,
    axes: Any,
    axis: str,
    layers: Sequence[str],
    rows: Sequence[Values],
    columns: Sequence[str],
) -> None:
    """A map with a row for each layer, the first at the bottom, and a column for each value of a
    row; as many of the labels `columns` are written as fit. Cells without a finite value stay
    empty."""
    import numpy as np

    cells = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for i, row in enumerate(rows):
        cells[i, : len(row)] = _gapped(row)
    norm = norm_of(cells)
    axes.grid(visible=False)
    image = axes.imshow(cells, aspect="auto", origin="lower", norm=norm, interpolation="none")
    at = range(0, len(layers), step_between(len(layers), 20))
    axes.set_yticks(list(at), [drawn_text(layers[i]) for i in at])
    axes.set_ylabel("layer")
    marks = range(0, len(columns), step_between(len(columns), _COLUMNS))
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


# --- what was done when ---

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZE, _SMALLEST = 9.0, 5.0
"""of the text in bars, points"""
_HIGH, _STRIPE = 0.38, 0.07
"""half a bar, and what marks it, as shares of the height of a lane"""
_WIDE = 0.55
"""about the width of a character, as a share of its height"""
MOST_GROUPS = 9
"""that have a colour of their own"""


@dataclass(frozen=True)
class Bar:
    """A piece of work."""

    lane: int
    begin: int
    """ns"""
    end: int
    group: str
    """what shares a colour"""
    text: str
    marked: bool = False


@_chart
def lane_chart(
    figure: Any, axes: Any, lanes: Sequence[str], bars: Sequence[Bar], marked: str
) -> None:
    """A row for each of `lanes`, the first on top, and its bars. Those that are marked have a
    stripe below, which the legend calls `marked`. The groups with the most time have colours of
    their own."""
    from matplotlib.patches import Patch

    time_of: Counter[str] = Counter()
    for bar in bars:
        time_of[bar.group] += bar.end - bar.begin
    groups = sorted(time_of, key=lambda group: (-time_of[group], group))
    color = {group: COLORS[min(i, len(COLORS) - 1)] for i, group in enumerate(groups)}
    last = max((bar.end for bar in bars), default=0)
    scale, unit = next(((s, u) for s, u in _UNITS if last >= s), _UNITS[-1])
    axes.grid(visible=False)
    axes.set_yticks(range(len(lanes)), [drawn_text(lane) for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(last, 1) / scale)
    axes.set_xlabel(unit)
    ink = axes.xaxis.label.get_color()

    def span(bar: Bar) -> tuple[float, float]:
        return bar.begin / scale, (bar.end - bar.begin) / scale

    for lane in range(len(lanes)):
        own = [bar for bar in bars if bar.lane == lane]
        if own:
            axes.broken_barh(
                [span(bar) for bar in own],
                (lane - _HIGH, 2 * _HIGH),
                facecolors=[color[bar.group] for bar in own],
                # an edge would cover a bar that is hardly wider
                linewidth=[0.5 if (bar.end - bar.begin) > last / 200 else 0 for bar in own],
                edgecolors="white",
            )
        if stripes := [span(bar) for bar in own if bar.marked]:
            axes.broken_barh(stripes, (lane + _HIGH, _STRIPE), facecolors=ink, linewidth=0)
    drawn = {group: Patch(facecolor=color[group]) for group in groups[:MOST_GROUPS]}
    if len(groups) > MOST_GROUPS:
        drawn["other"] = Patch(facecolor=COLORS[-1])
    if any(bar.marked for bar in bars):
        drawn[marked] = Patch(facecolor=ink)
    add_legend(figure, list(drawn.values()), list(drawn))
    _write_in_bars(figure, axes, bars, scale)


def _write_in_bars(figure: Any, axes: Any, bars: Sequence[Bar], scale: float) -> None:
    renderer = _fixed(figure)
    (left, top), (right, bottom) = axes.transData.transform([(0, -_HIGH), (1, _HIGH)])
    height = abs(top - bottom) - 4
    for bar in bars:
        width = (bar.end - bar.begin) / scale * (right - left) - 2
        text = drawn_text(bar.text)
        # the sizes in which it fits, horizontal and vertical
        along, across = (
            min(_SIZE, length / max(len(text) * _WIDE, 1e-9), high / 1.1)
            for length, high in ((width, height), (height, width))
        )
        size = max(along, across)
        if size < _SMALLEST:
            continue
        written = axes.text(
            (bar.begin + bar.end) / 2 / scale, bar.lane, text, size=size, color="black",
            ha="center", va="center", rotation=0 if along >= across else 90, zorder=4,
        )  # fmt: skip
        extent = written.get_window_extent(renderer)
        size *= min(1.0, width / extent.width, height / extent.height)
        if size < _SMALLEST:
            written.remove()
        else:
            written.set_size(size)


@_chart
def curve_chart(
    figure: Any,
    axes: Any,
    x_axis: str,
    y_axis: str,
    x: Sequence[float],
    curves: Mapping[str, Values],
) -> None:
    """A curve for each name, which has one value for each of the numbers `x`, in their order. The
    first is solid with points, the others are dashed."""
    drawn = []
    for i, values in enumerate(curves.values()):
        style = {"marker": "o", "markersize": 3.5} if i == 0 else {"linestyle": "--"}
        drawn += axes.plot(x, _gapped(values), color=color_of(i), linewidth=1.6, **style)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=drawn_text(x_axis), ylabel=drawn_text(y_axis))
    add_legend(figure, drawn, list(curves))


# --- what the charts share ---


def placed(amounts: Float64, known: Float64) -> Float64:
    """Where amounts lie from 0 to 1, on the scale that the positive ones of `known` define."""
    import numpy as np

    ends = _ends(known)
    share = amounts / max(float(known.max(initial=0)), 1e-30)
    if ends is not None:
        share = np.log(np.maximum(amounts, ends[0]) / ends[0]) / np.log(ends[1] / ends[0])
    return np.minimum(share, 1)


def norm_of(cells: Float64) -> Any:
    """The same scale for matplotlib; None is its own, which is linear. Zero has no colour on a
    logarithmic one."""
    import numpy as np
    from matplotlib.colors import LogNorm

    ends = _ends(cells[np.isfinite(cells)])
    return None if ends is None else LogNorm(*ends)


def _ends(known: Float64) -> tuple[float, float] | None:
    """The smallest and the largest positive amount, if they differ tenfold and none is negative."""
    positive = known[known > 0]
    if not len(positive) or known.min() < 0 or positive.max() <= 10 * positive.min():
        return None
    return float(positive.min()), float(positive.max())


@contextlib.contextmanager
def _figure(ink: str) -> Iterator[Any]:
    """A figure with matplotlib's defaults and our changes, independent of the user's settings."""
    mpl = import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colored = ("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color", "xtick.color",
               "ytick.color")  # fmt: skip
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                **dict.fromkeys(colored, ink),
                "svg.fonttype": "none",
                "svg.hashsalt": "llamacpp-instr",
                "text.parse_math": False,
                "font.size": 10,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "axes.grid": True,
                "axes.grid.axis": "y",
                "grid.alpha": 0.15,
                "legend.frameon": False,
            }
        )
        # one pixel is one point, so measurements are valid in both
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=72, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def drawn_text(text: str) -> str:
    """A name as drawn; a legend would omit one that begins with `_`."""
    text = printable(text)
    return f" {text}" if text.startswith("_") else text


def color_of(number: int) -> str:
    """The colour of the `number`-th of many."""
    return COLORS[number % len(COLORS)]


def step_between(n: int, fitting: int) -> int:
    """The step between the labels of `n` places, 1, 2, 5, 10 …, so that `fitting` labels fit."""
    step, factors = 1, itertools.cycle((2, 2.5, 2))
    while step * fitting < n:
        step = int(step * next(factors))
    return step


def _gapped(values: Values) -> Float64:
    import numpy as np

    found = np.array(values, np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def _error_axis(axes: Any, errors: Sequence[float]) -> None:
    """Logarithmic if all are above zero and span more than a decade."""
    if errors and min(errors) > 0 and max(errors) > 10 * min(errors):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda error, _: f"{error:g}")
        axes.yaxis.set_minor_formatter(lambda _error, _: "")


def _layer_axis(axes: Any, layers: Sequence[str]) -> None:
    room = AXIS // (max(map(len, layers), default=1) + 1)
    step = step_between(len(layers), max(room, 1))
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


def _fixed(figure: Any) -> Any:
    """Fixes the position of the axes; returns what measures texts."""
    figure.canvas.draw()
    figure.set_layout_engine("none")
    return figure.canvas.get_renderer()


def _label_points(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Write every name beside its point, where it covers no other name or point. If that is far
    away, draw a line to the point."""
    renderer, ink = _fixed(figure), axes.xaxis.label.get_color()
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
            for dx, dy in _offsets(extent.width, extent.height)
        ]
        best = min(range(len(places)), key=lambda i: (_cost(places[i], taken, room), i))
        place = places[best]
        text.set_position((place[0] - x, place[1] - y))
        if best < 8:
            text.arrow_patch.set_visible(False)
        taken.append(place)


def _offsets(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Possible offsets of a name's lower left corner from its point, nearest first."""
    for gap in (7, 18, 32, 50, 75):
        for right, up in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            far = gap if right == 0 or up == 0 else 0.75 * gap
            dx = {1: far, 0: -width / 2, -1: -width - far}[right]
            dy = {1: far, 0: -height / 2, -1: -height - far}[up]
            yield dx, dy


def _cost(place: Box, taken: Sequence[Box], room: Box) -> float:
    """Pixels of a place that overlap others or are outside."""
    cost = sum(_overlap(place, other) for other in taken)
    return cost + 2 * ((place[2] - place[0]) * (place[3] - place[1]) - _overlap(place, room))


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


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
