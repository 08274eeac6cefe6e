"""CUDA without a GPU: NVIDIA's compiler from wheels; stand-ins for a device and for libcupti."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.wheel import wheel_key
from tests.kit.device_logs import DeviceSession, record_on
from tests.kit.native_kit import (
    DEMO,
    ROOT,
    WITHOUT_PROGRAMS,
    installed_library,
    locked,
    patched_tree,
    with_cmake,
)

STANDIN = ROOT / "tests" / "native" / "standin"


def toolkit() -> Path:
    """The files of NVIDIA's wheels, which `make test-all PARTS=cuda` installs."""
    found = sorted((ROOT / ".venv-cuda").glob("lib/python*/site-packages/nvidia/cu13"))
    assert found, "NVIDIA's compiler is missing: make test-all PARTS=cuda installs it"
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


def compile_backend(work: Path) -> tuple[str, float]:
    """Compile what the patch changes and adds, with llama.cpp's own CMake and its warnings, for
    sm_80 and sm_90. Returns what the compiler says, and the CPU seconds of all."""
    cuda, root = toolkit(), work / "toolkit"
    # as an installed toolkit is, with names that a linker looks for
    (root / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (root / name).symlink_to(cuda / name)
    for library in (cuda / "lib").iterdir():
        name = library.name.partition(".so")[0] + ".so" if ".so." in library.name else library.name
        (root / "lib64" / name).symlink_to(library)
    flags = ["-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU=OFF", "-DGGML_CUDA=ON"]
    flags += ["-DGGML_CUDA_NO_VMM=ON", "-DGGML_CUDA_NCCL=OFF", "-DGGML_CCACHE=OFF"]
    flags += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CUDA_ARCHITECTURES=80-real;90-real"]
    flags += [f"-DCUDAToolkit_ROOT={root}", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
    flags += WITHOUT_PROGRAMS
    folder = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir"
    objects = [f"{folder}/{name}.cu.o" for name in ("ggml-cuda", "ggml-cuda-instrumentation")]
    env = with_cmake()
    env |= {"CUDACXX": str(root / "bin" / "nvcc"), "LIBRARY_PATH": str(root / "lib64")}
    before = os.times()
    _run(["cmake", "-G", "Ninja", "-S", str(patched_tree()), "-B", str(work), *flags], env)
    printed = _run(["ninja", "-C", str(work), "-j1", "--quiet", *objects], env)
    after = os.times()
    spent = after.children_user + after.children_system
    return printed, spent - before.children_user - before.children_system


def _run(command: list[str], env: Mapping[str, str]) -> str:
    command[0] = shutil.which(command[0], path=env["PATH"]) or command[0]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def record_with(
    log: Path, asked: str = "", *, cupti: Path | None = None, level: str = "detailed",
    contexts: int = 1, environment: Mapping[str, str] | None = None,
) -> DeviceSession:  # fmt: skip
    """Record a session of the demo model on the stand-ins. `asked` lists what else they do (see
    `tests/native/standin`), and `cupti` the folder of another libcupti."""
    folder = standin()
    searched = [str(cupti or folder / "cupti"), os.environ.get("LD_LIBRARY_PATH", "")]
    return record_on(
        [folder / "libggml-cuda.so"], log, DEMO, level=level, contexts=contexts,
        environment={
            "STANDIN_CUDA": asked, "LD_LIBRARY_PATH": ":".join(filter(None, searched)),
            **(environment or {}),
        },
    )  # fmt: skip
