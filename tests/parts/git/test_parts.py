"""`make test-all`: which parts run, what they need, and when CI runs one again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.native_kit import ROOT
from tools import suite_parts as parts
from tools.mutate import TRUSTED
from tools.suite_parts import PARTS, Requirement, SuitePart

LACKING = Requirement("a teapot", lambda: False, ("teapot",))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the files that every part has, and `product`; the cache is in it, too."""
    for name in ("tests/conftest.py", "tests/kit/a.py", "product/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str, **fields: object) -> int:
    """The exit status of `python -m tools.suite_parts WORDS` with one part, named `tea`."""
    arguments: dict[str, object] = {"minutes": 1, "paths": ("product",), **fields}
    part = SuitePart("tea", "tea is made", **arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(parts, "PARTS", (part,))
    monkeypatch.setattr(parts, "NAMES", ["tea"])
    monkeypatch.setattr(sys, "argv", ["parts", *words])
    return parts.main()


def touching(status: int) -> tuple[tuple[str, ...], ...]:
    """A command that creates the file `ran` and exits with `status`."""
    code = f"import pathlib, sys; pathlib.Path('ran').touch(); sys.exit({status})"
    return (("{python}", "-c", code),)


def test_what_passed_is_not_run_again_until_a_file_changes(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(status: int) -> bool:
        (repository / "ran").unlink(missing_ok=True)
        expected = run(monkeypatch, "--changed", commands=touching(status))
        ran = (repository / "ran").exists()
        assert expected == (1 if ran and status else 0)
        return ran

    assert runs(1), "it never passed"
    assert runs(1), "it failed"
    assert runs(0)
    assert not runs(0)
    (repository / "product" / "a.py").write_text("two")
    assert runs(0), "the file has changed"
    assert runs(3), "the command has changed"


def test_a_part_that_cannot_run_is_an_error_and_never_skipped(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["tea"], ["all"], ["--changed"]):
        assert run(monkeypatch, *words, needs=(LACKING,), commands=touching(0)) == 2
        assert not (repository / "ran").exists()
        printed = capsys.readouterr()
        assert "lacks a teapot" in printed.out
        assert "apt install teapot" in printed.out
        assert printed.err == "cannot run here: tea\n"


def test_a_path_without_files_is_an_error(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was moved would otherwise never be tested again."""
    with pytest.raises(SystemExit, match="moved: no tracked file"):
        run(monkeypatch, "--changed", paths=("product", "moved"), commands=touching(0))
    assert not (repository / "ran").exists()


def test_a_name_of_no_part_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "coffee")
    assert "no part 'coffee'; there are tea, and all" in capsys.readouterr().err


def test_every_folder_is_a_part_whose_files_exist() -> None:
    folders = {path.name for path in (ROOT / "tests" / "parts").iterdir() if path.is_dir()}
    names = {part.name for part in PARTS}
    assert folders - {"__pycache__"} <= names
    for part in PARTS:
        assert part.digest()
        assert part.commands or part.name in folders
    for path in TRUSTED:
        assert parts.tracked_files(path), path
