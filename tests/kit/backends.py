"""Backends of ggml that the wheel lacks, as modules that `GGML_BACKEND_PATH` names.

They are compiled from the patched source against the libraries of this environment, once for each
content of what they are made from.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.wheel import wheel_key
from tests.kit.debian import unpack_newer
from tests.kit.native_kit import installed_library, locked, patched_tree

LAVAPIPE = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
"""Mesa's Vulkan device that computes on the CPU"""

HEADERS = Path("/usr/include/vulkan/vulkan_core.h")
_NEWER = "VkLayerSettingEXT"
"""a name that llama.cpp needs and Debian 12's headers do not have"""

REGISTERED = Path(__file__).parent / "vulkan_module.cpp"


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
            _compile(module, files, "-DGGML_BACKEND_BUILD", f"-Wl,-rpath,{library}", *flags)
    return module


def _compile(module: Path, files: Sequence[Path], *flags: str) -> None:
    tree, library = patched_tree() / "ggml", installed_library()
    command = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread",
        "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", f"-I{tree / 'include'}", f"-I{tree / 'src'}",
        *map(str, files), "-o", str(module), f"-L{library}", "-l:libggml-base.so.0", *flags,
    ]  # fmt: skip
    subprocess.run(command, check=True)


@functools.cache
def blas_module() -> Path:
    """BLAS, with OpenBLAS."""
    return compiled_backend(
        "blas", ["ggml-blas.cpp"], "-DGGML_BACKEND_DL", "-DGGML_BLAS_USE_OPENBLAS", "-lopenblas"
    )


@functools.cache
def vulkan_module() -> Path:
    """Vulkan, with its shaders: the library of a wheel, and a module that registers it."""
    tree = patched_tree()
    folder = tree / "ggml" / "src" / "ggml-vulkan"
    parts = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    parts += sorted((tree / "ggml").glob("[is]*/*.h"))
    texts = {str(path.relative_to(tree)): path.read_text() for path in parts}
    key = wheel_key({**texts, REGISTERED.name: REGISTERED.read_text()})
    place = cache_dir() / "tests" / f"vulkan-{key}"
    module = place / "libggml-vulkan.so"
    with locked(place) as done:
        if not done:
            (wheel,) = wheel_with_backends().glob("*.whl")
            place.mkdir(parents=True)
            library = place / "libggml-vulkan.so.0"
            with zipfile.ZipFile(wheel) as archive:
                library.write_bytes(archive.read(f"llama_cpp/lib/{library.name}"))
            _compile(module, [REGISTERED], f"-L{place}", f"-l:{library.name}", "-Wl,-rpath,$ORIGIN")
    return module


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
    """The directory of a wheel by `instr build` with Vulkan and OpenBLAS."""
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
        "GGML_VK_VISIBLE_DEVICES": "0",  # devices of the type CPU are skipped otherwise
        "LP_NUM_THREADS": "0",
        "MESA_SHADER_CACHE_DIR": str(cache_dir() / "tests" / "mesa"),
    }


if __name__ == "__main__":  # before the tests: it takes longer than they do
    wheel_with_backends()
