"""`instr to-flashinfer`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from converters.flashinfer.coverage import coverage_report, load_definitions
from converters.flashinfer.dataset import write_dataset
from converters.flashinfer.workloads import find_workloads
from llamacpp_instr.log.session import load_session
from tests.fuzz.guard import check_reports

KIND = "log"


def attempt(path: Path) -> None:
    found = find_workloads([load_session(path)], lambda _done, _total: None)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        write_dataset(found, folder, {})
        for file in folder.glob("workloads/*/*.jsonl"):
            for line in file.read_text().splitlines():
                json.loads(line)
        for file in folder.glob("definitions/*/*.json"):
            compile(json.loads(file.read_text())["reference"], file, "exec")
        there = load_definitions(folder) if len(found.catalog) else None
        check_reports([coverage_report(found, there)])
