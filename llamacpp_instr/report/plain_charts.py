"""Figures of a page that need no library: charts, large numbers, and text with its times. Charts
are SVG that stretches to the page's width, with its labels beside it as HTML, so that they stay
readable from 400 to 1600 pixels.

Invariant: names are escaped. A chart has at most some thousand elements, whatever it shows: callers
pass samples through `binned`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.report.charts import color_of, placed, step_between
from llamacpp_instr.report.page import Figure, escaped
from llamacpp_instr.report.report import Unit, shown, three_digits

MARKS = 8
"""labels below a heat map, as many as fit on a telephone"""
BINS = 320
"""columns into which samples are grouped; about three pixels each on a wide screen"""

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A line of samples in the order of `x`: their middle, and the range of each."""

    name: str
    x: Float64
    middle: Float64
    low: Float64
    high: Float64

    @classmethod
    def of(cls, name: str, x: Float64, y: Float64) -> Line:
        """A line whose samples are single values."""
        return cls(name, x, y, y, y)


@dataclass(frozen=True)
class Axis:
    """What the height measures."""

    name: str
    unit: Unit
    logarithmic: bool = False


@dataclass(frozen=True)
class Group:
    """Bars of one kind, one for each name; None has no bar."""

    name: str
    values: Sequence[float | None] = field(default_factory=list)
    unit: Unit = "per_second"


