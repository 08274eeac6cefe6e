"""Builds llama.cpp's own programs from the patched tree, and finds those of this environment.

They are linked to the libraries of the wheel with the same flags, so llama.cpp is compiled once.
They bring copies of these, so they neither need nor change those that Python loads. The key of a
build is that of a wheel with the same inputs, so a build that is in the cache is not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.machine import IS_MAC, cpu_identity, usable_cpus
from llamacpp_instr.base.system import pip
from llamacpp_instr.llama.build.log import PROGRAMS_CPU_SECONDS, BuildLog, BuildProgress
from llamacpp_instr.llama.build.source_tree import (
    VENDORED,
    fetch_sdist,
    make_tree,
    no_repository,
    patch_digest,
    patches_dir,
    read_upstream,
    sha256_of,
)
from llamacpp_instr.llama.build.wheel import (
    CONSTRAINTS,
    PORTABLE_ARGS,
    build_wheel,
    ccache_environment,
    own_cache,
    require_tools,
    wheel_inputs,
    wheel_key,
    workplace,
)

PROGRAMS = (
    "llama-server", "llama-cli", "llama-bench", "llama-perplexity", "llama-imatrix",
    "llama-batched-bench", "llama-speculative-simple", "ggml-rpc-server",
)  # fmt: skip
# llama-server's page and OpenSSL would have to be fetched
CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if IS_MAC else '$ORIGIN'}",
    "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_EXAMPLES=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DGGML_RPC=ON",
)  # fmt: skip
FROM_WHEEL = {"ggml": "ggml", "src": "llama", "tools/mtmd": "mtmd"}
"""folders of llama.cpp, and the library of the wheel that is not compiled from them again: the
folder `programs` of the patches has CMake files that take the place of theirs"""
_ABOUT = "build.json"
"""beside the programs, written last: the digest of the patches that they were built with"""


def programs_dir() -> Path:
    """Where this environment has the programs."""
    return Path(sys.prefix) / "libexec" / "llamacpp-instr"


def find_program(name: str) -> Path | None:
    """The program of this environment with that name, None if it has none."""
    path = programs_dir() / name
    return path if name in PROGRAMS and built_with(programs_dir()) and path.is_file() else None


def installed_programs(patches: str) -> list[str]:
    """The programs of this environment, if they were built with the patches of that digest."""
    if built_with(programs_dir()) != patches:
        return []
    return [name for name in PROGRAMS if find_program(name)]


def built_with(directory: Path) -> str:
    """The digest of the patches that the programs in `directory` were built with, empty if there
    are none or the build is not complete."""
    try:
        return str(json.loads((directory / _ABOUT).read_text(encoding="utf-8"))["patches"])
    except (OSError, ValueError, KeyError):
        return ""


def build_programs(
    *,
    portable: bool = False,
    cmake_args: Sequence[str] = (),
    jobs: int | None = None,
    stream: TextIO = sys.stderr,
) -> Path:
    """The directory in the cache that has the programs, built unless they are there; progress goes
    to `stream`. The arguments are those of `build_wheel`. Raises BuildError, which names the
    log."""
    patches = patches_dir()
    upstream = read_upstream(patches)
    flags = (*(PORTABLE_ARGS if portable else ()), *cmake_args)
    require_tools()
    inputs = wheel_inputs(patches, flags, patched=True, native=not portable)
    linked = [sha256_of(file) for file in _cmake_files(patches).values()]
    key = wheel_key({**inputs, "programs": [*PROGRAMS, *CMAKE_ARGS], "linked": linked})
    cache = own_cache()
    kept = cache / "programs" / key
    with workplace(cache, f"programs-{key}", stream) as work:
        if built_with(kept):
            return kept
        wheel = build_wheel(portable=portable, cmake_args=cmake_args, jobs=jobs, stream=stream)
        log = BuildLog(cache / "logs" / f"programs-{key}.log")
        progress = BuildProgress(stream, jobs or usable_cpus(), PROGRAMS_CPU_SECONDS)
        progress.begin(f"llama.cpp's programs ({upstream.commit[:8]})", log.path)
        about = {"patches": patch_digest(patches), "commit": upstream.commit}
        tree = make_tree(fetch_sdist(patches, cache, log), work, patches, log, patched=True)
        unpack_libraries(wheel, work / "build" / "bin")
        take_libraries(tree / VENDORED, work / "build" / "bin", patches)
        try:
            built = _compile(tree / VENDORED, work, flags, portable, progress, log)
        finally:
            progress.clear()
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(built, kept, symlinks=True, ignore=_others)
        (kept / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return kept


def unpack_libraries(wheel: Path, into: Path) -> None:
    """Write the libraries of a wheel to the new directory `into`. A wheel has a copy for each name
    of a library; here the other names are links to one file."""
    into.mkdir(parents=True)
    names: dict[tuple[int, int], str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.infolist(), key=lambda member: -len(member.filename)):
            folder, _, name = member.filename.rpartition("/")
            if folder != "llama_cpp/lib" or not name.startswith("lib"):
                continue
            first = names.setdefault((member.CRC, member.file_size), name)
            if first == name:
                (into / name).write_bytes(archive.read(member))
            else:
                (into / name).symlink_to(first)


def take_libraries(source: Path, libraries: Path, patches: Path) -> None:
    """Change the tree `source` of llama.cpp so that its CMake takes what is in `libraries`; it
    compiles a library that is not there. Raises BuildError if the tree has no file to replace."""
    for folder, file in _cmake_files(patches).items():
        if any(libraries.glob(f"lib{FROM_WHEEL[folder]}.*")):
            if not (source / folder / file.name).is_file():
                raise BuildError(f"{file}: llama.cpp has no such file that this could replace")
            shutil.copyfile(file, source / folder / file.name)


def _cmake_files(patches: Path) -> dict[str, Path]:
    return {folder: patches / "programs" / folder / "CMakeLists.txt" for folder in FROM_WHEEL}


def install_programs(built: Path, place: Path) -> bool:
    """Copy the programs to `place`. Returns False if they are there already. Raises BuildError if
    they cannot be written."""
    try:
        if (place / "key").is_file() and (place / "key").read_text() == built.name:
            return False
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(built, place, symlinks=True)
        (place / "key").write_text(built.name)
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror}") from None
    return True


def _compile(
    source: Path,
    work: Path,
    flags: Sequence[str],
    portable: bool,
    progress: BuildProgress,
    log: BuildLog,
) -> Path:
    """Build the programs; returns the directory that has them and their libraries."""
    build = work / "build"
    commit = read_upstream(patches_dir()).commit[:12]
    tools = _tools(work, log)
    cpu = None if portable else cpu_identity()
    env = {**no_repository(source), **tools, **ccache_environment(work, cpu, tools["PATH"])}
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), *CMAKE_ARGS]
    named = [f"-DLLAMA_BUILD_COMMIT={commit}", "-DLLAMA_BUILD_NUMBER=0", *flags]
    compile_ = ["ninja", "-C", str(build), "-j", str(progress.jobs), *PROGRAMS]
    for command in ([*configure, *named], compile_):
        status, output = log.run(command, env=env, on_line=progress.see)
        if status != 0:
            raise log.failure("the build failed", output)
    return build / "bin"


def _tools(work: Path, log: BuildLog) -> dict[str, str]:
    """A PATH with CMake and ninja, which pip fetches where they are missing."""
    path = os.environ.get("PATH", "")
    if all(shutil.which(tool) for tool in ("cmake", "ninja")):
        return {"PATH": path}
    target = work / "tools"
    options = ("--target", str(target), "-c", str(patches_dir() / CONSTRAINTS))
    status, output = log.run(pip("install", *options, "cmake", "ninja"))
    if status != 0:
        raise log.failure("pip could not fetch cmake and ninja", output)
    return {"PATH": os.pathsep.join([str(target / "bin"), path]), "PYTHONPATH": str(target)}


def _others(_directory: str, names: list[str]) -> set[str]:
    """What is in the directory besides the programs and libraries."""
    return {name for name in names if name not in PROGRAMS and not name.startswith("lib")}
