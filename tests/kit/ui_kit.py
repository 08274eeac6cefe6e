"""The real thing for tests of what a user sees: `instr view`, and Chromium that looks at it.

What is needed (node, tests/ui/node_modules, Chromium, viztracer) comes with `make test`. A user's
machine may lack it and the tests skip; where CI is set, a missing part is a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
    """What the UI showed of a trace, and whom the browser spoke to."""

    loaded: bool
    dialog: str | None
    """the text of a dialog that lies over the page"""
    title: str
    import_errors: int
    tracks: list[Track]
    """all there are, in their order, parents before their children"""
    pinned: list[str]
    drawn: list[str]
    """names of the tracks that fit on the screen, from the top"""
    visible: tuple[int, int]
    """the time on the screen, in the trace's ns"""
    details: str
    """what stands about the selected slice"""
    rows: dict[str, list[list[Any]]]
    """what the queries gave"""
    requests: list[str]
    """paths that were fetched from our server"""
    foreign: list[str]
    """whatever was sent to anybody else; it was recorded and not passed on"""
    errors: list[str]
    """exceptions that the page did not catch"""
    console: list[str]


def need_ui() -> None:
    """Skip the tests where the UI's parts are not installed; fail in CI."""
    missing = [what for what, there in _parts().items() if not there]
    if missing:
        said = f"not installed: {', '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)


def _parts() -> dict[str, bool]:
    return {
        "node": shutil.which("node") is not None,
        "tests/ui/node_modules (make ui-kit)": (KIT / "node_modules").is_dir(),
        "Chromium": chromium() is not None,
        "viztracer": importlib.util.find_spec("viztracer") is not None,
    }


def chromium() -> str | None:
    named = (os.environ.get("CHROMIUM"), *BROWSERS)
    return next((found for name in named if name and (found := shutil.which(name))), None)


@contextlib.contextmanager
def served(path: Path, *options: str) -> Iterator[str]:
    """The address that `instr view --no-browser` prints; it is interrupted when the block ends."""
    command = [sys.executable, "-m", "llamacpp_instr", "view", str(path), "--no-browser", *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address, process.stderr.read()
            yield address
            assert process.poll() is None, "it stays until it is told to go"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def look(
    address: str,
    queries: dict[str, str] | None = None,
    select: str | None = None,
    picture: Path | None = None,
    size: tuple[int, int] = (1600, 1000),
    must_load: bool = True,
) -> Seen:
    """Open an address in Chromium; `queries` are answered by the UI's own trace_processor.

    `select` is SQL that gives the `id` of the slice to select. A page that is not the UI with a
    trace fails, unless `must_load` is False.
    """
    request = {
        "chromium": chromium(), "address": address, "width": size[0], "height": size[1],
        "timeout": 100, "queries": queries or {}, "select": select,
        "picture": None if picture is None else str(picture),
    }  # fmt: skip
    done = subprocess.run(
        ["node", "open.mjs"], cwd=KIT, input=json.dumps(request), capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["loaded"] or not must_load, (
        f"{answer['dialog']}\n{answer['errors']}\n{answer['console']}"
    )
    answer["tracks"] = [Track(**track) for track in answer["tracks"]]
    answer["visible"] = tuple(answer["visible"])
    return Seen(**answer)


@dataclass(frozen=True)
class SeenPage:
    """What a report of ours did in the browser."""

    sorted: list[dict[str, list[Any]]]
    """after each sorting: `order`, the columns' aria-sort, and `rows`, their cells' texts"""
    foreign: list[str]
    """whatever was asked for but the page"""
    errors: list[str]
    console: list[str]
    """its warnings and errors, of the page's policy too"""
    overflow: int
    """pixels that the page is wider than the screen"""
    texts: list[str]
    """of the charts"""


def look_at_page(
    file: Path,
    sorts: list[tuple[int, str, str]] | None = None,
    size: tuple[int, int] = (1200, 900),
    dark: bool = False,
    picture: Path | None = None,
) -> SeenPage:
    """Open an HTML file in Chromium. `sorts` are columns to sort by: the table's number, the
    column's name, and "click" or the key to press on it."""
    request = {
        "chromium": chromium(), "file": str(file), "width": size[0], "height": size[1],
        "dark": dark, "sorts": sorts or [], "whole": True,
        "picture": None if picture is None else str(picture),
    }  # fmt: skip
    done = subprocess.run(
        ["node", "page.mjs"], cwd=KIT, input=json.dumps(request), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return SeenPage(**json.loads(done.stdout))
