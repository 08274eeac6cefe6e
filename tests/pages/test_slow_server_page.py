"""docs/tutorials/slow-server.md shows what its commands print for the logs beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.kit.commands_kit import blocks_of
from tests.kit.native_kit import ROOT

PAGE = ROOT / "docs" / "tutorials" / "slow-server.md"


def words(line: str) -> str:
    return " ".join(line.split())


def test_the_outputs_are_those_of_the_commands() -> None:
    """A table of the page may have fewer columns."""
    commands = [line for block in blocks_of(PAGE, "sh") for line in block.splitlines()]
    shown = [command for command in commands if re.match("instr (requests|summary)", command)]
    printed = [
        words(line)
        for command in shown
        for line in subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *command.split()[1:]],
            cwd=PAGE.parent, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True,
            check=True,
        ).stdout.splitlines()
    ]  # fmt: skip
    blocks = blocks_of(PAGE, "text")[1:]  # the first one records
    lines = [words(line) for block in blocks for line in block.splitlines()]
    missing = [line for line in lines if not any(of.startswith(line) for of in printed)]
    assert len(lines) >= 30
    assert missing == []
