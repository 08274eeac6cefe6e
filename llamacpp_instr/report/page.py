"""Renders reports and charts as one HTML page that works offline; its tables can be sorted.

Invariant: text from a log or a model never becomes markup. The page loads nothing, runs only its
own scripts, and sends nothing: its Content-Security-Policy enforces this.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.charts import Chart
from llamacpp_instr.report.report import Cell, Column, Report, condensed, shown


@dataclass(frozen=True)
class Figure:
    """Markup that fits any width, with its title; notes are complete sentences."""

    title: str
    """empty for a figure that needs no heading"""
    markup: str
    """for the page, unescaped: from a module of `llamacpp_instr.report`, never from a model"""
    notes: list[str] = field(default_factory=list)
    style: str = ""
    script: str = ""
    """both are on the page once, however many figures need them"""


Section: TypeAlias = "Report | Chart | Figure"


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The sections as one self-contained HTML page. Cells show rounded numbers; a click on the
    heading of a column sorts by the exact ones."""
    sortable = any(isinstance(section, Report) and section.headed for section in sections)
    figures = [section for section in sections if isinstance(section, Figure)]
    style = "".join(dict.fromkeys([_STYLE, *(of.style for of in figures)]))
    scripts = dict.fromkeys([_SCRIPT * sortable, *(of.script for of in figures)])
    used = [script for script in scripts if script] or [_SCRIPT]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src {' '.join(map(digest_of, used))}"
    )
    heading = f"<h1>{escaped(title)}</h1>\n"
    body = "".join(map(_section, sections))
    if sections and sections[0].title == title:
        # do not repeat the heading
        heading, body = "", body.replace("<h2>", "<h1>", 1).replace("</h2>", "</h1>", 1)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{heading}{body}"
        f"{''.join(f'<script>{script}</script>' for script in scripts if script)}\n"
        "</body>\n</html>\n"
    )


def render_part(sections: Sequence[Section]) -> str:
    """The sections as markup inside another page, such as a notebook: without scripts, and
    with a style for these sections alone."""
    body = "".join(map(_section, sections)).replace("<h2>", "<h4>").replace("</h2>", "</h4>")
    return f'<div class="llamacpp-instr">\n<style>{_PART_STYLE}</style>\n{body}</div>\n'


def digest_of(script: str) -> str:
    """How a Content-Security-Policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 100rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
.scroll { overflow: auto; max-height: 80vh; width: fit-content; max-width: 100% }
.scroll svg { display: block; width: 100%; max-width: 60rem; height: auto }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; border-bottom: 1px solid #8884; text-align: left; vertical-align: top }
th { position: sticky; top: 0; background: Canvas }
td:first-child, th:first-child { position: sticky; left: 0; background: Canvas }
th:first-child { z-index: 1 }
th, .number, .bar { white-space: nowrap }
.number { text-align: right }
.bar span { display: inline-block; min-width: 4em; text-align: right; margin-right: .5em }
.bar i { display: inline-block; height: .8em; background: #3d8fc7; border-radius: .15em;
  vertical-align: -.05em }
.facts td:not(.number) { max-width: 60em; overflow-wrap: anywhere }
.facts td:first-child { opacity: .75; min-width: 6em }
td:not(.number) { overflow-wrap: break-word; max-width: 24em }
td:not(.number):last-child { max-width: 44em }
th button { all: unset; cursor: pointer }
th button:focus-visible, .scroll:focus-visible { outline: 2px solid Highlight }
th button::after { content: "\\2195" / ""; display: inline-block; margin-left: .3em; opacity: .35 }
th[aria-sort=ascending] button::after { content: "\\2191" / ""; opacity: 1 }
th[aria-sort=descending] button::after { content: "\\2193" / ""; opacity: 1 }
p { margin: .4em 0; max-width: 60rem }
@media (max-width: 40rem) { th { white-space: normal } th, td { padding: .2em .4em } }
@media print {
  .scroll, .timed { overflow: visible; max-height: none }
  table { font-size: 8pt }
}
"""

