"""The real UI for tests: `instr view`, and Chromium that opens it.

`make test-all PARTS=browser` names what they need: node, npm and Chromium.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
KIT = ROOT / "tests" / "ui"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Track:
    name: str
    depth: int
    expanded: bool


@dataclass(frozen=True)
class Seen:
    """What the UI showed of a trace, and the requests of the browser."""

    loaded: bool
    dialog: str | None
    """the text of a dialog over the page"""
    title: str
    import_errors: int
    tracks: list[Track]
    """all tracks in order, parents before children"""
    pinned: list[str]
    drawn: list[str]
    """names of the tracks on the screen, from the top"""
    visible: tuple[int, int]
    """the time range on the screen, in the trace's ns"""
    details: str
    """the text about the selected slice"""
    rows: dict[str, list[list[Any]]]
    """results of the queries"""
    requests: list[str]
    """paths that were fetched from our server"""
    foreign: list[str]
    """requests to other hosts; they were recorded and not passed on"""
    errors: list[str]
    """uncaught exceptions of the page"""
    console: list[str]


def chromium() -> str | None:
    named = (os.environ.get("CHROMIUM"), *BROWSERS)
    return next((found for name in named if name and (found := shutil.which(name))), None)


@contextlib.contextmanager
def served(path: Path, *options: str, command: str = "view") -> Iterator[str]:
    """The address that `instr view --no-browser`, or another command that serves a page, prints;
    the server is interrupted at the end."""
    instr = [sys.executable, "-m", "llamacpp_instr", command]
    with subprocess.Popen(
        [*instr, str(path), "--no-browser", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address, process.stderr.read()
            yield address
            assert process.poll() is None, "it stays until it is stopped"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def run_script(script: str, **request: Any) -> Any:
    """What a script of tests/ui returns; it gets Chromium and `request` as JSON."""
    runner = _runner()
    assert runner.stdin is not None
    assert runner.stdout is not None
    asked = {"script": script, "request": {"chromium": chromium(), **request}}
    runner.stdin.write(json.dumps(asked).encode() + b"\n")
    runner.stdin.flush()
    if not select.select([runner.stdout], [], [], 600)[0]:
        runner.kill()
    line = runner.stdout.readline()
    if not line:
        _runner.cache_clear()
        pytest.fail(f"{script} ended node with status {runner.wait()}")
    answer = json.loads(line)
    assert "error" not in answer, answer["error"][-3000:]
    return answer["seen"]


@cache
def _runner() -> subprocess.Popen[bytes]:
    """Ends with this process, which closes its standard input."""
    return subprocess.Popen(
        ["node", "runner.mjs"], cwd=KIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def look(
    address: str,
    queries: dict[str, str] | None = None,
    select: str | None = None,
    picture: Path | None = None,
    size: tuple[int, int] = (1600, 1000),
    must_load: bool = True,
) -> Seen:
    """Open an address in Chromium; the UI's own trace_processor answers `queries`.

    `select` is SQL that returns the `id` of the slice to select. A page without a loaded trace
    fails, unless `must_load` is False.
    """
    answer = run_script(
        "open.mjs", address=address, width=size[0], height=size[1], timeout=100,
        queries=queries or {}, select=select, picture=picture and str(picture),
    )  # fmt: skip
    assert answer["loaded"] or not must_load, (
        f"{answer['dialog']}\n{answer['errors']}\n{answer['console']}"
    )
    answer["tracks"] = [Track(**track) for track in answer["tracks"]]
    answer["visible"] = tuple(answer["visible"])
    return Seen(**answer)


@dataclass(frozen=True)
class SeenPage:
    """The behaviour of one of our reports in the browser."""

    sorted: list[dict[str, list[Any]]]
    """after each sorting: `order`, the columns' aria-sort, and `rows`, their cells' texts"""
    foreign: list[str]
    """all requests except for the page"""
    errors: list[str]
    console: list[str]
    """its warnings and errors, also of the page's policy"""
    overflow: int
    """pixels by which the page is wider than the screen"""
    texts: list[str]
    """of the charts"""
    boxes: list[dict[str, Any]]
    """after each step with the icicle: `boxes` (name, left and width as shares, top in pixels), the
    title of what has the `focus`, and the `caption`"""
    ink: str
    """the colour of the text"""
    measured: list[tuple[str, float, float]]
    """text, left and right of the elements asked for"""


def look_at_page(
    file: Path,
    sorts: list[tuple[int, str, str]] | None = None,
    size: tuple[int, int] = (1200, 900),
    dark: bool = False,
    picture: Path | None = None,
    icicle: list[str] | None = None,
    whole: bool = True,
    measure: str = "",
) -> SeenPage:
    """Open an HTML file in Chromium. `sorts` are columns to sort by: the table's number, the
    column's name, and "click" or the key to press on it. `icicle` are steps with the first icicle:
    `click NAME`, or a key; an empty one only looks. `picture` is of the `whole` page or of the
    screen; `measure` is a selector."""
    seen = run_script(
        "page.mjs", file=str(file), width=size[0], height=size[1], dark=dark, sorts=sorts or [],
        whole=whole, icicle=icicle or [], measure=measure, picture=picture and str(picture),
    )  # fmt: skip
    return SeenPage(**seen)
