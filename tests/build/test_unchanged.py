"""CI repeats a check only if what it tests has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import unchanged


@pytest.mark.native
def test_what_passed_is_not_run_again_until_a_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path / "cache"))

    def runs(status: int) -> bool:
        """Whether the command ran; it exits with `status`, which must come back."""
        code = f"import pathlib, sys; pathlib.Path('ran').touch(); sys.exit({status})"
        command = ["unchanged", "x", "file", "--", sys.executable, "-c", code]
        monkeypatch.setattr(sys, "argv", command)
        ran.unlink(missing_ok=True)
        assert unchanged.main() == (status if ran.exists() else 0)
        return ran.exists()

    assert runs(1), "it never passed"
    assert runs(1), "it failed"
    assert runs(0)
    assert not runs(0)
    (tmp_path / "file").write_text("two")
    assert runs(0), "the file has changed"
    assert runs(3), "the command has changed"
