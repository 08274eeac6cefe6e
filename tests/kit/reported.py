"""A session as the commands report it: their JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import SessionStart
from llamacpp_instr.prediction.probe.file import Bandwidth, probe_json
from tests.kit.in_process import titled
from tests.kit.made_probe import probe_of

Row = dict[str, Any]


class Reported:
    """The session as JSON from `instr`."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.log = directory / "session.log"
        self.environment = environment | {"LLAMACPP_INSTR_CACHE": str(directory / "cache")}

    def measure_machine(self) -> None:
        """As if `instr probe` had found memory so slow that every decode is bound by it."""
        _, start = next(iter(read_events(self.log)))
        assert isinstance(start, SessionStart)
        slow = [Bandwidth(1, 1 << 30, 1e6)]
        probe = replace(probe_of(start.host.cpu), bandwidth=slow)
        (self.log.parent / "cache").mkdir(mode=0o700)
        (self.log.parent / "cache" / "probe.json").write_bytes(probe_json(probe))

    def instr(self, *arguments: object) -> str:
        return subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *map(str, arguments)],
            cwd=self.log.parent, env=self.environment, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    def reports(self, *arguments: object) -> dict[str, Row]:
        return {of["title"]: of for of in titled(json.loads(self.instr(*arguments, "--json")))}

    def tables(self, *arguments: object) -> dict[str, list[Row]]:
        return {title: of["rows"] for title, of in self.reports(*arguments).items()}
