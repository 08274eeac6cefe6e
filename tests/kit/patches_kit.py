"""A tiny llama-cpp-python with a patch set of three commits, made with the tool under test."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.llama.build.source_tree import VENDORED
from tests.kit import sdist_kit as kit
from tools.patches.edit import edit
from tools.patches.export import Exported, export

COUNT, ANSWER, LESS = (
    "0001-count-one-more.patch",
    "0002-answer-two.patch",
    "wheel/0001-wheel-less-of-it.patch",
)
LINES = [f"line {number}\n" for number in range(1, 41)]
FILES = {
    "vendor/llama.cpp/src/llama.c": "".join(LINES),
    "vendor/llama.cpp/src/other.c": "int f(void) {\n    return 1;\n}\n",
    "vendor/llama.cpp/src/dos.c": "of\r\nanother\r\nworld $Id$\r\n",
    "vendor/llama.cpp/.gitattributes": "*.c text eol=crlf ident diff=cpp\n",
    "vendor/llama.cpp/.gitignore": "*.ignored\n",
    "vendor/llama.cpp/tracked.ignored": "in the sdist all the same\n",
    "CMakeLists.txt": "add_subdirectory(vendor/llama.cpp)\n",
}
README = """\
| patch | files | why | it can go when |
|---|---|---|---|
| `0001` | `src/llama.c` | counts | never |
| `0002` | `src/llama.c`, `src/other.c` | answers | never |
| `wheel/0001` | `CMakeLists.txt` | smaller | soon |

| file | holds |
|---|---|
| `llama-instrumentation.{c,h}` | ours |
"""


def git(root: Path, *arguments: str, **variables: str) -> str:
    """Run git with the settings that the environment gives a user; returns its output."""
    return subprocess.run(
        ["git", *arguments], cwd=root, env={**os.environ, **variables}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip


def commit(root: Path, title: str, files: dict[str, str], reason: str = "It has to.") -> None:
    """Commit changed files as a user would."""
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
        git(root, "add", name)
    git(root, "commit", "-m", f"{title}\n\n{reason}")


def counted(*changes: tuple[int, str]) -> str:
    """`src/llama.c` with some of its lines changed."""
    lines = list(LINES)
    for number, text in changes:
        lines[number - 1] = f"{text}\n"
    return "".join(lines)


@dataclass(frozen=True)
class World:
    """A patch set and its editable tree."""

    sdist: Path
    patches: Path
    tree: Path
    """the editable tree"""

    @property
    def llama(self) -> Path:
        return self.tree / VENDORED

    def edit(self) -> None:
        shutil.rmtree(self.tree, ignore_errors=True)
        edit(self.sdist, self.tree, self.patches)

    def export(self) -> Exported:
        return export(self.tree, self.patches)

    def series(self) -> list[str]:
        return (self.patches / "series").read_text().splitlines()

    def bytes(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.patches).as_posix(): path.read_bytes()
            for path in sorted(self.patches.rglob("*"))
            if path.is_file()
        }


def make_world(directory: Path) -> World:
    """A world with an exported series and a tree made from it."""
    sdist = kit.make_sdist(directory, FILES)
    world = World(sdist, kit.make_patches(directory, sdist, {}), directory / "tree")
    (world.patches / "src" / "src" / "llama-instrumentation.h").write_text("int ours;\n")
    ours = world.patches / "src" / "src" / "llama-instrumentation.c"
    ours.write_text('#include "llama-instrumentation.h"\n')
    (world.patches / "README.md").write_text(README)
    world.edit()
    build = "llama-instrumentation.c"
    commit(world.llama, "count: one more", {"src/llama.c": counted((5, f"five {build}"))})
    commit(
        world.llama,
        "answer: two",
        {"src/llama.c": counted((5, f"five {build}"), (20, "20")), "src/other.c": "int g;\n"},
    )
    commit(world.tree, "wheel: less of it", {"CMakeLists.txt": "# less\n"})
    world.export()
    world.edit()
    return world
