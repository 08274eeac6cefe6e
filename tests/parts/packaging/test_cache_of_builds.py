"""The cache of builds: who may write there, what is taken from it, and what builds fetch."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build import wheel as build
from llamacpp_instr.llama.build.wheel import workplace
from tests.conftest import use_index
from tests.kit import sdist_kit as kit

pytestmark = pytest.mark.native
REPOSITORY = Path(__file__).resolve().parents[3]


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


def test_a_cache_that_cannot_be_written_is_one_line(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = index / f"{kit.ROOT}.tar.gz"
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(file))
    with pytest.raises(BuildError, match=r"File exists; .* set LLAMACPP_INSTR_CACHE"):
        build.build_wheel(stream=io.StringIO())


@pytest.mark.parametrize("damage", ["content", "foreign", "no digest"])
def test_a_wheel_that_is_not_as_it_was_kept_is_built_again(wheel: Path, damage: str) -> None:
    assert build.build_wheel(stream=io.StringIO()) == wheel
    if damage == "content":
        wheel.write_bytes(wheel.read_bytes()[:-1])
    elif damage == "foreign":
        wheel.rename(wheel.with_name("a-1-py3-none-any.whl"))
    else:
        wheel.with_name(f"{wheel.name}.sha256").unlink()
    stream = io.StringIO()
    assert build.build_wheel(stream=stream) == wheel
    assert "building llama-cpp-python" in stream.getvalue()
    names = sorted(path.name for path in wheel.parent.iterdir())
    assert names == [wheel.name, f"{wheel.name}.sha256"]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
    check = ["sha256sum", "--check", "--quiet", names[1]]
    subprocess.run(check, cwd=wheel.parent, check=True)


@pytest.mark.parametrize(
    ("place", "mode"), [("", 0o770), ("wheels", 0o777), ("work", 0o707), ("wheels/*", 0o777)]
)
def test_a_cache_that_others_can_write_is_refused(
    wheel: Path, tmp_path: Path, place: str, mode: int
) -> None:
    (tmp_path / "index" / f"{kit.ROOT}.tar.gz").unlink()
    (directory,) = (tmp_path / "cache").glob(place) if place else [tmp_path / "cache"]
    directory.chmod(mode)
    words = rf"{directory} can be written by others.*chmod -R go-w .*LLAMACPP_INSTR_CACHE"
    with pytest.raises(BuildError, match=words):
        build.build_wheel(stream=io.StringIO())
    directory.chmod(0o755)
    assert build.build_wheel(stream=io.StringIO()) == wheel


@pytest.mark.usefixtures("index")
def test_a_cache_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        build.build_wheel(stream=io.StringIO())
        build.build_wheel(stream=io.StringIO())
    finally:
        os.umask(before)
    for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o700, path


def test_everything_that_a_build_fetches_has_a_pin() -> None:
    lines = (REPOSITORY / "patches" / build.CONSTRAINTS).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"scikit-build-core", "packaging", "pathspec", "cmake", "ninja"} <= set(pins)
    assert all(version[0].isdigit() for version in pins.values())


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMACPP_INSTR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/llamacpp-instr")
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", "/own")
    assert cache_dir() == Path("/own")


def test_a_place_is_for_one_process_and_a_killed_ones_is_swept(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from llamacpp_instr.llama.build.wheel import workplace\n"
        f"with workplace(pathlib.Path({str(tmp_path)!r}), sys.argv[1], sys.stderr) as place:\n"
        "    (place / 'file').write_text('')\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
    )

    def start(name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, name], cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        return process

    with start("killed") as killed:
        killed.kill()
    assert (tmp_path / "work" / "killed" / "file").exists()

    class Said(io.StringIO):
        """Ends the process that holds the place once this one waits for it."""

        def write(self, text: str) -> int:
            assert mine.stdin is not None
            mine.stdin.close()
            return super().write(text)

    stream = Said()
    with start("mine") as mine, start("other") as other:
        assert not (tmp_path / "work" / "killed").exists(), "swept by the next one"
        with workplace(tmp_path, "mine", stream) as place:
            assert list(place.iterdir()) == []
            assert (tmp_path / "work" / "other" / "file").exists(), "in use: not swept"
        assert not place.exists()
        other.kill()
    assert stream.getvalue() == "waiting for another instr build\n"
