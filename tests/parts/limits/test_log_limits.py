"""Every command that reads a file, on every input of the fuzzers' corpus and on small files that
hold much, in 1 GB of memory and 20 s a file: done, or refused in one line."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.hostile import write_hostile
from tests.kit.native_kit import ROOT
from tests.log.test_limits import COMMANDS, CORPUS

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    write_hostile(directory)
    return directory


@pytest.mark.parametrize("surface", COMMANDS)
def test_no_small_file_takes_much_memory_or_time(
    surface: str, hostile: Path, tmp_path: Path
) -> None:
    kind, commands = COMMANDS[surface]
    files = [*sorted((CORPUS / kind).iterdir()), *sorted((hostile / kind).iterdir())]
    lines = []
    for command in commands:
        for number, file in enumerate(files):
            out = str(tmp_path / f"{len(lines)}-{number}")
            words = shlex.split(command)
            lines.append([word.replace("FILE", str(file)).replace("OUT", out) for word in words])
    results = tmp_path / "results"
    # discarded: what is printed is as long as the file says
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.limited", str(results)],
        input="".join(json.dumps(line) + "\n" for line in lines), text=True, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    reported = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    wrong = {
        " ".join(line): error
        for line, error in zip(reported[::2], reported[1::2], strict=False)
        if error
    }
    assert wrong == {}
    assert reported[::2] == lines, f"died with {reported[-1]}: {done.stderr[-1000:]}"
    assert done.returncode == 0
