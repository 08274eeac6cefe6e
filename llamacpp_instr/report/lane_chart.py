"""A chart of what was done when: a lane for each who did it, a bar for each piece of work; and a
chart of curves over a number.

Invariant: a bar is as long as its time. Its text is written only where it fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamacpp_instr.report.charts import COLORS, Chart, Values, add_legend, drawn_text

_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZE, _SMALLEST = 9.0, 5.0
"""of the text in bars, points"""
_HIGH, _STRIPE = 0.38, 0.07
"""half a bar, and what marks it, of the height of a lane"""
_WIDE = 0.55
"""about the width of a character, of its height"""
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


def lane_chart(title: str, lanes: Sequence[str], bars: Sequence[Bar], marked: str) -> Chart:
    """A row for each of `lanes`, the first on top, and its bars. Those that are marked have a
    stripe below, which the legend calls `marked`. The groups with the most time have colours of
    their own."""
    time_of: dict[str, int] = {}
    for bar in bars:
        time_of[bar.group] = time_of.get(bar.group, 0) + bar.end - bar.begin
    groups = sorted(time_of, key=lambda group: (-time_of[group], group))
    color = {group: COLORS[min(i, len(COLORS) - 1)] for i, group in enumerate(groups)}
    last = max((bar.end for bar in bars), default=0)
    scale, unit = next(((s, u) for s, u in _UNITS if last >= s), _UNITS[-1])

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.set_yticks(range(len(lanes)), [drawn_text(lane) for lane in lanes])
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(0, max(last, 1) / scale)
        axes.set_xlabel(unit)
        ink = axes.xaxis.label.get_color()
        drawn: dict[str, Any] = {}
        for lane in range(len(lanes)):
            own = [bar for bar in bars if bar.lane == lane]
            if own:
                axes.broken_barh(
                    [_span(bar, scale) for bar in own],
                    (lane - _HIGH, 2 * _HIGH),
                    facecolors=[color[bar.group] for bar in own],
                    # an edge would cover a bar that is hardly wider
                    linewidth=[0.5 if (bar.end - bar.begin) > last / 200 else 0 for bar in own],
                    edgecolors="white",
                )
            if stripes := [_span(bar, scale) for bar in own if bar.marked]:
                axes.broken_barh(stripes, (lane + _HIGH, _STRIPE), facecolors=ink, linewidth=0)
        from matplotlib.patches import Patch

        for i, group in enumerate(groups):
            if i < MOST_GROUPS:
                drawn[group] = Patch(facecolor=color[group])
            else:
                drawn["other"] = Patch(facecolor=COLORS[-1])
        if any(bar.marked for bar in bars):
            drawn[marked] = Patch(facecolor=ink)
        add_legend(figure, list(drawn.values()), list(drawn))
        _write_in_bars(figure, axes, bars, scale)

    return Chart(title, draw)


def _span(bar: Bar, scale: float) -> tuple[float, float]:
    return bar.begin / scale, (bar.end - bar.begin) / scale


def _write_in_bars(figure: Any, axes: Any, bars: Sequence[Bar], scale: float) -> None:
    figure.canvas.draw()  # fixes the position of the axes
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    (left, top), (right, bottom) = axes.transData.transform([(0, -_HIGH), (1, _HIGH)])
    height = abs(top - bottom) - 4
    for bar in bars:
        width = (bar.end - bar.begin) / scale * (right - left) - 2
        text = drawn_text(bar.text)
        along, across = _size_in(text, width, height), _size_in(text, height, width)
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


def _size_in(text: str, length: float, height: float) -> float:
    """The size in which a text fits, points."""
    return min(_SIZE, length / max(len(text) * _WIDE, 1e-9), height / 1.1)


def curve_chart(
    title: str, x_axis: str, y_axis: str, x: Sequence[float], curves: Mapping[str, Values]
) -> Chart:
    """A curve for each name, over the numbers `x`, in whose order it has a value each. The first is
    solid with points, the others are dashed."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        drawn = []
        for i, values in enumerate(curves.values()):
            heights = [math.nan if value is None else value for value in values]
            style = {"marker": "o", "markersize": 3.5} if i == 0 else {"linestyle": "--"}
            drawn += axes.plot(x, heights, color=COLORS[i % len(COLORS)], linewidth=1.6, **style)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(drawn_text(x_axis))
        axes.set_ylabel(drawn_text(y_axis))
        add_legend(figure, drawn, list(curves))

    return Chart(title, draw)
