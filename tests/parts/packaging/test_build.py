"""`instr build`, end to end with pip on a tiny llama-cpp-python, and its pure parts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pip
import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import source_tree
from llamacpp_instr.llama.build import wheel as build
from llamacpp_instr.llama.build.log import (
    CPU_SECONDS,
    PORTABLE_CPU_SECONDS,
    BuildLog,
    BuildProgress,
    about,
    find_cause,
    parse_progress,
    remaining_seconds,
)
from llamacpp_instr.llama.build.source_tree import fetch_sdist
from tests.kit import sdist_kit as kit

REPOSITORY = Path(__file__).resolve().parents[3]


def content(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode()


@pytest.mark.native
def test_a_wheel_is_built_once_and_is_the_patched_one(index: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    wheel = build.build_wheel(cmake_args=["-DA=b c"], jobs=3, stream=stream)
    assert wheel.name == "llama_cpp_python-0.3.36+instr.7-py3-none-any.whl"
    assert content(wheel, "llama_cpp/lib/libllama.txt") == "one\ntwo\nthree\nfour\n"
    assert content(wheel, "llama_cpp/lib/llama-instrumentation.c") == "ours\n"
    assert "building llama-cpp-python 0.3.36+instr.7 (llama.cpp c0ffeec0) with 3 jobs" in (
        stream.getvalue()
    )
    assert "compiling: " in stream.getvalue()
    log = next((tmp_path / "cache" / "logs").glob("build-*.log")).read_text()
    assert "'-DA=b c'" in log
    assert not [path for path in (tmp_path / "cache" / "work").iterdir() if path.is_dir()]

    (index / f"{kit.ROOT}.tar.gz").unlink()
    stream = io.StringIO()
    assert build.build_wheel(cmake_args=["-DA=b c"], jobs=1, stream=stream) == wheel
    assert stream.getvalue() == "", "a cached build compiles nothing and says nothing"


@pytest.mark.native
def test_a_failed_compile_is_one_line_with_cause_and_log(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdist = kit.make_sdist(index, {"vendor/llama.cpp/src/llama.c": "#error out of tea"})
    patches = kit.make_patches(index, sdist, {})
    monkeypatch.setattr(build, "patches_dir", lambda: patches)
    with pytest.raises(BuildError) as caught:
        build.build_wheel(stream=io.StringIO())
    message = str(caught.value)
    assert "the build failed: llama.c:1:2: error: #error out of tea; the full log is" in message
    log = Path(message.rpartition(" ")[2])
    assert "#error out of tea" in log.read_text()
    assert "\n" not in message


@pytest.mark.native
def test_an_index_with_another_file_is_refused(index: Path, tmp_path: Path) -> None:
    sdist = index / f"{kit.ROOT}.tar.gz"
    kit.make_sdist(index, {"backend.py": "raise SystemExit('ran the code of a foreign sdist')\n"})
    log = BuildLog(tmp_path / "fetch.log")
    with pytest.raises(BuildError, match=r"has sha256 [0-9a-f]{64}, but .*UPSTREAM.toml:2 says"):
        fetch_sdist(tmp_path / "patches", tmp_path / "cache", log)
    assert "foreign" not in log.path.read_text(), "it must not be run before it is checked"
    sdist.unlink()
    with pytest.raises(BuildError, match=r"the package index has no llama-cpp-python==0.3.36"):
        fetch_sdist(tmp_path / "patches", tmp_path / "cache", log)


@pytest.mark.native
@pytest.mark.usefixtures("index")
def test_a_wheel_is_installed_once_and_again_when_damaged(tmp_path: Path) -> None:
    wheel = build.build_wheel(stream=io.StringIO())
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    # this environment's pip, and no other package of it
    (tmp_path / "pip only").mkdir()
    (tmp_path / "pip only" / "pip").symlink_to(Path(pip.__file__).parent)

    def run(code: str) -> str:
        path = f"{REPOSITORY}{os.pathsep}{tmp_path / 'pip only'}"
        environment = {**os.environ, "PYTHONPATH": path}
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        return asked.stdout.strip()

    install = (
        "import pathlib; from llamacpp_instr.llama.build.wheel import install_wheel as i;"
        f"print(i(pathlib.Path({str(wheel)!r})))"
    )
    assert run(install) == "True"
    assert run(install) == "False"
    assert run("import llama_cpp; print(llama_cpp.__version__)") == "0.3.36+instr.7"
    next((tmp_path / "venv").rglob("libllama.txt")).unlink()
    assert run(install) == "True"


@pytest.mark.native
def test_patches_are_checked_without_building(index: Path, tmp_path: Path) -> None:
    assert "applies cleanly to llama-cpp-python 0.3.36" in build.check_patches()
    (tmp_path / "patches" / "0001-count.patch").write_text(kit.PATCH.replace(" two", " deux"))
    with pytest.raises(BuildError, match=r"0001-count.patch does not apply.*src/llama.c:1"):
        build.check_patches()
    assert list((tmp_path / "cache" / "wheels").iterdir()) == []
    assert index.is_dir()


def test_the_key_changes_with_everything_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = kit.make_patches(tmp_path, kit.make_sdist(tmp_path))
    for name in ("CFLAGS", "CXX"):
        monkeypatch.delenv(name, raising=False)

    def key(*flags: str, patched: bool = True, native: bool = True) -> str:
        return build.wheel_key(build.wheel_inputs(patches, flags, patched=patched, native=native))

    keys = [key(), key("-DGGML_CUDA=ON"), key(patched=False), key(native=False)]
    monkeypatch.setenv("CFLAGS", "-O1")
    keys.append(key())
    monkeypatch.delenv("CFLAGS")
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'another compiler 1.0'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    keys.append(key())
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "cpu_identity", lambda: ["x86_64", "another CPU"])
    keys.append(key())
    assert key(native=False) == keys[3], "a portable wheel does not depend on this CPU"
    (patches / "series").write_text("")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler .*CXX=/no/such/compiler.*install g\+\+"
    ):
        build.require_tools()


def test_this_patch_set_is_found() -> None:
    assert source_tree.patches_dir() == REPOSITORY / "patches"


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("[1/4] Building C object x.o", 0.25),
        ("  [193/193] : && g++ -shared", 1.0),
        ("  [ 12%] Building CXX object", 0.12),
        ("[100%] Built target llama", 1.0),
        ("[0/2] Re-checking globbed directories...", None),
        ("-- [cmake] configuring", None),
        ("x.cpp:3: note: [1/4]", None),
    ],
)
def test_progress_is_read_from_ninja_and_make(line: str, share: float | None) -> None:
    assert parse_progress(line) == share


def test_an_estimate_starts_from_the_cores_and_ends_with_what_was_measured() -> None:
    def first_line(jobs: int, cpu_seconds: float = CPU_SECONDS) -> str:
        stream = io.StringIO()
        BuildProgress(stream, jobs, cpu_seconds).begin("x", Path("x.log"))
        return stream.getvalue().splitlines()[0]

    assert first_line(1) == "building x with 1 job: about 7 min"
    assert first_line(8) == "building x with 8 jobs: about 70 s"
    assert first_line(8, PORTABLE_CPU_SECONDS) == "building x with 8 jobs: about 2 min"
    assert remaining_seconds(0.01, 2, prior=100) == pytest.approx(100, rel=0.05)
    # a machine three times as slow as the prior: half of the build took 150 s
    assert 75 < remaining_seconds(0.5, 150, prior=100) < 150
    assert remaining_seconds(0.9, 270, prior=100) == pytest.approx(30, rel=0.1)
    assert remaining_seconds(1.0, 300, prior=100) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "about 10 s"), (44, "about 40 s"), (100, "about 2 min"), (420, "about 7 min")],
)
def test_a_duration_is_as_rough_as_it_is_known(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_progress_is_a_line_every_ten_seconds_without_a_terminal() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = BuildProgress(stream, jobs=2, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        progress.see(f"[{second + 1}/100] cc")
    assert [line[:15] for line in stream.getvalue().splitlines()] == [
        "compiling:   1%",
        "compiling:  11%",
        "compiling:  21%",
    ]


def test_progress_redraws_one_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = BuildProgress(stream, jobs=2)
    for step in (1, 2, 3):
        progress.see(f"[{step}/4] cc")
    progress.clear()
    assert stream.getvalue().count("\r\x1b[Kcompiling: ") == 3
    assert stream.getvalue().endswith("left\r\x1b[K")
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("x\n/t/ggml.c:3:1: error: expected ';'\nERROR: Failed building wheel", "expected ';'"),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "--jobs 1"),
        ("cc1plus: OSError: [Errno 28] No space left on device\n", "the disk is full"),
        ("error: externally-managed-environment\n", "virtual environment"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.\n", "apt install g++"),
        ("CMake Error at CMakeLists.txt:3 (message):\n", "CMake Error at CMakeLists.txt:3"),
        ("a.o: undefined reference to `llama_instr_abi'\n", "undefined reference to"),
        ("WARNING: ReadTimeout\n/t/a.c:1: error: x\n", "/t/a.c:1: error: x"),
        ("  CMake Error at a.txt:3 (message):\n", "CMake Error at a.txt:3 (message):"),
        ("NewConnectionError: no route\n", "cannot be reached"),
        ("  Could NOT find Vulkan (missing: Vulkan_LIBRARY glslc)\n", "libvulkan-dev glslc"),
        ('file provided by "SPIRV-Headers" with any', "spirv-headers"),
        (
            "x.cpp:5: error: \u2018LayerSettingEXT\u2019 is not a member of \u2018vk\u2019\n",
            "1.4.309",
        ),
        ("  CUDA Toolkit not found\n", "install the CUDA toolkit"),
        ("  BLAS not found, please refer to\n", "apt install libopenblas-dev"),
        ("ERROR: Could not find a version that satisfies the requirement x (from y)", "has no x;"),
        ("something\nelse\n\n", "else"),
        ("", "it printed nothing"),
    ],
)
def test_the_cause_of_a_failure_is_found(output: str, cause: str) -> None:
    assert cause in find_cause(output)
    assert "\n" not in find_cause(output)


def test_a_log_has_the_commands_and_what_they_printed(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "logs" / "a.log")
    seen: list[str] = []
    code = "import os; print(os.environ.get('A'), os.environ.get('HOME')); raise SystemExit(3)"
    environment = {"A": "1", "HOME": None}
    status, output = log.run([sys.executable, "-c", code], env=environment, on_line=seen.append)
    assert (status, output, seen) == (3, "1 None\n", ["1 None\n"])
    assert log.path.read_text().endswith("1 None\n# exit status 3\n")
    with pytest.raises(BuildError, match="cannot run /no/program: No such file"):
        log.run(["/no/program"])
