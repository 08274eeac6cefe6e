"""The names in the JSON of reports; `python -m tests.kit.report_names` writes docs/json.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.kit.in_process import printed
from tests.kit.native_kit import ROOT

PAGE = ROOT / "docs" / "json.md"
LOG = "tests/fixtures/demo-verbose.log"
COMMANDS = {
    "summary": ("summary", LOG),
    "stats": ("stats", LOG, "--by", "layer,op"),
    "requests": ("requests", LOG),
    "tree": ("tree", LOG),
    "roofline": ("roofline", LOG, "--probe", "tests/fixtures/probe.json"),
    "diff": ("diff", LOG, LOG),
    "schedule": ("schedule", LOG),
    "inspect": ("inspect", "demo"),
    "ops": ("ops", LOG),
}


def listed(page: str) -> str:
    """The page with the names that the commands have now."""
    rows = ["| command | id of the table | ids of its columns |", "|---|---|---|"]
    for command, words in COMMANDS.items():
        seen = set()
        for report in json.loads(printed(*words, "--json")):
            columns = ", ".join(f"`{column['id']}`" for column in report["columns"])
            if columns and (report["id"], columns) not in seen:
                seen.add((report["id"], columns))
                rows.append(f"| `{command}` | `{report['id']}` | {columns} |")
    return re.sub(r"\| command \|.*?\n\n", "\n".join(rows) + "\n\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    Path(PAGE).write_text(listed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
