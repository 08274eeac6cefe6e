"""CUDA without a GPU: NVIDIA's compiler from wheels; stand-ins for a device and for libcupti."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.wheel import wheel_key
from tests.kit.device_logs import DeviceSession, record_on
from tests.kit.native_kit import DEMO, ROOT, installed_library, locked, patched_tree

STANDIN = ROOT / "tests" / "native" / "standin"


def toolkit() -> Path:
    """The files of NVIDIA's wheels, which `make test-cuda` installs."""
    found = sorted((ROOT / ".venv-cuda").glob("lib/python*/site-packages/nvidia/cu13"))
    assert found, "NVIDIA's compiler is missing: make test-cuda installs it"
    return found[0]


@functools.cache
def standin(*, old: bool = False) -> Path:
    """The folder of the stand-ins: `libggml-cuda.so`, with the recorder's own file, and in `cupti`
    `libcupti.so.13`, or an older version without the function that sets its clock."""
    tree, library = patched_tree() / "ggml", installed_library()
    recorder = tree / "src" / "ggml-cuda" / "ggml-cuda-instrumentation.cu"
    texts = [path.read_text() for path in (recorder, *sorted(STANDIN.iterdir()))]
    key = wheel_key({"sources": texts, "tree": str(tree), "library": str(library), "old": old})
    place = cache_dir() / "tests" / f"{'older' if old else 'standin'}-{key}"
    driver = place / "libstandin-driver.so"
    cupti = place / "cupti" / "libcupti.so.13"
    linked = [f"-L{place}", "-lstandin-driver", f"-Wl,-rpath,{place}"]
    ggml = [f"-I{tree / 'include'}", f"-I{tree / 'src'}"]
    with locked(place) as done:
        if not done:
            cupti.parent.mkdir(parents=True)
            _link(driver, [STANDIN / "driver.cpp"])
            _link(cupti, [STANDIN / "cupti.cpp", *linked, *(["-DOLD"] if old else [])])
            _link(
                place / "libggml-cuda.so",
                [STANDIN / "cuda.cpp", recorder, *ggml, *linked, "-DGGML_BACKEND_DL",
                 *(f"-DGGML_{part}" for part in ("SHARED", "BACKEND_SHARED", "BACKEND_BUILD")),
                 f"-L{library}", "-l:libggml-base.so.0", "-l:libggml-cpu.so.0",
                 "-l:libggml.so.0", f"-Wl,-rpath,{library}"],
            )  # fmt: skip
    return place


def _link(library: Path, parts: list[Path | str]) -> None:
    command = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-g", "-O1", "-shared", "-fPIC", "-pthread",
        "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", f"-I{STANDIN}",
        f"-isystem{toolkit() / 'include'}", "-x", "c++",
        *map(str, parts), "-o", str(library),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def compile_for(architecture: str, source: str, into: Path) -> tuple[str, float]:
    """What the compiler says about a file of `ggml-cuda`, for a GPU such as `sm_90`, and the CPU
    seconds that it took."""
    tree, cuda = patched_tree() / "ggml" / "src", toolkit()
    # those of llama.cpp's CMake, and its warnings
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wcast-qual", "-Wno-unused-function"]
    warnings += ["-Wmissing-declarations", "-Wmissing-noreturn", "-Wno-array-bounds"]
    warnings += ["-Wextra-semi", "-Wno-pedantic"]
    command = [
        str(cuda / "bin" / "nvcc"), "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda",
        f"-arch={architecture}", "-DGGML_CUDA_USE_GRAPHS", "-DGGML_CUDA_NO_VMM",
        f"-Xcompiler=-fPIC,{','.join(warnings)}", f"-isystem={cuda / 'include'}",
        f"-isystem={cuda / 'include' / 'cccl'}", f"-I{tree}", f"-I{tree.parent / 'include'}",
        "-c", str(tree / "ggml-cuda" / source), "-o", str(into / f"{source}-{architecture}.o"),
    ]  # fmt: skip
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    return done.stdout + done.stderr, spent


def record_with(
    log: Path, asked: str = "", *, cupti: Path | None = None, level: str = "detailed",
    contexts: int = 1, environment: Mapping[str, str] | None = None,
) -> DeviceSession:  # fmt: skip
    """Record a session of the demo model on the stand-ins. `asked` names what they do beside the
    usual (see `tests/native/standin`), and `cupti` the folder of another libcupti."""
    folder = standin()
    searched = [str(cupti or folder / "cupti"), os.environ.get("LD_LIBRARY_PATH", "")]
    return record_on(
        [folder / "libggml-cuda.so"], log, DEMO, level=level, contexts=contexts,
        environment={
            "STANDIN_CUDA": asked, "LD_LIBRARY_PATH": ":".join(filter(None, searched)),
            **(environment or {}),
        },
    )  # fmt: skip