# a notebook's own rules, which align every cell right, are more specific
_PART_STYLE = """
.llamacpp-instr .scroll { overflow: auto }
.llamacpp-instr :is(th, td) { padding: .2em .6em; vertical-align: top }
.llamacpp-instr :is(th, td):not(.number) { text-align: left !important }
.llamacpp-instr .number { text-align: right; white-space: nowrap }
.llamacpp-instr .bar { white-space: nowrap }
.llamacpp-instr .bar span { display: inline-block; min-width: 4em; text-align: right }
.llamacpp-instr .bar i { display: inline-block; height: .8em; margin-left: .5em;
  background: #3d8fc7 }
"""

# numbers begin with the largest; the third click restores the order; empty cells come last
_SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
  heads.forEach((head, column) => {
    const isNumber = rows.some((row) => row.cells[column].dataset.value !== undefined);
    const [first, second] =
        isNumber ? ["descending", "ascending"] : ["ascending", "descending"];
    const value = (row) => {
      const cell = row.cells[column];
      if (isNumber) return cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);
      return cell.textContent;
    };
    const isEmpty = (v) => isNumber ? Number.isNaN(v) : v === "";
    const compare = (a, b) => isNumber ?
        (a < b ? -1 : a > b ? 1 : 0) : a.localeCompare(b, "en", {numeric: true});
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === first ? second : now === second ? null : first;
      for (const other of heads) other.removeAttribute("aria-sort");
      let sorted = rows;
      if (next) {
        head.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        sorted = rows.map((row) => [value(row), row]).sort(([a], [b]) =>
            isEmpty(a) - isEmpty(b) || (isEmpty(a) ? 0 : sign * compare(a, b))
        ).map(([, row]) => row);
      }
      body.append(...sorted);
    });
  });
}
"""


def _section(section: Section) -> str:
    title = escaped(section.title)
    lines = [f"<h2>{title}</h2>"] if title or not isinstance(section, Figure) else []
    # scrolls, and can get the keyboard's focus
    scroll = f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">'
    notes: Sequence[str] = ()
    if isinstance(section, Chart):
        # text is escaped in it
        lines += [scroll, section.svg(), "</div>"]
    elif isinstance(section, Figure):
        lines.append(section.markup)
        notes = section.notes
    else:
        if section.rows:
            section = condensed(section)
            lines += [scroll, _table(section), "</div>"]
        notes = section.notes
    lines += [f"<p>{escaped(note)}</p>" for note in notes]
    return "<section>\n" + "\n".join(lines) + "\n</section>\n"


def _table(report: Report) -> str:
    kinds = [
        ' class="number"' if column.align == "right" else ' class="bar"' * (column.unit == "share")
        for column in report.columns
    ]
    lines = ["<table>" if report.headed else '<table class="facts">']
    if report.headed:
        heads = zip(kinds, report.columns, strict=True)
        cells = "".join(f'<th scope="col"{kind}>{escaped(c.heading)}</th>' for kind, c in heads)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for row in report.rows:
        parts = zip(kinds, report.columns, row, strict=True)
        lines.append("<tr>" + "".join(_cell(kind, c, cell) for kind, c, cell in parts) + "</tr>")
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _cell(kind: str, column: Column, cell: Cell) -> str:
    if cell is None or isinstance(cell, str):
        return f"<td{kind}>{escaped(shown(cell, column.unit).strip())}</td>"
    if column.unit == "share":
        width = 6 * min(max(cell, 0.0), 1.0)
        text = f'<span>{shown(cell, "fraction")}</span><i style="width:{width:.2f}em"></i>'
    else:
        text = escaped(shown(cell, column.unit).strip())
    value = {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(cell), repr(cell))
    return f'<td{kind} data-value="{value}">{text}</td>'


def escaped(text: str) -> str:
    """The text in markup."""
    return html.escape(printable(text))
