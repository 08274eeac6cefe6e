"""`instr build --programs`, with stand-ins for CMake and ninja: what is compiled, and what is taken
from the wheel. `tests/parts/programs/test_llama_programs.py` runs the real programs."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import programs
from llamacpp_instr.llama.build.source_tree import patch_digest
from llamacpp_instr.llama.build.wheel import build_wheel

pytestmark = pytest.mark.native

CMAKE = """\
#!/bin/sh
while [ "$1" != -S ]; do shift; done
source=$2 build=$4
cat $source/src/CMakeLists.txt $source/tools/mtmd/CMakeLists.txt > $build/bin/llama-bench
"""
"""writes the files that it gets into a program"""

NINJA = """\
#!/bin/sh
echo "[1/2] c++"
touch $2/bin/llama-server $2/bin/test-something
[ ! -e {place}/broken ] || {{ echo "ld: undefined reference to 'llama_x'"; exit 1; }}
echo "[2/2] link"
"""


@pytest.fixture
def place(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an index, a patch set, and the stand-ins first in PATH."""
    place = index.parent
    tools = place / "tools"
    tools.mkdir()
    for name, script in (("cmake", CMAKE), ("ninja", NINJA.format(place=place))):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), os.environ["PATH"]]))
    monkeypatch.setattr(programs, "patches_dir", lambda: place / "patches")
    return place


def test_programs_are_built_once_with_the_libraries_of_the_wheel(place: Path) -> None:
    stream = io.StringIO()
    built = programs.build_programs(jobs=2, stream=stream)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("building")]
    assert lines == [
        "building llama-cpp-python 0.3.36+instr.7 (llama.cpp c0ffeec0) with 2 jobs: about 4 min",
        "building llama.cpp's programs (c0ffeec0) with 2 jobs: about 4 min",
    ]
    names = {path.name for path in built.iterdir()}
    assert {"llama-server", "llama-bench", "libllama.txt", "build.json"} <= names
    assert "test-something" not in names
    assert (built / "libllama.txt").read_text() == "one\ntwo\nthree\nfour\n", "as in the wheel"
    assert programs.built_with(built) == patch_digest(place / "patches")

    shutil.rmtree(place / "cache" / "wheels")
    (place / "tools" / "cmake").write_text("#!/bin/sh\nexit 1\n")
    stream = io.StringIO()
    assert programs.build_programs(stream=stream) == built
    assert stream.getvalue() == "", "a cached build compiles nothing and says nothing"


def test_a_wheel_that_is_in_the_cache_is_used(place: Path) -> None:
    build_wheel(cmake_args=["-DA=1"], stream=io.StringIO())
    shutil.rmtree(place / "index")
    stream = io.StringIO()
    programs.build_programs(cmake_args=["-DA=1"], stream=stream)
    assert "llama-cpp-python" not in stream.getvalue()


@pytest.fixture
def has_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds no wheel: there is one, without mtmd."""
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("ggml", "llama"):
            archive.writestr(f"llama_cpp/lib/lib{name}.so", name)
    monkeypatch.setattr(programs, "build_wheel", lambda **_: wheel)


@pytest.mark.usefixtures("place", "has_wheel")
def test_only_a_library_that_the_wheel_lacks_is_compiled() -> None:
    built = programs.build_programs(stream=io.StringIO())
    assert (built / "llama-bench").read_text() == "ours for src\ntheirs for tools/mtmd\n"


@pytest.mark.usefixtures("has_wheel")
def test_other_files_of_cmake_make_another_build(place: Path) -> None:
    built = programs.build_programs(stream=io.StringIO())
    (place / "patches" / "programs" / "src" / "CMakeLists.txt").write_text("ours, changed\n")
    changed = programs.build_programs(stream=io.StringIO())
    assert changed != built
    assert (changed / "llama-bench").read_text().startswith("ours, changed\n")


def test_a_library_that_moved_in_llama_cpp_is_one_line(place: Path) -> None:
    (place / "bin").mkdir()
    (place / "bin" / "libggml.so").touch()
    with pytest.raises(BuildError, match=r"programs/ggml/CMakeLists.txt: llama.cpp has no such"):
        programs.take_libraries(place, place / "bin", place / "patches")


@pytest.mark.usefixtures("has_wheel")
def test_a_failed_build_is_one_line_and_leaves_nothing(place: Path) -> None:
    (place / "broken").touch()
    with pytest.raises(BuildError) as caught:
        programs.build_programs(stream=io.StringIO())
    message = str(caught.value)
    assert "the build failed: undefined reference to 'llama_x'; the full log is" in message
    assert "\n" not in message
    assert not list((place / "cache" / "programs").iterdir())


def test_the_names_of_a_library_are_links_to_one_file(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("libggml.so", "libggml.so.0", "libggml.so.0.25.3"):
            archive.writestr(f"llama_cpp/lib/{name}", "ggml")
        archive.writestr("llama_cpp/lib/libggml-cpu-haswell.so", "haswell")
        archive.writestr("llama_cpp/lib/__init__.py", "")
        archive.writestr("llama_cpp/library.py", "")
    into = tmp_path / "build" / "bin"
    programs.unpack_libraries(wheel, into)
    assert {path.name for path in into.iterdir() if not path.is_symlink()} == {
        "libggml.so.0.25.3", "libggml-cpu-haswell.so",
    }  # fmt: skip
    links = {path.name: str(path.readlink()) for path in into.iterdir() if path.is_symlink()}
    assert links == dict.fromkeys(("libggml.so", "libggml.so.0"), "libggml.so.0.25.3")
    assert (into / "libggml.so").read_text() == "ggml"


def test_an_installation_is_renewed_only_for_another_build(tmp_path: Path) -> None:
    built, installed = tmp_path / "0123", tmp_path / "installed"
    built.mkdir()
    (built / "libllama.so.0").write_text("llama")
    (built / "libllama.so").symlink_to("libllama.so.0")
    assert programs.install_programs(built, installed)
    assert (installed / "libllama.so").is_symlink()
    assert not programs.install_programs(built, installed)
    assert programs.install_programs(built.rename(tmp_path / "4567"), installed)
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"file/programs: Not a directory"):
        programs.install_programs(tmp_path / "4567", tmp_path / "file" / "programs")
