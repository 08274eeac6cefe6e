"""`instr collect`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from converters.fleet.collect import collect
from converters.fleet.dataset import TABLES
from converters.fleet.sources import find_sources
from llamacpp_instr.terminal import printable
from tests.fuzz.guard import check_terminal

KIND = "log"
NAMES = {"_format", "_lock", *TABLES}


def attempt(path: Path) -> None:
    for lenient in (True, False):
        with tempfile.TemporaryDirectory(dir=path.parent) as name:
            sources = find_sources([str(path)])
            for taken in collect(sources, Path(name), None, lenient, lambda _done, _total: None):
                check_terminal(printable(taken.said))
            assert {path.name for path in Path(name).iterdir()} <= NAMES
