"""Backends of ggml that the wheel has not, as modules that `GGML_BACKEND_PATH` names.

They are compiled from the patched source against the libraries of this environment, once for each
content of what they are made from.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.wheel import ccache_environment, wheel_key
from tests.kit.debian import unpack_newer
from tests.kit.native_kit import installed_library, locked, patched_tree, with_cmake

LAVAPIPE = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
"""Mesa's Vulkan device that computes on the CPU"""

HEADERS = Path("/usr/include/vulkan/vulkan_core.h")
_NEWER = "VkLayerSettingEXT"
"""a name that llama.cpp needs and Debian 12's headers have not"""


def has_openblas() -> bool:
    """Whether OpenBLAS is installed. In CI it is needed."""
    found = any(Path("/usr/include").glob("**/cblas.h"))
    return found or "CI" in os.environ


def has_vulkan() -> bool:
    """Whether Vulkan's tools and Mesa's device are installed. In CI they are needed."""
    found = shutil.which("glslc") is not None and LAVAPIPE.is_file()
    return found or "CI" in os.environ


needs_openblas = pytest.mark.skipif(not has_openblas(), reason="libopenblas-dev is not installed")
needs_vulkan = pytest.mark.skipif(
    not has_vulkan(), reason="glslc or Mesa's Vulkan drivers are not installed"
)


def compiled_backend(name: str, sources: Sequence[str], *flags: str) -> Path:
    """The library of a backend, from sources in `ggml/src/ggml-NAME`."""
    tree, library = patched_tree() / "ggml", installed_library()
    files = [tree / "src" / f"ggml-{name}" / source for source in sources]
    headers = sorted((tree / "include").glob("*.h"))
    texts = [path.read_text() for path in (*files, *headers)]
    key = wheel_key({"sources": texts, "tree": str(tree), "flags": flags})
    place = cache_dir() / "tests" / f"{name}-{wheel_key({'library': str(library)})}-{key}"
    module = place / f"libggml-{name}.so"
    with locked(place) as done:
        if not done:
            place.mkdir(parents=True)
            command = [
                os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread",
                *(f"-DGGML_{part}" for part in ("SHARED", "BACKEND_SHARED", "BACKEND_BUILD")),
                f"-I{tree / 'include'}", f"-I{tree / 'src'}", *map(str, files),
                "-o", str(module),
                f"-L{library}", "-l:libggml-base.so.0", f"-Wl,-rpath,{library}", *flags,
            ]  # fmt: skip
            subprocess.run(command, check=True)
    return module


@functools.cache
def blas_module() -> Path:
    """BLAS, with OpenBLAS."""
    return compiled_backend(
        "blas", ["ggml-blas.cpp"], "-DGGML_BACKEND_DL", "-DGGML_BLAS_USE_OPENBLAS", "-lopenblas"
    )


@functools.cache
def vulkan_module() -> Path:
    """Vulkan, with its shaders."""
    tree = patched_tree()
    folder = tree / "ggml" / "src" / "ggml-vulkan"
    parts = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    parts += sorted((tree / "ggml").glob("[is]*/*.h"))
    key = wheel_key({str(path.relative_to(tree)): path.read_text() for path in parts})
    place = cache_dir() / "tests" / f"vulkan-{key}"
    module = place / "libggml-vulkan.so"
    with locked(place) as done:
        if not done:
            _build_vulkan(tree, place, module)
    return module


def _build_vulkan(tree: Path, place: Path, module: Path) -> None:
    place.mkdir(parents=True)
    work = place / "work"
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON"]
    flags += ["-DGGML_CPU=OFF", "-DGGML_VULKAN=ON", "-DLLAMA_CURL=OFF"]
    parts = ("TESTS", "COMMON", "TOOLS", "EXAMPLES", "SERVER")
    flags += [*(f"-DLLAMA_BUILD_{part}=OFF" for part in parts), *vulkan_headers()]
    work.mkdir()
    env = {**with_cmake(), **ccache_environment(work, None)}
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(tree), "-B", str(work), *flags],
        ["cmake", "--build", str(work), "-j", str(usable_cpus()), "--target", "ggml-vulkan"],
    ):
        command[0] = shutil.which(command[0], path=env["PATH"]) or command[0]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    shutil.move(work / "bin" / module.name, module)
    shutil.rmtree(work)


@functools.cache
def vulkan_headers() -> list[str]:
    """Arguments for CMake: where the headers are, if those of this machine are too old."""
    if HEADERS.is_file() and _NEWER in HEADERS.read_text():
        return []
    place = cache_dir() / "tests" / "vulkan_headers"
    with locked(place) as done:
        if not done:
            unpack_newer("libvulkan-dev", place)
    return [f"-DVulkan_INCLUDE_DIR={place / 'usr/include'}"]


@functools.cache
def wheel_with_backends() -> Path:
    """The directory of a wheel with Vulkan and BLAS, by `instr build`."""
    wheels = cache_dir() / "tests" / "wheel_with_backends"
    backends = ("--backend", "vulkan", "--backend", "blas")
    arguments = f"--cmake-args={shlex.join(vulkan_headers())}"
    command = [sys.executable, "-m", "llamacpp_instr", "build", *backends, arguments]
    subprocess.run([*command, "--wheel-dir", wheels], check=True)
    return wheels


def vulkan_environment() -> dict[str, str]:
    """Variables with which ggml uses Mesa's device, which compiles shaders once."""
    return {
        "VK_DRIVER_FILES": str(LAVAPIPE),
        "VK_ICD_FILENAMES": str(LAVAPIPE),  # the same for older loaders
        "GGML_VK_VISIBLE_DEVICES": "0",  # devices of the type CPU are passed over otherwise
        "LP_NUM_THREADS": "0",
        "MESA_SHADER_CACHE_DIR": str(cache_dir() / "tests" / "mesa"),
    }


if __name__ == "__main__":  # before the tests, which it takes longer than
    wheel_with_backends()
