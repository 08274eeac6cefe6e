"""macOS without a Mac. Zig compiles and links the patched llama.cpp; Metal and
Accelerate cannot be had here, and none of it was ever run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.llama.build.programs import CMAKE_ARGS
from tests.kit.macos import ARM, CCACHE, INTEL, flags
from tests.kit.native_kit import built_for
from tests.programs.lint_native import configured, own_files, patched_files

pytestmark = pytest.mark.native

MACH_O = b"\xcf\xfa\xed\xfe"
"""the first bytes of a program or library of 64 bits"""

NOTHING_LINKS = "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY"
"""spares CMake's tests Zig's own C++ library, which takes a minute to compile"""


@pytest.fixture(autouse=True)
def _ccache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CCACHE.items():
        monkeypatch.setenv(name, value)


def warnings(target: str, files: list[str], place: Path) -> str:
    tree = configured(place, (*flags(target), NOTHING_LINKS))
    with ThreadPoolExecutor(usable_cpus()) as pool:
        return "".join(pool.map(tree.warnings, files))


def test_the_recorder_compiles_without_a_warning(tmp_path: Path) -> None:
    """So does what the patches change in the library."""
    patched = [file for file in patched_files() if file.startswith(("ggml/", "src/"))]
    assert warnings(ARM, own_files() + patched, tmp_path) == ""


def test_the_recorder_compiles_for_intel(tmp_path: Path) -> None:
    assert warnings(INTEL, own_files(), tmp_path) == ""


def test_the_library_and_a_server_link() -> None:
    """Whatever they call is in one of them or in macOS: this takes minutes."""
    made = built_for("macos", (*CMAKE_ARGS, *flags(ARM)), ("llama", "llama-server"))
    for name, calls in (
        ("libggml-base.dylib", b"_clock_gettime_nsec_np"),
        ("libllama.dylib", b"_mach_absolute_time"),
        ("libllama-server-impl.dylib", b"_llama_instr_mark"),
    ):
        content = (made / name).read_bytes()
        assert content.startswith(MACH_O)
        assert calls in content
