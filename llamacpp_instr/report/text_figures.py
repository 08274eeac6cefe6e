"""Figures of a page that are made of text: large numbers, and pieces of text with their times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from llamacpp_instr.report.page import Figure, escaped
from llamacpp_instr.report.report import three_digits


@dataclass(frozen=True)
class Tile:
    """A figure that one sees first."""

    value: str
    what: str


@dataclass(frozen=True)
class Passage:
    """Pieces of text in the order in which they came, each with its ns."""

    heading: str
    pieces: Sequence[tuple[str, int]]


def tiles(title: str, figures: Sequence[Tile]) -> Figure:
    """The figures side by side, as many in a row as fit."""
    cells = "".join(
        f"<div><b>{escaped(tile.value)}</b><span>{escaped(tile.what)}</span></div>"
        for tile in figures
    )
    return Figure(title, f'<div class="tiles">{cells}</div>', [], _TILES)


def timed_text(title: str, passages: Sequence[Passage], notes: Sequence[str] = ()) -> Figure:
    """Every piece above its milliseconds. A piece has a background if it took longer than the
    median piece, the stronger the longer, up to four times the median."""
    times = [ns for passage in passages for _, ns in passage.pieces]
    median = max(statistics.median(times), 1) if times else 1
    parts = []
    for passage in passages:
        cells = []
        for text, ns in passage.pieces:
            heat = round(9 * min(max(ns / median - 1.15, 0) / 3, 1))
            kind = f' class="h{heat}"' if heat else ""
            cells.append(
                f'<i{kind} data-t="{three_digits(ns / 1e6)}">{escaped(_visible(text))}</i>'
            )
            if text.endswith("\n"):
                cells.append("<br>")
        heading = escaped(passage.heading)
        parts.append(f"<h3>{heading}</h3><div>{''.join(cells)}</div>")
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
