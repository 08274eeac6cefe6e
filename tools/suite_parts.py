"""The parts of `make test-all`: what `make test` leaves out, since it needs more or takes minutes.

    python -m tools.suite_parts             a table of the parts, and of what this machine lacks
    python -m tools.suite_parts NAME...     run these parts, or `all`; one that cannot run fails
    python -m tools.suite_parts --changed   run those of CI whose files have changed since they
                                            last passed on this machine
    python -m tools.suite_parts --packages  the Debian packages that those of CI need and this
                                            machine lacks

The files of a part are the tracked ones below its paths. A digest of their names and contents and
of the part's commands is kept in the product's cache once every command has exited with status 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.llama.build.wheel import own_cache

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Requirement:
    """A program, library or permission that a part cannot do without."""

    name: str
    is_met: Callable[[], bool]
    packages: tuple[str, ...] = ()
    """Debian's packages that bring it; empty if none does"""


def program(name: str, *packages: str, names: Sequence[str] = ()) -> Requirement:
    """A program in PATH, under its name or any of `names`."""
    return Requirement(name, lambda: any(map(shutil.which, names or (name,))), packages or (name,))


def file(name: str, pattern: str, *packages: str) -> Requirement:
    """A file below `/` whose path matches `pattern`."""
    return Requirement(name, lambda: any(Path("/").glob(pattern)), packages)


