"""Builds and installs llama-cpp-python with our patches, and caches the wheels.

The cache key of a wheel is the digest of everything that its content depends on: the sdist, the
patches, the flags, the compilers, the platform, and the CPU if kernels are compiled for it.

Wheels in the cache are installed, so no other user may write there. A wheel is valid only with its
digest, which is written last.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from llamacpp_instr.base.errors import BuildError, reason
from llamacpp_instr.base.machine import INSTALL_COMPILER, cpu_identity, usable_cpus
from llamacpp_instr.base.system import cache_dir, pip
from llamacpp_instr.llama.build.log import (
    CPU_SECONDS,
    PORTABLE_CPU_SECONDS,
    BuildLog,
    BuildProgress,
)
from llamacpp_instr.llama.build.source_tree import (
    concerns_wheel,
    fetch_sdist,
    make_tree,
    no_repository,
    patch_digest,
    patches_dir,
    read_series,
    read_upstream,
    sha256_of,
)

# Compiles no kernel for this machine's CPU alone; ggml loads the best variant at run time.
PORTABLE_ARGS = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON")

CONSTRAINTS = "build-constraints.txt"
"""in the folder of the patches: the versions that the isolated build may fetch"""

_FLAG_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS")


def own_cache() -> Path:
    """`cache_dir()`, created if necessary. Raises BuildError if other users can write to it or to
    a file in it."""
    cache = cache_dir()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        for name in ("", "converters", "imports", "logs", "programs", "sdist", "wheels", "work"):
            _own_directory(cache / name)
    except OSError as error:
        raise _unusable(error, cache) from None
    return cache


def kept_wheel(cache: Path, key: str) -> Path | None:
    """The wheel of a key, if the cache has it and its digest is right; else None."""
    place = cache / "wheels" / key
    if place.is_dir():
        _own_directory(place)
    for wheel in place.glob("*.whl"):
        digest, line = _digest_of(wheel)
        if digest.is_file() and digest.read_text(encoding="utf-8") == line:
            return wheel
    return None


def keep_wheel(cache: Path, key: str, wheel: Path) -> Path:
    """Move a wheel into the cache, replacing an existing one; returns its new path."""
    place = cache / "wheels" / key
    shutil.rmtree(place, ignore_errors=True)
    _own_directory(place)
    kept = wheel.replace(place / wheel.name)
    digest, line = _digest_of(kept)
    digest.write_text(line, encoding="utf-8")
    return kept


def _digest_of(wheel: Path) -> tuple[Path, str]:
    """The file with the digest, and what is in it: a line in the format of `sha256sum`."""
    return wheel.with_name(f"{wheel.name}.sha256"), f"{sha256_of(wheel)}  {wheel.name}\n"


def _own_directory(path: Path) -> None:
    """Create a private directory. Raises BuildError for one that others can write to."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        problem, remedy = "belongs to another user", "set"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem, remedy = "can be written by others", f"run: chmod -R go-w {path}; or set"
    else:
        return
    raise BuildError(
        f"{path} {problem}, who could change what is installed from there; {remedy} "
        "LLAMACPP_INSTR_CACHE to a directory of your own"
    )


def _unusable(error: OSError, cache: Path) -> BuildError:
    return BuildError(
        f"{error.filename or cache}: {error.strerror}; make it usable or set LLAMACPP_INSTR_CACHE "
        "to a writable directory"
    )


@contextmanager
def workplace(cache: Path, name: str, stream: TextIO) -> Iterator[Path]:
    """An empty directory below `cache`, removed afterwards. If another process uses it, prints a
    line to `stream` and waits. Raises BuildError if the disk is full or the cache cannot be
    written.

    A lock belongs to a process and is released when that process ends. So a directory whose lock is
    free is left from a killed build, and is removed.
    """
    place = cache / "work" / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another instr build", file=stream, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in filter(Path.is_dir, place.parent.iterdir()):
                held = left.with_name(f"{left.name}.lock")
                with held.open("w") as other, suppress(BlockingIOError):
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise _unusable(error, cache) from None


