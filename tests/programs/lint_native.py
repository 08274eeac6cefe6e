"""Checks the recorder's C and C++ against llama.cpp's own rules: `make lint-native`.

llama.cpp's CMake defines the warnings, definitions and include folders of each file, and its
`.clang-tidy` the checks. Both are read from the pinned tree, so they are always current. Our files,
and the patched files of llama.cpp, must compile without warnings; ours also without findings.
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

from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.llama.build.programs import CMAKE_ARGS
from llamacpp_instr.llama.build.source_tree import (
    concerns_wheel,
    overlay_files,
    patches_dir,
    read_series,
)
from llamacpp_instr.llama.build.wheel import ccache_environment
from tests.kit.native_kit import patched_tree

SOURCES = (".c", ".cpp")

ELSEWHERE = ("ggml/src/ggml-blas/", "ggml/src/ggml-vulkan/")
"""what needs more than a compiler: `tests.kit.backends` compiles it"""

NOT_KEPT = (
    # newer than the clang-tidy that llama.cpp uses: its own files often fail these
    "misc-include-cleaner",
    "bugprone-signed-bitwise",
    "portability-avoid-pragma-once",
    "readability-use-concise-preprocessor-directives",
    # its style does not follow these
    "readability-avoid-nested-conditional-operator",
    "readability-isolate-declaration",
    "readability-named-parameter",
    # a hook changes the state of its thread, although no member of its own
    "readability-convert-member-functions-to-static",
    "readability-make-member-function-const",
)
"""llama.cpp's checks that are disabled here"""


@dataclass(frozen=True)
class Tree:
    """The patched llama.cpp and its CMake commands."""

    root: Path
    build: Path
    commands: dict[str, list[str]]
    """by path below the root"""

    def warnings(self, file: str) -> str:
        """The compiler's warnings about a file, which ccache keeps if there is one."""
        # ccache would not find the object of an earlier run by a command with this run's path
        command = [word.replace(f"{self.build}/", "") for word in self.commands[file]] + ["-O0"]
        command[command.index("-o") + 1] = file.replace("/", "-") + ".o"
        if (ccache := shutil.which("ccache", path=_search_path())) is not None:
            command.insert(0, ccache)
        env = {**os.environ, **ccache_environment(self.root.parents[2], None)}
        done = subprocess.run(
            command, cwd=self.build, env=env, capture_output=True, text=True, check=False
        )
        return done.stderr.replace(f"{self.root}/", "")

    def findings(self, file: str) -> str:
        """clang-tidy's findings in a file and in those of our headers that it includes."""
        program = shutil.which("clang-tidy", path=_search_path())
        assert program, "clang-tidy is missing: pip install clang-tidy"
        done = subprocess.run(
            [
                program, "--quiet", f"--checks={','.join(f'-{check}' for check in NOT_KEPT)}",
                "--header-filter=instrumentation", "-p", str(self.build), str(self.root / file),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        # its counts go to standard error, and so do errors that prevent it from running
        failed = done.returncode and not done.stdout
        return (done.stderr if failed else done.stdout).replace(f"{self.root}/", "")


def configured(build: Path, flags: Sequence[str] = ()) -> Tree:
    """The patched tree, configured in the empty directory `build` with further flags."""
    root = patched_tree()
    configure = [
        "cmake", "-G", "Ninja", "-S", str(root), "-B", str(build), *CMAKE_ARGS,
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DLLAMA_FATAL_WARNINGS=ON", "-DGGML_CCACHE=OFF",
        *flags,
    ]  # fmt: skip
    configure[0] = shutil.which("cmake", path=_search_path()) or "cmake"
    env = {**os.environ, "PATH": _search_path()}
    done = subprocess.run(configure, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    entries = json.loads((build / "compile_commands.json").read_text())
    commands = {
        Path(entry["file"]).relative_to(root).as_posix(): shlex.split(entry["command"])
        for entry in entries
        if root in Path(entry["file"]).parents  # otherwise it is generated
    }
    return Tree(root, build, commands)


def own_files() -> list[str]:
    """Our sources, at their paths in the tree."""
    files = (file.as_posix() for file in overlay_files(patches_dir()))
    return sorted(file for file in files if file.endswith(SOURCES))


def patched_files() -> list[str]:
    """The sources of llama.cpp that the series changes, without those of ELSEWHERE."""
    patches = patches_dir()
    found = set()
    for name in read_series(patches):
        if not concerns_wheel(name):
            text = (patches / name).read_text(encoding="utf-8")
            found |= set(re.findall(r"^diff --git a/(\S+) ", text, re.MULTILINE))
    return sorted(
        file for file in found if file.endswith(SOURCES) and not file.startswith(ELSEWHERE)
    )


def _search_path() -> str:
    # cmake, ninja and clang-tidy come with pip, beside this Python
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _lines_of(outputs: Iterable[str]) -> list[str]:
    return [text for text in outputs if text.strip()]


def main(arguments: Sequence[str]) -> int:
    """Print the findings; returns the number of files that have some."""
    with tempfile.TemporaryDirectory() as build, ThreadPoolExecutor(usable_cpus()) as pool:
        tree = configured(Path(build))
        ours, theirs = own_files(), patched_files()
        found = _lines_of(pool.map(tree.warnings, [*ours, *theirs]))
        print(f"{len(ours)} files of ours and {len(theirs)} patched: {len(found)} with warnings")
        if "--tidy" in arguments:
            found += (untidy := _lines_of(pool.map(tree.findings, ours)))
            print(f"clang-tidy: {len(untidy)} of {len(ours)} files with findings")
    print(*found, sep="\n", file=sys.stderr, end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
