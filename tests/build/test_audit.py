"""`make audit`: missing data about a package is a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.llama.build.source_tree import patches_dir, read_upstream
from tools.audit import installed_versions, judge, main

VERSIONS = {"click": "8.2.0", "numpy": "2.0.0"}
CLEAN: list[dict[str, Any]] = [
    {"name": "click", "version": "8.2.0", "vulns": []},
    {"name": "NumPy", "version": "2.0.0", "vulns": []},
]


def test_a_vulnerable_package_and_one_without_an_answer_are_named() -> None:
    assert judge(VERSIONS, {"dependencies": CLEAN, "fixes": []}) == []
    flaw = {"id": "PYSEC-2026-1", "fix_versions": ["2.0.1"], "aliases": [], "description": ""}
    (line,) = judge(VERSIONS, {"dependencies": [CLEAN[0], {**CLEAN[1], "vulns": [flaw]}]})
    assert line == "numpy 2.0.0: PYSEC-2026-1, fixed in 2.0.1"
    (line,) = judge(VERSIONS, {"dependencies": [CLEAN[0], {"name": "numpy", "skip_reason": "?"}]})
    assert line.startswith("no data about 1 of 2 packages (numpy)")


def test_everything_that_is_needed_is_asked_about() -> None:
    versions = installed_versions()
    assert {"click", "numpy", "pandas", "rich", "markdown-it-py"} <= set(versions)
    assert versions["llama-cpp-python"] == read_upstream(patches_dir()).version
    assert "llamacpp-instr" not in versions
    assert all("+" not in version for version in versions.values())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'no route to host' >&2; exit 1", "no data about vulnerabilities: no route to host"),
        ("echo '{\"dependencies\": []}'", "no data about "),
    ],
)
def test_one_line_says_that_nothing_could_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert main([str(program)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(message)
