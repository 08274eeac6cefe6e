"""What a build fetches is pinned, in a real isolated build."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llamacpp_instr.llama.build import wheel as build
from tests.kit import sdist_kit as kit

pytestmark = pytest.mark.native


def test_what_a_build_fetches_is_pinned(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned one of two versions on the index is used, even if a folder's name has a space, and
    the user's own constraints apply as well."""
    for version in ("1.0", "2.0"):
        for name in ("tool", "other"):
            kit.make_wheel(index, name, version)
    pyproject = kit.FILES["pyproject.toml"].replace("requires = []", 'requires = ["tool", "other"]')
    backend = kit.FILES["backend.py"].replace(
        "def build_wheel(",
        "import tool, other\nprint(tool.VERSION, other.VERSION)\ndef build_wheel(",
    )
    sdist = kit.make_sdist(index, {"pyproject.toml": pyproject, "backend.py": backend})
    (tmp_path / "a folder").mkdir()
    patches = kit.make_patches(tmp_path / "a folder", sdist)
    monkeypatch.setattr(build, "patches_dir", lambda: patches)
    (patches / "build-constraints.txt").write_text("tool==1.0\n")
    (tmp_path / "user.txt").write_text("other==1.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "user.txt"))
    build.build_wheel(stream=io.StringIO())
    log = next((tmp_path / "cache" / "logs").glob("build-*.log")).read_text()
    assert "1.0 1.0\n" in log