def binned(name: str, x: NDArray[np.int64], y: Float64, span: tuple[int, int]) -> Line:
    """The samples, as a line of at most BINS points: the median of each bin of `span` that has
    samples, with their minimum and maximum."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if len(x) <= BINS:
        return Line.of(name, x.astype(np.float64), y)
    width = -(-max(span[1] - span[0], 1) // BINS)
    bins = np.clip((x - span[0]) // width, 0, BINS - 1)
    _, first = np.unique(bins, return_index=True)
    parts = list(zip(np.split(x, first[1:]), np.split(y, first[1:]), strict=True))
    return Line(
        name,
        np.array([float(np.median(at)) for at, _ in parts]),
        np.array([float(np.median(of)) for _, of in parts]),
        np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
    )


def lines_over_time(
    title: str,
    axis: Axis,
    lines: Sequence[Line],
    span: tuple[int, int],
    notes: Sequence[str] = (),
    dots: bool = False,
    areas: Sequence[Line] = (),
) -> Figure:
    """Values over time in ns: `dots`, or lines that hold each value until the next sample. Below
    them are `areas`, stacked, which have the same times."""
    tops: list[Line] = []
    for area in areas:
        tops.append(Line.of(area.name, area.x, area.middle + (tops[-1].middle if tops else 0)))
    scale, ticks = _scale(axis, [*tops[-1:], *lines])
    parts = []
    below = np.zeros(len(areas[0].x) if areas else 0)
    for i, top in enumerate(tops):
        at = _places(top.x, span)
        up, down = (_stepped(at, _heights(scale, ys)) for ys in (top.middle, below))
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*up, *reversed(down)])
        parts.append(f'<polygon fill="{color_of(i)}" points="{points}"/>')
        below = top.middle
    for i, line in enumerate(lines, len(areas)):
        x = _places(line.x, span)
        high, middle, low = (_heights(scale, ys) for ys in (line.high, line.middle, line.low))
        ranges = "".join(
            f"M{at:.1f} {top:.1f}V{end:.1f}"
            for at, top, end in zip(x, high, low, strict=True)
            if end - top > 1
        )
        if ranges:
            parts.append(_path("range", i, ranges))
        if dots:
            drawn = "".join(f"M{at:.1f} {y:.1f}h0" for at, y in zip(x, middle, strict=True))
            parts.append(_path("dots", i, drawn))
        else:
            parts.append(_path("line", i, _held(x, middle)))
    names = [line.name for line in (*areas, *lines)]
    return _figure(title, axis, "".join(parts), ticks, span, names, notes)


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    amounts: Float64,
    unit: Unit,
    across: str,
    notes: Sequence[str] = (),
) -> Figure:
    """A cell for each of the amounts by row and column, none of them negative; the larger, the
    darker. `across` says what the columns are."""
    n_rows, n_columns = amounts.shape
    whole = float(amounts.sum())
    shares = placed(amounts, amounts)
    cells = []
    for i, row in enumerate(amounts.tolist()):
        for j, amount in enumerate(row):
            if amount > 0:
                tooltip = f"{rows[i]}, {across} {columns[j]}: "
                tooltip += f"{shown(amount, unit)}, {100 * amount / whole:.1f} %"
                opacity = f"{0.1 + 0.9 * shares[i, j]:.2f}"
                cells.append(
                    f'<rect x="{j}" y="{i}" width="1" height="1" opacity="{opacity}">'
                    f"<title>{escaped(tooltip)}</title></rect>"
                )
    step, last = step_between(n_columns, MARKS), n_columns - 1
    marks = [j for j in range(0, n_columns, step) if j == last or last - j >= step] + [last]
    labels = "".join(
        f'<span style="left:{100 * (j + 0.5) / n_columns:.2f}%">{escaped(columns[j])}</span>'
        for j in dict.fromkeys(marks)
    )
    names = "".join(f'<span title="{escaped(n)}">{escaped(n)}</span>' for n in rows)
    return Figure(
        title,
        f'<div class="chart heat"><div class="names">{names}</div>'
        f'<svg viewBox="0 0 {n_columns} {n_rows}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escaped(title)}" style="height:{1.5 * n_rows}rem">{"".join(cells)}</svg>'
        f'<div class="x">{labels}</div><div class="what">{escaped(across)}</div></div>',
        list(notes),
        _STYLE,
    )


def bars(title: str, names: Sequence[str], groups: Sequence[Group]) -> Figure:
    """For each group, a bar for each name; the bars of a group have a scale of their own."""
    parts = []
    for group in groups:
        most = max((value for value in group.values if value), default=0.0)
        rows = "".join(
            f'<dt>{escaped(name)}</dt><dd><i style="width:{100 * value / most if most else 0:.1f}%;'
            f'background:{color_of(i)}"></i></dd>'
            f"<dd>{escaped(shown(value, group.unit))}</dd>"
            for i, (name, value) in enumerate(zip(names, group.values, strict=True))
            if value is not None
        )
        parts.append(f'<div><h3>{escaped(group.name)}</h3><dl class="bars">{rows}</dl></div>')
    return Figure(title, f'<div class="groups">{"".join(parts)}</div>', [], _STYLE)


# --- figures of text ---


def tiles(title: str, figures: Sequence[tuple[str, str]]) -> Figure:
    """The first figures, each a value and what it is: as many side by side as fit."""
    cells = "".join(
        f"<div><b>{escaped(value)}</b><span>{escaped(what)}</span></div>" for value, what in figures
    )
    return Figure(title, f'<div class="tiles">{cells}</div>', [], _TILES)


def timed_text(
    title: str,
    passages: Sequence[tuple[str, Sequence[tuple[str, int]]]],
    notes: Sequence[str] = (),
) -> Figure:
    """Passages: a heading and pieces of text in the order in which they came, each above its ns as
    milliseconds. A piece has a background if it took longer than the median piece, the stronger
    the longer, up to four times the median."""
    times = [ns for _, pieces in passages for _, ns in pieces]
    median = max(statistics.median(times), 1) if times else 1
    parts = []
    for heading, pieces in passages:
        cells = []
        for text, ns in pieces:
            heat = round(9 * min(max(ns / median - 1.15, 0) / 3, 1))
            kind = f' class="h{heat}"' if heat else ""
            cells.append(
                f'<i{kind} data-t="{three_digits(ns / 1e6)}">{escaped(_visible(text))}</i>'
            )
            if text.endswith("\n"):
                cells.append("<br>")
        parts.append(f"<h3>{escaped(heading)}</h3><div>{''.join(cells)}</div>")
    region = f'<div class="timed" role="region" tabindex="0" aria-label="{escaped(title)}">'
    return Figure(title, f"{region}{''.join(parts)}</div>", list(notes), _TIMED)


_TILES = """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem }
.tiles div { border: 1px solid #8885; border-radius: .5rem; padding: .5rem .8rem }
.tiles b { display: block; font-size: 1.7rem; line-height: 1.25; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.tiles span { opacity: .75; font-size: .9rem }
"""
_TIMED = """
.timed { line-height: 1.2; max-height: 32rem; overflow-y: auto }
.timed h3 { font-size: .9rem; opacity: .75 }
.timed h3:not(:first-child) { margin-top: .9em }
.timed:focus-visible { outline: 2px solid Highlight }
.timed i { display: inline-block; font-style: normal; white-space: pre-wrap;
  overflow-wrap: anywhere; border-radius: .25em; margin: 0 1px .35em 0; padding: .05em .1em;
  min-height: 2.1em; max-width: 100%; vertical-align: top }
.timed i::after { content: attr(data-t); display: block; font-size: .68em; opacity: .7;
  font-variant-numeric: tabular-nums; line-height: 1.2 }
""" + "".join(f".timed .h{n} {{ background: rgb(224 130 20 / {n * 7}%) }}\n" for n in range(1, 10))


def _visible(text: str) -> str:
    """Text in which a line break and a lone space can be seen."""
    text = text.replace("\n", "\u21b5")
    return text if text.strip() else text.replace(" ", "\u2423")


# --- what the charts share ---

_STYLE = """
.chart { display: grid; grid-template-columns: max-content 1fr; padding-right: 1.6em;
  font-size: .85rem; font-variant-numeric: tabular-nums }
.chart svg { width: 100%; height: 15rem; overflow: visible }
.chart svg path { fill: none; vector-effect: non-scaling-stroke }
.chart .grid { stroke: currentColor; opacity: .18; stroke-width: 1 }
.chart .range { opacity: .3; stroke-width: 2.5 }
.chart .line { stroke-width: 2 }
.chart .dots { stroke-width: 5; stroke-linecap: round; opacity: .75 }
.chart polygon { opacity: .8 }
.chart .y { position: relative; height: 15rem }
.chart .y span { position: absolute; right: .6em; transform: translateY(50%); white-space: nowrap }
.chart .x { grid-column: 2; position: relative; height: 1.6em; margin-top: .2em }
.chart .x span { position: absolute; transform: translateX(-50%); white-space: nowrap }
.chart .what { grid-column: 2; text-align: center; opacity: .75 }
.chart .unit, .legend { opacity: .85; font-size: .85rem }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; margin: .3em 0 .6em }
.legend span { overflow-wrap: anywhere }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
  margin-right: .4em; vertical-align: -.05em }
