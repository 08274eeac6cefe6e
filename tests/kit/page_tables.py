"""Reads the figures of a page back from its markup."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

import numpy as np


class PageTables(HTMLParser):
    """The tables of a page: title -> rows of their cells, numbers as they are sorted by; its large
    figures; and the ms below each token, by passage."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str | float]]] = {}
        self.passages: list[list[float]] = []
        self._within: list[str] = []
        self._title = ""
        self.feed(text)
        tiles = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span></div>", text)
        self.tiles = {what: value for value, what in tiles}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag not in ("meta", "link", "br"):
            self._within.append(tag)
        if tag in ("h2", "h4"):
            self._title = ""
        elif tag == "tr" and self._within[-2] == "tbody":
            self.tables.setdefault(self._title, []).append([])
        elif tag == "td":
            self.tables[self._title][-1].append(float(known.get("data-value") or "nan"))
        elif known.get("class") == "timed" or (tag == "h3" and self.passages):
            self.passages.append([])
        elif tag == "i" and "data-t" in known:
            self.passages[-1].append(float((known["data-t"] or "").replace(",", "")))

    def handle_endtag(self, _tag: str) -> None:
        self._within.pop()

    def handle_data(self, data: str) -> None:
        if self._within[-1:] in (["h2"], ["h4"]):
            self._title += data
        elif self._within[-1:] == ["td"]:
            cells = self.tables[self._title][-1]
            if isinstance(cells[-1], float) and np.isnan(cells[-1]):
                cells[-1] = data


def cells(rows: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """The cells that are not empty: JSON has null for them, a page leaves a whole column out."""
    return [[cell for cell in row if cell not in (None, "") and cell == cell] for row in rows]


def check_page(page: PageTables, reports: Iterable[dict[str, Any]]) -> None:
    """The page has these tables with the same numbers."""
    for report in reports:
        if report["rows"]:
            told = cells(row.values() for row in report["rows"])
            assert cells(page.tables[report["title"]]) == told, report["title"]
