"""A cache of builds that belongs to another user is refused."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import wheel as build
from tests.conftest import use_index
from tests.kit import sdist_kit as kit

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, and beside it the cache of a build from it."""
    place = tmp_path_factory.mktemp("built")
    (place / "index").mkdir()
    kit.make_patches(place, kit.make_sdist(place / "index"))
    with pytest.MonkeyPatch.context() as own:
        use_index(place / "index", own)
        build.build_wheel(stream=io.StringIO())
    return place


@pytest.fixture
def wheel(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of a build, in a cache of this test alone."""
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    use_index(tmp_path / "index", monkeypatch)
    (found,) = (tmp_path / "cache" / "wheels").glob("*/*.whl")
    return found


@pytest.mark.usefixtures("wheel")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path / "cache" / "wheels", 12345, -1)
    with pytest.raises(BuildError, match="wheels belongs to another user"):
        build.build_wheel(stream=io.StringIO())