GIT, PATCH, IP, APT = (program(name) for name in ("git", "patch", "ip", "apt-get"))
NODE = Requirement(
    "node and npm", lambda: bool(shutil.which("node") and shutil.which("npm")), ("nodejs", "npm")
)
CHROMIUM = program(
    "Chromium",
    "chromium",
    "fonts-dejavu-core",
    names=("chromium", "chromium-browser", "google-chrome", os.environ.get("CHROMIUM", "")),
)
OPENBLAS = file("OpenBLAS", "usr/include/**/cblas.h", "libopenblas-dev")
LAVAPIPE = file("Mesa's lavapipe", "usr/share/vulkan/icd.d/lvp_icd.*.json", "mesa-vulkan-drivers")
GLSLC = program("glslc")
VULKAN = file("Vulkan's headers", "usr/include/vulkan/vulkan.h", "libvulkan-dev")
SPIRV = file("SPIR-V's headers", "usr/include/spirv/unified1/spirv.hpp", "spirv-headers")
PROMTOOL = program("promtool", "prometheus")
NETWORKS = program("ip", "iproute2")
TUN = file("/dev/net/tun", "dev/net/tun")
SUPERUSER = Requirement("root", lambda: os.geteuid() == 0)
FOR_ARM64 = program("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
QEMU = program("qemu-aarch64-static", "qemu-user-static")
TWO_CPUS = Requirement("two CPUs", lambda: usable_cpus() > 1)
NAMESPACES = Requirement("user namespaces", lambda: _runs("unshare", "--map-root-user", "true"))
FUSE = file("/dev/fuse", "dev/fuse")
AVX2 = Requirement("a processor with AVX2", lambda: "avx2" in _cpu_flags())
DEVICES = (OPENBLAS, LAVAPIPE, GLSLC, VULKAN, SPIRV)


def _cpu_flags() -> list[str]:
    """The words that Linux says of the processors."""
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


def _runs(*command: str) -> bool:
    """Whether a command exits with status 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


PRODUCT = ("llamacpp_instr", "converters", "pyproject.toml")
NATIVE = ("patches", "llamacpp_instr/llama", "llamacpp_instr/recording", "llamacpp_instr/log")
PAGES = ("README.md", "docs", "docker/README.md", "patches/README.md")
TESTS = ("{python}", "-m", "pytest", "-q", "--instafail", "--durations=5")
PARALLEL = ("-n", "{cpus}", "--dist", "loadfile")


@dataclass(frozen=True)
class SuitePart:
    """Tests that have needs of their own, in the folder `tests/parts/NAME`."""

    name: str
    title: str
    minutes: int
    """on two CPUs, with nothing in any cache"""
    paths: tuple[str, ...]
    """tracked files that the part tests, beside those of its own folder and of tests/kit"""
    needs: tuple[Requirement, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    """in the order in which they run; `{python}` is this interpreter, `{cpus}` the usable CPUs. By
    default pytest runs the folder"""
    in_ci: bool = True

    @property
    def folder(self) -> str:
        return f"tests/parts/{self.name}"

    @property
    def missing(self) -> list[Requirement]:
        """The needs that this machine does not meet."""
        return [need for need in self.needs if not need.is_met()]

    @property
    def lines(self) -> list[list[str]]:
        """The commands, with the placeholders replaced."""
        values = {"python": sys.executable, "cpus": str(usable_cpus())}
        commands = self.commands or ((*TESTS, *PARALLEL, self.folder),)
        return [[word.format(**values) for word in command] for command in commands]

    def digest(self) -> str:
        """A digest of the names and contents of the part's tracked files, and of its commands.
        Raises FileNotFoundError for a path that has no tracked file."""
        own = (self.folder,) if (ROOT / self.folder).is_dir() else ()
        words = "\0".join(" ".join(command) for command in self.commands)
        return digest_of((*self.paths, *own, "tests/conftest.py", "tests/kit"), words)


PARTS = (
    SuitePart(
        "git",
        "the tools for patches, which work in git repositories",
        1,
        ("tools", "patches", "llamacpp_instr/llama/build"),
        (GIT, PATCH),
    ),
    SuitePart(
        "packaging",
        "the wheel and the sdist, in empty environments that pip fills",
        1,
        (*PRODUCT, "patches", "tools/release.py"),
    ),
    SuitePart("pages", "every command of README and docs", 4, (*PRODUCT, *PAGES), (GIT,)),
    SuitePart(
        "limits",
        "memory and time of hostile files, and hundreds of killed processes",
        2,
        (*PRODUCT, "tests/fuzz"),
    ),
    SuitePart(
        "machine",
        "findings that a machine provokes, other users, full disks, stopped ones",
        1,
        PRODUCT,
        (SUPERUSER, NAMESPACES, FUSE, TWO_CPUS, AVX2),
    ),
    SuitePart("recipes", "mixtures and caches, measured on whole models", 2, PRODUCT),
    SuitePart("programs", "llama-server and llama.cpp's other programs", 5, (*PRODUCT, "patches")),
    SuitePart(
        "unpatched",
        "the unpatched library, upstream's programs, 128 architectures",
        7,
        (*PRODUCT, "patches"),
        (),
        (("{python}", "-m", "tests.kit.native_kit"), (*TESTS, *PARALLEL, "tests/parts/unpatched")),
    ),
    SuitePart(
        "browser",
        "pages in Chromium, and traces in Perfetto's trace_processor and UI",
        2,
        (*PRODUCT, "tests/ui"),
        (NODE, CHROMIUM),
        (("make", "--no-print-directory", "ui-kit"), (*TESTS, *PARALLEL, "tests/parts/browser")),
    ),
    SuitePart(
        "devices",
        "Vulkan on Mesa's lavapipe, and OpenBLAS",
        12,
        (*NATIVE, "converters", "tests/native"),
        DEVICES,
        # shaders take the driver minutes; speeds are compared while nothing else runs
        (
            ("{python}", "-m", "tests.kit.backends"),
            (*TESTS, *PARALLEL, "tests/parts/devices", "-k", "not llama_bench"),
            (*TESTS, "tests/parts/devices/test_devices.py", "-k", "llama_bench"),
        ),
    ),
    SuitePart(
        "prometheus",
        "metrics and the dashboard's queries, by promtool",
        1,
        ("llamacpp_instr/log", "converters/live", "tests/live"),
        (PROMTOOL,),
    ),
    SuitePart(
        "networks",
        "sessions over several machines, in network namespaces",
        1,
        (*NATIVE, "converters"),
        (SUPERUSER, NETWORKS, TUN),
    ),
    SuitePart(
        "sanitizers",
        "the recorder without a compiler's warning, and under three sanitizers",
        8,
        ("patches", "tests/native", "tests/programs"),
        (),
        (
            (*TESTS, "tests/parts/sanitizers"),
            ("{python}", "-m", "tests.programs.sanitize", "--seconds", "20"),
        ),
    ),
    SuitePart(
        "arm64",
        "the recorder on arm64, cross-compiled and run by qemu",
        6,
        (*NATIVE, "tests/native", "tests/recording", "tests/programs/arm64.py"),
        (FOR_ARM64, QEMU),
        (("{python}", "-m", "tests.programs.arm64"),),
    ),
    SuitePart(
        "cuda",
        "the CUDA backend compiles; the reader of CUPTI runs with stand-ins",
        3,
        ("patches", "tests/native", "tests/programs"),
        (),
        (("make", "--no-print-directory", "cuda-compiler"), (*TESTS, "tests/parts/cuda")),
    ),
    SuitePart(
        "macos",
        "the recorder compiles for macOS",
        3,
        ("patches", "tests/programs/lint_native.py"),
        (),
        (
            ("make", "--no-print-directory", "macos-compiler"),
            (*TESTS, "tests/parts/macos", "-k", "not intel and not link"),
        ),
    ),
    SuitePart(
        "peers",
        "imports beside transformers, exports in the tools that read them",
        10,
        (
            "llamacpp_instr/base/child.py",
            "llamacpp_instr/lab/importer",
            "pyproject.toml",
            "llamacpp_instr/llama/build",
            "converters",
            "tests/ui",
            "patches/UPSTREAM.toml",
        ),
        (NODE, CHROMIUM),
        (("make", "--no-print-directory", "peers"),),
    ),
    SuitePart(
        "image",
        "the container image with the kernels of AVX2, without an engine",
        8,
        (*PRODUCT, "docker", "patches", "README.md"),
        (SUPERUSER, APT),
        (("make", "--no-print-directory", "image-test", "SLICE=1"),),
    ),
    SuitePart(
        "mutants",
        "eight small mistakes, of which the tests notice at least a quarter",
        3,
        ("llamacpp_instr", "converters", "tests", "tools/mutate.py"),
        (GIT,),
        (
            (*TESTS, "tests/parts/mutants"),
            ("{python}", "-m", "tools.mutate", "--count", "8", "--near", "--at-least", "25"),
        ),
    ),
    SuitePart(
        "newcomer",
        "what README and docs tell a newcomer, in a fresh clone",
        20,
        (*PRODUCT, *PAGES, "patches"),
        (GIT,),
        in_ci=False,
    ),
)
NAMES = [part.name for part in PARTS]


def digest_of(paths: Sequence[str], words: str = "") -> str:
    """A digest of `words`, and of the names and contents of the tracked files below `paths`. Raises
    FileNotFoundError for a path that has no tracked file: a folder that was moved would otherwise
    never be tested again."""
    digest = hashlib.sha256(words.encode())
    for path in paths:
        names = tracked_files(path)
        if not names:
            raise FileNotFoundError(f"{path}: no tracked file")
        for name in names:
            content = ROOT / name
            data = os.fsencode(content.readlink()) if content.is_symlink() else _bytes_of(content)
            digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\0".encode())
    return digest.hexdigest()


def _bytes_of(path: Path) -> bytes:
    """The content of a tracked file, empty if it was deleted."""
    return path.read_bytes() if path.is_file() else b""


def tracked_files(path: str) -> list[str]:
    """The names of the tracked files below a path, in order."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", path], cwd=ROOT, capture_output=True, check=True
    )
    return sorted(filter(None, listed.stdout.decode().split("\0")))