def build_wheel(
    *,
    portable: bool = False,
    cmake_args: Sequence[str] = (),
    jobs: int | None = None,
    stream: TextIO = sys.stderr,
) -> Path:
    """Path of the wheel of llama-cpp-python, built unless it is cached; progress goes to `stream`.

    `cmake_args` are further arguments for CMake (`-DNAME=VALUE`), after those of the variable
    CMAKE_ARGS. `jobs` defaults to the number of usable CPUs. Raises BuildError, which names the
    log."""
    patches = patches_dir()
    upstream = read_upstream(patches)
    flags = (*(PORTABLE_ARGS if portable else ()), *cmake_args)
    require_tools()
    key = wheel_key(wheel_inputs(patches, flags, patched=True, native=not portable))
    cache = own_cache()
    if (kept := kept_wheel(cache, key)) is not None:
        return kept
    with workplace(cache, key, stream) as work:
        # the process that we waited for may have built the same wheel
        if (kept := kept_wheel(cache, key)) is not None:
            return kept
        name = f"llama-cpp-python {upstream.wheel_version}"
        log = BuildLog(cache / "logs" / f"build-{key}.log")
        cpu_seconds = PORTABLE_CPU_SECONDS if portable else CPU_SECONDS
        progress = BuildProgress(stream, jobs or usable_cpus(), cpu_seconds)
        progress.begin(f"{name} (llama.cpp {upstream.commit[:8]})", log.path)
        sdist = fetch_sdist(patches, cache, log)
        tree = make_tree(sdist, work, patches, log, patched=True)
        cpu = None if portable else cpu_identity()
        try:
            wheel = _compile(tree, work, flags, cpu, progress, log)
        finally:
            progress.clear()
        return keep_wheel(cache, key, wheel)


def install_wheel(wheel: Path, stream: TextIO = sys.stderr) -> bool:
    """Install `wheel` in this environment. Returns False if it is already installed, and then
    changes nothing. Raises BuildError if pip fails."""
    require_tools(compiler=False)
    if is_installed(wheel):
        return False
    print(f"installing {wheel.name}", file=stream, flush=True)
    log = BuildLog(own_cache() / "logs" / f"install-{wheel.parent.name}.log")
    # dependencies first: an interrupted installation is then seen as missing
    for options in ([], ["--no-deps", "--force-reinstall"]):
        status, output = log.run(pip("install", *options, str(wheel)))
        if status != 0:
            raise log.failure(f"pip could not install {wheel.name}", output)
    return True


def copy_wheel(wheel: Path, directory: Path) -> Path:
    """The copy of `wheel` in `directory`, which is created if necessary."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(wheel, directory / wheel.name))
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror}") from None


def is_installed(wheel: Path) -> bool:
    """Whether this environment's llama_cpp came from exactly this wheel and is complete."""
    importlib.invalidate_caches()
    try:
        dist = importlib.metadata.distribution("llama_cpp_python")
        # PEP 610; older pips do not write the hash, but the path contains the key of the content
        origin = json.loads(dist.read_text("direct_url.json") or "{}").get("url", "")
        if unquote(origin) != f"file://{wheel}":
            return False
        sized = [file for file in dist.files or () if file.size is not None]
        return all(Path(str(file.locate())).stat().st_size == file.size for file in sized)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return False


def check_patches() -> str:
    """Fetch the pinned sdist and apply the patches to it, without a build; returns the result.
    Raises BuildError if the checksum, the commit or a patch does not fit."""
    patches = patches_dir()
    upstream = read_upstream(patches)
    require_tools(compiler=False)
    cache = own_cache()
    log = BuildLog(cache / "logs" / "check.log")
    with workplace(cache, "check", sys.stderr) as work:
        make_tree(fetch_sdist(patches, cache, log), work, patches, log, patched=True)
    return (
        f"patch set {patch_digest(patches)} applies cleanly to llama-cpp-python "
        f"{upstream.version} (llama.cpp {upstream.commit[:8]})"
    )


def compilers() -> tuple[str | None, str | None]:
    """The C and the C++ compiler that CMake will use, or None: that of the environment variable,
    else the first found."""

    def find(variable: str, *candidates: str) -> str | None:
        names = shlex.split(os.environ.get(variable, ""))[:1] or candidates
        return next((path for name in names if (path := shutil.which(name))), None)

    return find("CC", "cc", "gcc", "clang"), find("CXX", "c++", "g++", "clang++")


def require_tools(*, compiler: bool = True) -> None:
    """Raises BuildError, which names the package to install, if a tool is missing.

    The isolated build fetches CMake and ninja if they are missing.
    """
    if importlib.util.find_spec("pip") is None:
        raise BuildError(
            f"{sys.executable} has no pip; run: {sys.executable} -m ensurepip "
            "(Debian, Ubuntu: apt install python3-venv)"
        )
    if compiler and None in compilers():
        named = [f"{v}={os.environ[v]}" for v in ("CC", "CXX") if os.environ.get(v)]
        raise BuildError(
            "no C++ compiler found" + (f" with {' '.join(named)}" if named else "")
            + f"; install one ({INSTALL_COMPILER})"
        )  # fmt: skip


