"""What a build tells ccache, with a real ccache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamacpp_instr.llama.build.wheel import ccache_environment

pytestmark = pytest.mark.native

EPYC, XEON = ["x86_64", "AMD EPYC", "avx512_bf16"], ["x86_64", "Intel Xeon", "amx_tile"]


@pytest.fixture
def path() -> str:
    beside = str(Path(sys.executable).parent)  # from the extra `test`
    found = os.pathsep.join([os.environ["PATH"], beside])
    assert shutil.which("ccache", path=found) is not None, "ccache is not installed"
    return found


def compiles(
    path: str,
    folder: Path,
    name: str,
    cpu: Sequence[str] | None,
    flags: str = "-march=native",
    starts: bool = True,
) -> bool:
    """Whether a build below `folder/name` had to compile a file."""
    work = folder / name
    work.mkdir()
    (work / "one.c").write_text("int one(void) { return 1; }\n")
    log = work / "ccache.log"
    env = {
        **os.environ,
        "PATH": path,
        **ccache_environment(work, cpu, path),
        "CCACHE_DIR": str(folder / "cache"),
        "CCACHE_LOGFILE": str(log),
    }
    if not starts:
        (work / "launcher" / "ccache").chmod(0o644)
    ccache = shutil.which("ccache", path=env["PATH"])
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run(
        [str(ccache), *compiler, *flags.split(), "-c", work / "one.c", "-o", work / "one.o"],
        cwd=work, env=env, check=True,
    )  # fmt: skip
    found = log.read_text()
    assert ("cache_hit" in found) != ("cache_miss" in found)
    return "cache_miss" in found


def test_a_tree_in_another_place_compiles_nothing_again(path: str, tmp_path: Path) -> None:
    assert compiles(path, tmp_path, "first", EPYC)
    assert not compiles(path, tmp_path, "second", EPYC)


def test_the_users_language_changes_no_object(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, language, compiled in (("first", "C", True), ("second", "C.UTF-8", False)):
        monkeypatch.setenv("LANG", language)
        assert compiles(path, tmp_path, name, EPYC) is compiled


@pytest.mark.parametrize("flags", ["-march=native", "-O2 -mtune=native -g"])
def test_objects_for_another_cpu_are_not_used(path: str, tmp_path: Path, flags: str) -> None:
    """ccache on its own treats `-march=native` as the same on two machines."""
    assert compiles(path, tmp_path, "there", EPYC, flags)
    assert compiles(path, tmp_path, "here", XEON, flags)


def test_where_no_script_can_start_every_object_depends_on_the_cpu(
    path: str, tmp_path: Path
) -> None:
    """For example on a disk that is mounted `noexec`."""
    for name, cpu in (("there", EPYC), ("here", XEON)):
        assert compiles(path, tmp_path, name, cpu, starts=False)


@pytest.mark.parametrize(("there", "here"), [(EPYC, XEON), (EPYC, None), (None, EPYC)])
def test_portable_objects_are_used_on_every_cpu_and_in_every_build(
    path: str, tmp_path: Path, there: list[str] | None, here: list[str] | None
) -> None:
    assert compiles(path, tmp_path, "there", there, "-O2 -mavx2")
    assert not compiles(path, tmp_path, "here", here, "-O2 -mavx2")


def test_the_files_that_the_user_names_count_too(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    monkeypatch.setenv("CCACHE_EXTRAFILES", str(named))
    for name, text, compiled in (("a", "1", True), ("b", "1", False), ("c", "2", True)):
        named.write_text(text)
        assert compiles(path, tmp_path, name, EPYC) is compiled


def test_without_ccache_nothing_stands_in_for_it(tmp_path: Path) -> None:
    assert "PATH" not in ccache_environment(tmp_path, EPYC, str(tmp_path))