def table(parts: Sequence[SuitePart]) -> str:
    """A line for each part: minutes, title, and what this machine lacks. Then the command that
    installs all of that, if packages bring it."""
    rows = []
    for part in parts:
        missing = ", ".join(need.name for need in part.missing)
        lacks = f" (lacks {missing})" if missing else ""
        rows.append(f"{part.name:11} {part.minutes:3} min  {part.title}{lacks}")
    lacking = [need for part in parts for need in part.missing]
    if packages := packages_for(parts):
        rows.append(f"\nDebian, Ubuntu: apt install {' '.join(packages)}")
    rows += sorted({f"no package brings: {n.name}" for n in lacking if not n.packages})
    return "\n".join(rows)


def packages_for(parts: Iterable[SuitePart]) -> list[str]:
    """The Debian packages that bring what this machine lacks."""
    return sorted({name for part in parts for need in part.missing for name in need.packages})


@dataclass
class PartOutcome:
    """The outcome of a part."""

    part: SuitePart
    status: int = 0
    """of the first command that failed, else 0"""
    seconds: float = 0.0
    cpu_seconds: float = field(default=0.0)

    def __str__(self) -> str:
        outcome = "passed" if self.status == 0 else f"FAILED, exit status {self.status}"
        minutes, cpu = self.seconds / 60, self.cpu_seconds / 60
        return f"{self.part.name:11} {minutes:5.1f} min {cpu:5.1f} CPU min  {outcome}"


