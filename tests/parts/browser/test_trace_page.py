"""docs/how-to/read-a-trace.md names tracks and arguments that a trace really has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.in_process import instr_here
from tests.kit.native_kit import ROOT
from tests.kit.trace_processor import ask

PAGE = (ROOT / "docs" / "how-to" / "read-a-trace.md").read_text(encoding="utf-8")
FIXTURE = ROOT / "tests" / "fixtures" / "demo-verbose.log"
# no device, no other machine, no --stats, no `machine` event and nothing to warn of in that session
ABSENT = {
    "splits", "device waits", "devices", "machines", "machine HOST:PORT", "tensor statistics",
    "machine", "messages",
}  # fmt: skip


def named(heading: str) -> list[str]:
    """The names in the first column of the table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.native
def test_the_page_names_what_is_there(tmp_path: Path) -> None:
    trace = tmp_path / "t.pftrace"
    done = instr_here("to-perfetto", FIXTURE, "-o", trace)
    assert done.returncode == 0, done.stderr
    tracks, keys = ask(
        trace,
        "select distinct name from track",
        """select distinct key from args join slice using (arg_set_id)
           join track on track.id = track_id where track.name in ('layers', 'thread 0')""",
    )
    there = {row[0] for row in tracks}
    assert set(named("Tracks")) - ABSENT <= there
    assert len(named("Tracks")) > 10
    arguments = {row[0].removeprefix("debug.") for row in keys}
    # a value, and an argument of ops whose work is an upper bound
    assert arguments > set(named("One op")) - {"node_21", "work"}
