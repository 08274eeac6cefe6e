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
def ccache() -> str:
    beside = str(Path(sys.executable).parent)  # from the extra `test`
    found = shutil.which("ccache", path=os.pathsep.join([os.environ["PATH"], beside]))
    assert found is not None, "ccache is not installed"
    return found


def compiles(ccache: str, folder: Path, name: str, cpu: Sequence[str] | None) -> bool:
    """Whether a build below `folder/name` had to compile a file."""
    work = folder / name
    work.mkdir()
    (work / "one.c").write_text("int one(void) { return 1; }\n")
    log = work / "ccache.log"
    env = {
        **os.environ,
        **ccache_environment(work, cpu),
        "CCACHE_DIR": str(folder / "cache"),
        "CCACHE_LOGFILE": str(log),
    }
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run(
        [ccache, *compiler, "-march=native", "-c", work / "one.c", "-o", work / "one.o"],
        cwd=work, env=env, check=True,
    )  # fmt: skip
    found = log.read_text()
    assert ("cache_hit" in found) != ("cache_miss" in found)
    return "cache_miss" in found


def test_a_tree_in_another_place_compiles_nothing_again(ccache: str, tmp_path: Path) -> None:
    assert compiles(ccache, tmp_path, "first", EPYC)
    assert not compiles(ccache, tmp_path, "second", EPYC)


def test_the_users_language_changes_no_object(
    ccache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, language, compiled in (("first", "C", True), ("second", "C.UTF-8", False)):
        monkeypatch.setenv("LANG", language)
        assert compiles(ccache, tmp_path, name, EPYC) is compiled


def test_objects_for_another_cpu_are_not_used(ccache: str, tmp_path: Path) -> None:
    """ccache itself takes `-march=native` on two machines for the same."""
    assert compiles(ccache, tmp_path, "there", EPYC)
    assert compiles(ccache, tmp_path, "here", XEON)


def test_portable_objects_are_used_on_every_cpu(ccache: str, tmp_path: Path) -> None:
    assert compiles(ccache, tmp_path, "there", None)
    assert not compiles(ccache, tmp_path, "here", None)


def test_the_files_that_the_user_names_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CCACHE_EXTRAFILES", "/etc/hostname")
    found = ccache_environment(tmp_path, EPYC)["CCACHE_EXTRAFILES"]
    assert found.split(os.pathsep) == ["/etc/hostname", str(tmp_path / "cpu.json")]
