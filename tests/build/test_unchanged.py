"""CI runs a check again only when what it tests has changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import unchanged


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(monkeypatch: pytest.MonkeyPatch, paths: list[str], status: int, ran: Path) -> bool:
    """Whether the command ran; it exits with `status`, which must come back."""
    code = f"import pathlib, sys; pathlib.Path({str(ran)!r}).touch(); sys.exit({status})"
    monkeypatch.setattr(sys, "argv", ["unchanged", "x", *paths, "--", sys.executable, "-c", code])
    ran.unlink(missing_ok=True)
    returned = unchanged.main()
    assert returned == (status if ran.exists() else 0)
    return ran.exists()


@pytest.mark.usefixtures("cache")
def test_what_passed_is_not_run_again_until_a_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    assert check(monkeypatch, ["LICENSE"], 1, ran), "never passed"
    assert check(monkeypatch, ["LICENSE"], 1, ran), "a failure is no pass"
    assert check(monkeypatch, ["LICENSE"], 0, ran)
    assert not check(monkeypatch, ["LICENSE"], 0, ran)
    assert check(monkeypatch, ["LICENSE", "NOTICE"], 0, ran), "other files"
    assert check(monkeypatch, ["LICENSE", "NOTICE"], 3, ran), "another command"


def test_names_and_contents_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = ["LICENSE", "NOTICE"]
    digests = {unchanged.digest_of(listed[:n], [command]) for n in (1, 2) for command in "ab"}
    assert len(digests) == 4
    monkeypatch.setattr(unchanged, "ROOT", tmp_path)
    (tmp_path / "f").write_text("one")
    for command in (["init", "-q"], ["add", "f"]):
        unchanged.subprocess.run(["git", *command], cwd=tmp_path, check=True)
    before = unchanged.digest_of(["f"], [])
    (tmp_path / "f").write_text("two")
    assert unchanged.digest_of(["f"], []) != before