def wheel_inputs(
    patches: Path, flags: Sequence[str], *, patched: bool, native: bool
) -> dict[str, object]:
    """Everything that a wheel's content depends on, as JSON values."""
    upstream = read_upstream(patches)
    wheel_patches = [sha256_of(patches / n) for n in read_series(patches) if concerns_wheel(n)]
    return {
        "sdist": upstream.sha256,
        "patches": patch_digest(patches) if patched else wheel_patches,
        "build": sha256_of(patches / CONSTRAINTS),
        "flags": list(flags),
        "environment": {name: os.environ.get(name, "") for name in _FLAG_VARIABLES},
        "compilers": [_compiler_version(path) for path in compilers()],
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "cpu": cpu_identity() if native else None,
    }


def wheel_key(inputs: dict[str, object]) -> str:
    """16 hexadecimal digits over `wheel_inputs`."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _compile(
    tree: Path,
    work: Path,
    flags: Sequence[str],
    cpu: Sequence[str] | None,
    progress: BuildProgress,
    log: BuildLog,
) -> Path:
    """Build the wheel of a source tree in `work`; returns its path."""
    patches = patches_dir()
    commit = read_upstream(patches).commit[:12]
    # pip would split at a space, and a file URL has none. pip 25.2 and older apply the first
    # variable to isolated builds, newer ones the second
    constraints = (patches / CONSTRAINTS).absolute().as_uri()
    arguments = [f"-DLLAMA_BUILD_COMMIT={commit}", *flags]
    env = {
        **no_repository(tree),
        # else scikit-build takes Python's, and ccache finds no object made under another name
        **{name: path for name, path in zip(("CC", "CXX"), compilers(), strict=True)
           if path and not os.environ.get(name)},
        "CMAKE_ARGS": " ".join([os.environ.get("CMAKE_ARGS", ""), shlex.join(arguments)]).strip(),
        "PIP_CONSTRAINT": f"{os.environ.get('PIP_CONSTRAINT', '')} {constraints}".strip(),
        "PIP_BUILD_CONSTRAINT": constraints,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(progress.jobs),
        # in the environment, because pip before 22.1 has no --config-settings
        "SKBUILD_BUILD_DIR": str(work / "build"),
        **ccache_environment(work, cpu),
    }  # fmt: skip
    command = pip("wheel", "-v", "--no-deps", "-w", str(work / "wheel"), str(tree))
    status, output = log.run(command, env=env, on_line=progress.see)
    wheels = list((work / "wheel").glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise log.failure("the build failed", output)
    return wheels[0]


# ggml compiles with ccache if it is installed
def ccache_environment(
    work: Path, cpu: Sequence[str] | None, path: str | None = None
) -> dict[str, str]:
    """Variables for a build below `work`: paths of a new tree cause no misses, and the user's
    language changes no object. With `cpu`, the identity of the CPU that `-march=native` means,
    objects for other CPUs are not found: ccache treats that option like any other, so a cache that
    has moved to another CPU would return objects for the first one. Writes the identity to a file
    in `work`, and a `ccache` that starts the real one, found in `path`. For all other objects,
    which are the same on every CPU, it leaves out that file."""
    found = {"CCACHE_BASEDIR": str(work), "CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "locale"}
    path = path or os.environ.get("PATH", "")
    ccache = shutil.which("ccache", path=path)
    if cpu is not None and ccache is not None:
        file = work / "cpu.json"
        file.write_text(json.dumps(cpu), encoding="utf-8")
        named = os.environ.get("CCACHE_EXTRAFILES", "")
        found["CCACHE_EXTRAFILES"] = os.pathsep.join(filter(None, (named, str(file))))
        launcher = work / "launcher" / "ccache"
        launcher.parent.mkdir(exist_ok=True)
        launcher.write_text(LAUNCHER.format(named=shlex.quote(named), ccache=shlex.quote(ccache)))
        launcher.chmod(0o755)
        found["PATH"] = os.pathsep.join([str(launcher.parent), path])
    return found


# if it cannot be started, every object depends on the CPU
LAUNCHER = """#!/bin/sh
case "$*" in *=native*) ;; *) export CCACHE_EXTRAFILES={named} ;; esac
exec {ccache} "$@"
"""


def _compiler_version(path: str | None) -> str:
    if path is None:
        return ""
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler {path} does not work: {reason(error)}") from None
    return (asked.stdout.splitlines() or [asked.stderr.strip()])[0]
