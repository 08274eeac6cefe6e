"""Defines what a finding is, and tries one input.

An input may be refused only with an `InstrError`. Its time and memory are bounded by its size,
whatever numbers it contains. Its text is escaped: no markup in a page, no control characters on a
terminal.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.icicle import SCRIPT as ICICLE
from llamacpp_instr.report.render import render_csv, render_html, render_markdown, render_text
from llamacpp_instr.report.report import Cell, Column, Report

CPU_SECONDS = 5.0
"""for one input, plus the same for every 100 kB of it; a usual one takes milliseconds"""
RESIDENT = 256 << 20
"""bytes by which an input may make the process grow, plus RESIDENT_BY_BYTE for each of its own"""
RESIDENT_BY_BYTE = 1000
ADDRESS_SPACE = 2 << 30
"""bytes that may be allocated beyond what is already mapped, used or not"""

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Finding(Exception):
    """Something that no input may cause."""


def try_input(attempt: Callable[[Path], None], data: bytes, directory: Path) -> None:
    """Pass `data` to a surface as a file; raises an exception for a finding."""
    path = directory / "input"
    path.write_bytes(data)
    _forget_peak()
    before, begin = _status("VmRSS"), time.process_time()
    with limited_address_space(), may_refuse():
        attempt(path)
    took, grown = time.process_time() - begin, _status("VmHWM") - before
    if took > CPU_SECONDS * (1 + len(data) / 100_000):
        raise Finding(f"{len(data)} bytes took {took:.1f} s of CPU time")
    if grown > RESIDENT + RESIDENT_BY_BYTE * len(data):
        raise Finding(f"{len(data)} bytes took {grown:,} bytes of memory")


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A directory for inputs, in memory if the system has one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@contextlib.contextmanager
def limited_address_space() -> Iterator[None]:
    """Inside, allocating memory by a number in the input raises MemoryError."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if not _status("VmSize"):
        yield
        return
    most = _status("VmSize") + ADDRESS_SPACE
    if limits[1] != resource.RLIM_INFINITY:
        most = min(most, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    """Bytes from Linux's /proc; 0 on other systems."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


# --- output for the user ---


@contextlib.contextmanager
def may_refuse() -> Iterator[None]:
    """Inside, an error of ours is allowed, if a terminal can show it as the command line prints
    it."""
    try:
        yield
    except InstrError as error:
        check_terminal(printable(str(error)))


def check_terminal(text: str) -> None:
    if found := CONTROL.search(text):
        raise Finding(f"a terminal would get {found[0]!r}: {text[:200]!r}")


def check_reports(reports: Sequence[Report]) -> None:
    check_terminal(render_text(reports))
    markdown = render_markdown(reports)
    check_terminal(markdown)
    if found := re.search(r"(?<!\\)[<`]", markdown):
        raise Finding(f"markup in Markdown: {markdown[found.start() - 40 : found.end() + 40]!r}")
    json.loads(json.dumps([report.to_json() for report in reports]))
    for report in reports:
        check_terminal(render_csv(report))
    check_page(render_html(reports))


def check_page(page: str) -> None:
    """Every element is ours: a page with the same tables and other words has the same elements."""
    elements = Elements()
    elements.feed(page)
    elements.close()
    if foreign := set(elements.found) - OURS.elements:
        raise Finding(f"markup in a page: {sorted(map(str, foreign))[0]}")
    if elements.scripts not in ([], OURS.scripts):
        raise Finding(f"a script in a page: {elements.scripts}")


def check_figures(page: str) -> None:
    """The page of `instr page` has only elements and attributes that its figures need, and no
    scripts except ours and data."""
    elements = Elements()
    elements.feed(page)
    elements.close()
    for tag, *attributes in elements.found:
        names = {name for name in attributes if isinstance(name, str)}
        names |= {pair[0] for pair in attributes if isinstance(pair, tuple)}
        if foreign := names - FIGURES.get(str(tag).lstrip("/"), {"no such element"}):
            raise Finding(f"markup in a page: {tag} {sorted(foreign)}")
        if str(tag).lstrip("/") not in FIGURES:
            raise Finding(f"markup in a page: {tag}")
    scripts = [text for text in elements.scripts if text not in (*OURS.scripts, ICICLE)]
    if len(scripts) > 1:
        raise Finding(f"a script in a page: {scripts}")
    for text in scripts:
        check_terminal(text)
        json.loads(text)


FIGURES: dict[str, set[str]] = {
    **{tag: set() for tag in ("head", "body", "style", "title", "section", "thead", "tbody", "tr")},
    **{tag: set() for tag in ("br", "b", "h1", "h2", "h3")},
    "html": {"lang"},
    "meta": {"charset", "http-equiv", "content", "name"},
    "link": {"rel", "href"},
    "script": {"type"},
    "table": {"class"},
    "th": {"scope", "class"},
    "td": {"class", "data-value"},
    "p": {"class", "aria-live"},
    "i": {"class", "style", "data-t"},
    "span": {"class", "style", "title"},
    "div": {"class", "style", "role", "tabindex", "aria-label", "hidden"},
    "button": {"class", "style", "title", "type", "aria-pressed"},
    "svg": {"style", "role", "aria-label", "viewbox", "preserveaspectratio"},
    "path": {"class", "d", "stroke"},
    "polygon": {"fill", "points"},
    "rect": {"x", "y", "width", "height", "opacity"},
}
"""the elements of a page of figures -> their attributes"""


class Elements(HTMLParser):
    """The elements of a page, without attributes that contain text or a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[object, ...]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kept = [
            (name, re.sub(r"[\d.]+", "0", value or "") if name == "style" else value)
            for name, value in attrs
            if name not in ("aria-label", "data-value")
        ]
        self.found.append((tag, *kept, *(name for name, _ in attrs if name == "data-value")))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}",))

    def handle_data(self, data: str) -> None:
        check_terminal(data)
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)

    def handle_comment(self, data: str) -> None:
        raise Finding(f"a comment in a page: {data!r}")

    def unknown_decl(self, data: str) -> None:
        raise Finding(f"a declaration in a page: {data!r}")

    def handle_pi(self, data: str) -> None:
        raise Finding(f"an instruction in a page: {data!r}")


class _Ours:
    """The elements of a page whose cells and names are plain words."""

    def __init__(self) -> None:
        columns = [Column("a", "text"), Column("b", "count"), Column("c", "share")]
        rows: list[list[Cell]] = [["x", 1, 0.5], [1, None, None], [None, None, None]]
        elements = Elements()
        headed, headless = (Report("plain", columns, rows, ["A note."], h) for h in (True, False))
        elements.feed(render_html([headed, headless]))
        self.elements, self.scripts = set(elements.found), elements.scripts


OURS = _Ours()
