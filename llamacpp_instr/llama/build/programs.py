"""Builds llama.cpp's own programs from the patched tree, and finds those of this environment.

They bring libraries of their own, so they neither need nor change those that Python loads. The key
of a build is that of a wheel with the same inputs, so a build that is in the cache is not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.machine import cpu_identity, usable_cpus
from llamacpp_instr.base.system import pip
from llamacpp_instr.llama.build.log import BuildLog, BuildProgress
from llamacpp_instr.llama.build.source_tree import (
    VENDORED,
    fetch_sdist,
    make_tree,
    no_repository,
    patch_digest,
    patches_dir,
    read_upstream,
)
from llamacpp_instr.llama.build.wheel import (
    CONSTRAINTS,
    PORTABLE_ARGS,
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
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_EXAMPLES=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DGGML_RPC=ON",
)  # fmt: skip
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
    key = wheel_key({**inputs, "programs": [*PROGRAMS, *CMAKE_ARGS]})
    cache = own_cache()
    kept = cache / "programs" / key
    with workplace(cache, f"programs-{key}", stream) as work:
        if built_with(kept):
            return kept
        log = BuildLog(cache / "logs" / f"programs-{key}.log")
        progress = BuildProgress(stream, jobs or usable_cpus(), portable=portable)
        progress.begin(f"llama.cpp's programs ({upstream.commit[:8]})", log.path)
        about = {"patches": patch_digest(patches), "commit": upstream.commit}
        tree = make_tree(fetch_sdist(patches, cache, log), work, patches, log, patched=True)
        try:
            built = _compile(tree / VENDORED, work, flags, portable, progress, log)
        finally:
            progress.clear()
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(built, kept, symlinks=True, ignore=_others)
        (kept / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return kept


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