def run(part: SuitePart) -> PartOutcome:
    """Run the commands of a part until one fails; each is printed first."""
    outcome = PartOutcome(part)
    start, cpu = time.monotonic(), _cpu_of_children()
    for line in part.lines:
        print(f"{part.name}: {' '.join(line)}", flush=True)
        outcome.status = subprocess.run(line, cwd=ROOT, env=environment(), check=False).returncode
        if outcome.status:
            break
    outcome.seconds, outcome.cpu_seconds = time.monotonic() - start, _cpu_of_children() - cpu
    return outcome


def environment() -> dict[str, str]:
    """The environment of tests: Python keeps what it compiles, and OpenMP's threads do not spin
    while they wait."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_WAIT_POLICY": "passive"}


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def chosen_parts(names: Sequence[str]) -> list[SuitePart]:
    """The parts of these names, every part for `all`."""
    by_name = {part.name: part for part in PARTS}
    return list(PARTS) if "all" in names else [by_name[name] for name in names]


def run_all(parts: Sequence[SuitePart], digests: dict[str, str]) -> int:
    """Run the parts and print a line for each; returns 1 if one failed. Keeps the digests of those
    that passed."""
    outcomes = []
    for part in parts:
        outcome = run(part)
        outcomes.append(outcome)
        if outcome.status == 0:
            (_passed_folder() / part.name).write_text(digests[part.name])
    print("\n".join(map(str, outcomes)))
    return 1 if any(outcome.status for outcome in outcomes) else 0


def without_passed(parts: Sequence[SuitePart], digests: dict[str, str]) -> list[SuitePart]:
    """The parts whose files have changed since they last passed on this machine."""
    passed = {kept.name: kept.read_text() for kept in _passed_folder().iterdir()}
    same = [part.name for part in parts if passed.get(part.name) == digests[part.name]]
    print(f"\npassed before with the same files: {', '.join(same) or 'none'}", flush=True)
    return [part for part in parts if part.name not in same]


def _passed_folder() -> Path:
    folder = own_cache() / "passed"
    folder.mkdir(exist_ok=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, {', '.join(NAMES)}")
    parser.add_argument("--changed", action="store_true", help="parts of CI whose files changed")
    parser.add_argument("--packages", action="store_true", help="packages that CI's parts lack")
    options = parser.parse_args()
    for name in options.names:
        if name not in (*NAMES, "all"):
            parser.error(f"no part {name!r}; there are {', '.join(NAMES)}, and all")
    in_ci = [part for part in PARTS if part.in_ci]
    if options.packages:
        print(*packages_for(in_ci))
        return 0
    parts = in_ci if options.changed else chosen_parts(options.names)
    print(table(parts or PARTS), flush=True)
    try:
        digests = {part.name: part.digest() for part in parts}
    except FileNotFoundError as error:
        sys.exit(str(error))
    if options.changed:
        parts = without_passed(parts, digests)
    cannot = [part.name for part in parts if part.missing]
    if cannot:
        print(f"cannot run here: {', '.join(cannot)}", file=sys.stderr)
        return 2
    return run_all(parts, digests)


if __name__ == "__main__":
    sys.exit(main())