.heat svg { shape-rendering: crispEdges; fill: #3d8fc7; overflow: hidden;
  border-bottom: 1px solid #8886 }
.heat .names span { display: block; height: 1.5rem; line-height: 1.5rem; padding-right: .7em;
  max-width: min(15em, 40vw); overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  font-size: .8rem }
.groups { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: .4rem 2.5rem }
h3 { font-size: 1rem; margin: .6em 0 .3em; font-weight: 600 }
.bars { display: grid; grid-template-columns: fit-content(45%) minmax(3rem, 1fr) max-content;
  gap: .3em .8em; margin: 0; font-variant-numeric: tabular-nums }
.bars dt { overflow-wrap: anywhere }
.bars dd { margin: 0; text-align: right; font-weight: 600; align-self: center }
.bars i { display: block; height: 1.1em; min-width: 2px; border-radius: .15em }
"""


def _figure(
    title: str,
    axis: Axis,
    drawn: str,
    ticks: Sequence[tuple[float, float]],
    span: tuple[int, int],
    names: Sequence[str],
    notes: Sequence[str] = (),
) -> Figure:
    labels = [(at, _round(shown(value, axis.unit)) if value else "0") for value, at in ticks]
    low, high = span
    wide = max((len(label) for _, label in labels), default=0)
    grid = "".join(f"M0 {1000 * (1 - at):.1f}H1000" for at, _ in labels)
    y = "".join(f'<span style="bottom:{100 * at:.2f}%">{escaped(t)}</span>' for at, t in labels)
    # whole numbers, which text shows without decimals
    x = "".join(
        f'<span style="left:{100 * (t - low) / max(high - low, 1):.2f}%">'
        f"{escaped(_moment(t))}</span>"
        for t in map(int, _ticks(low, high, 5))
    )
    legend = "".join(
        f'<span><i style="background:{color_of(i)}"></i>{escaped(name)}</span>'
        for i, name in enumerate(names)
    )
    return Figure(
        title,
        f'<div class="unit">{escaped(axis.name)}</div>'
        f'<div class="chart"><div class="y" style="width:{0.62 * wide + 1:.1f}em">{y}</div>'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img"'
        f' aria-label="{escaped(title)}"><path class="grid" d="{grid}"/>{drawn}</svg>'
        f'<div class="x">{x}</div><div class="what">time since the session began</div></div>'
        f'<div class="legend">{legend}</div>',
        list(notes),
        _STYLE,
    )


def _moment(ns: int) -> str:
    if ns >= 1000 * 10**9:
        return f"{ns / 1e9:,.0f} s"
    return _round(shown(ns, "ns")) if ns else "0 s"


def _round(text: str) -> str:
    """A number on an axis: without the zeros that would suggest a measurement."""
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def _places(x: Float64, span: tuple[int, int]) -> list[float]:
    """From the left, in thousandths of the width."""
    low, high = span
    places: list[float] = (1000 * np.clip((x - low) / max(high - low, 1), 0, 1)).tolist()
    return places


def _heights(scale: Callable[[float], float], values: Float64) -> list[float]:
    """From the top, in thousandths of the height."""
    return [1000 * (1 - scale(value)) for value in values.tolist()]


def _path(kind: str, number: int, drawn: str) -> str:
    return f'<path class="{kind}" stroke="{color_of(number)}" d="{drawn}"/>'


def _held(x: Sequence[float], y: Sequence[float]) -> str:
    """A path that holds each value until the next, and the last to the end."""
    parts = [f"H{at:.1f} V{height:.1f}" for at, height in zip(x, y, strict=True)]
    return f"M{x[0]:.1f} {y[0]:.1f}{''.join(parts[1:])}H1000" if parts else ""


def _stepped(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a line that holds each value until the next, and the last to the end."""
    corners = []
    for at, value, until in zip(x, y, [*x[1:], 1000.0], strict=False):
        corners += [(at, value), (until, value)]
    return corners


def _scale(
    axis: Axis, lines: Sequence[Line]
) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Value -> height from 0 to 1, and the ticks as (value, height)."""
    most = max((float(np.max(of.high, initial=0)) for of in lines), default=0.0)
    positive = [float(v) for of in lines for v in of.low.tolist() if v > 0]
    if axis.logarithmic and positive and most > 0:
        low, high = math.log10(min(positive)), math.log10(most)
        pad = max(0.03 * (high - low), 0.02)
        low, high = low - pad, high + pad

        def height(value: float) -> float:
            return (math.log10(max(value, 10**low)) - low) / (high - low)

        decades = range(math.floor(low), math.ceil(high) + 1)
        ticks = [10.0**d * n for d in decades for n in ((1, 2, 5) if high - low < 3 else (1,))]
        return height, [(t, height(t)) for t in ticks if low <= math.log10(t) <= high]
    top = max(most, 1e-9)
    ticks = _ticks(0, top, 4, 1024 if axis.unit == "bytes" else 10)
    top = max(top * 1.04, ticks[-1])
    return lambda value: value / top, [(tick, tick / top) for tick in ticks]


def _ticks(low: float, high: float, n: int, base: int = 10) -> list[float]:
    """About `n` round numbers between two."""
    raw = max((high - low) / n, 1e-9)
    power = base ** math.floor(math.log(raw, base))
    steps = [2.0**k for k in range(11)] if base == 1024 else [1, 2, 2.5, 5, 10]
    step = next(s for s in steps if s * power >= raw * 0.999) * power
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
