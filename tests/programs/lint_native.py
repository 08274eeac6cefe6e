"""The recorder's C and C++ held to llama.cpp's own rules: `make lint-native`.

llama.cpp's CMake says which warnings, definitions and folders each file is compiled with, and its
`.clang-tidy` which checks it wants; both are read from the pinned tree, so they move with it. Our
files, and those of llama.cpp that we patch, may give no warning; our files no finding either.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.build.upstream import concerns_wheel, overlay_files, patches_dir, read_series
from llamacpp_instr.llama.threads import usable_cpus
from tests.kit.native_kit import CMAKE, WITHOUT_PROGRAMS, patched_tree

SOURCES = (".c", ".cpp")

NOT_KEPT = (
    # newer than what llama.cpp is checked with: its own files fail these by the dozen
    "misc-include-cleaner",
    "bugprone-signed-bitwise",
    "portability-avoid-pragma-once",
    "readability-use-concise-preprocessor-directives",
    # its style has these
    "readability-avoid-nested-conditional-operator",
    "readability-isolate-declaration",
    "readability-named-parameter",
    # a hook changes what its thread remembers, though no member of its own
    "readability-convert-member-functions-to-static",
    "readability-make-member-function-const",
)
"""checks of llama.cpp's that are left out here"""


@dataclass(frozen=True)
class Tree:
    """The patched llama.cpp and how CMake would compile it."""

    root: Path
    build: Path
    commands: dict[str, list[str]]
    """by the file's path below the root"""

    def warnings(self, file: str) -> str:
        """What the compiler has to say about a file; nothing is written."""
        command = [*self.commands[file], "-fsyntax-only"]
        at = command.index("-o")
        del command[at : at + 2]
        done = subprocess.run(command, cwd=self.build, capture_output=True, text=True, check=False)
        return done.stderr.replace(f"{self.root}/", "")

    def findings(self, file: str) -> str:
        """What clang-tidy has to say about a file and those of our headers that it includes."""
        program = shutil.which("clang-tidy", path=_search_path())
        assert program, "clang-tidy is missing: pip install clang-tidy"
        done = subprocess.run(
            [
                program, "--quiet", f"--checks={','.join(f'-{check}' for check in NOT_KEPT)}",
                "--header-filter=instrumentation", "-p", str(self.build), str(self.root / file),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        # what it counts goes to standard error, and so does why it cannot begin
        failed = done.returncode and not done.stdout
        return (done.stderr if failed else done.stdout).replace(f"{self.root}/", "")


def configured(build: Path) -> Tree:
    """The patched tree, configured in the empty directory `build`."""
    root = patched_tree()
    configure = [
        "cmake", "-G", "Ninja", "-S", str(root), "-B", str(build), *CMAKE, *WITHOUT_PROGRAMS,
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DLLAMA_FATAL_WARNINGS=ON", "-DGGML_CCACHE=OFF",
    ]  # fmt: skip
    configure[0] = shutil.which("cmake", path=_search_path()) or "cmake"
    env = {**os.environ, "PATH": _search_path()}
    done = subprocess.run(configure, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    entries = json.loads((build / "compile_commands.json").read_text())
    commands = {
        Path(entry["file"]).relative_to(root).as_posix(): shlex.split(entry["command"])
        for entry in entries
        if root in Path(entry["file"]).parents  # else it is generated
    }
    return Tree(root, build, commands)


def own_files() -> list[str]:
    """Our sources, where the build puts them."""
    files = (file.as_posix() for file in overlay_files(patches_dir()))
    return sorted(file for file in files if file.endswith(SOURCES))


def patched_files() -> list[str]:
    """The sources of llama.cpp that the series changes."""
    patches = patches_dir()
    found = set()
    for name in read_series(patches):
        if not concerns_wheel(name):
            text = (patches / name).read_text(encoding="utf-8")
            found |= set(re.findall(r"^diff --git a/(\S+) ", text, re.MULTILINE))
    return sorted(file for file in found if file.endswith(SOURCES))


def _search_path() -> str:
    # cmake, ninja and clang-tidy come with pip, beside this Python
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _said(outputs: Iterable[str]) -> list[str]:
    return [text for text in outputs if text.strip()]


def main(arguments: Sequence[str]) -> int:
    """Print what was found; the number of files with something to find is not 0 then."""
    with tempfile.TemporaryDirectory() as build, ThreadPoolExecutor(usable_cpus()) as pool:
        tree = configured(Path(build))
        ours, theirs = own_files(), patched_files()
        found = _said(pool.map(tree.warnings, [*ours, *theirs]))
        print(f"{len(ours)} files of ours and {len(theirs)} patched: {len(found)} with warnings")
        if "--tidy" in arguments:
            found += (untidy := _said(pool.map(tree.findings, ours)))
            print(f"clang-tidy: {len(untidy)} of {len(ours)} files with findings")
    print(*found, sep="\n", file=sys.stderr, end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
