"""The commands of the pages as a reader would type them, and a directory in which they can run.

If a line reads a file that no earlier line of its block wrote, the file is put there first: the
demo model (or a file made from it) for the name of a model, its session for the name of a log.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.kit.native_kit import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "docker" / "README.md", ROOT / "patches" / "README.md"]

# the same command with less to do: the last value of an option counts
_LESS = {
    "build": "--check",
    "run": "-n 6 --threads 1",
    "bench": "-p 32 -n 4 --rounds 2",
    "imatrix": "--ctx 64 --chunks 2 --threads 1",
    "quality": "--ctx 64 --chunks 2 --threads 1",
    # in a shorter context than the text that the model would write
    **dict.fromkeys(
        ("recipe model-F16.gguf --bpw", "recipe model-F16.gguf --memory"),
        '--chunks 1 --threads 1 --text "{stock}/your-text.txt"',
    ),
    "recipe": "--chunks 1 --threads 1",
    "compare --types": "--rounds 1 -n 4 --threads 1",
}
# a probe has no options for that
_PROBE = (
    "from llamacpp_instr.prediction.probe import measure;"
    " measure.SECONDS, measure.SIZES, measure.TYPES_OF_WEIGHTS = 0, (1, 4), ('F16', 'Q4_K');"
    " from llamacpp_instr.prediction import recorded as kernels;"
    " kernels.measure_kernels.__defaults__ = ([kernels.SUBJECTS[0], kernels.SUBJECTS[-2]],);"
    " import scipy.optimize as scipy; fit = scipy.least_squares;"
    " scipy.least_squares = lambda *of, **how: fit(*of, **{**how, 'max_nfev': 4});"
    " from llamacpp_instr.__main__ import main; main()"
)


@dataclass(frozen=True)
class Line:
    """A command line of a page."""

    page: str
    block: int
    text: str
    """without its comment; continued lines are joined"""

    def words(self) -> list[list[str]]:
        """The words of each simple command, for example of both sides of a pipe."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        commands: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("|&;"):
                commands.append([])
            else:
                commands[-1].append(word)
        return [command for command in commands if command]


def blocks_of(page: Path, language: str) -> list[str]:
    """A page's blocks of a language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def one_line(page: str, beginning: str) -> Line:
    """The only line of a page that begins like this, for a test that runs it."""
    found = [line for line in lines_of(ROOT / page) if line.text.startswith(beginning)]
    found = [line for line in found if line.text == beginning] or found
    assert len(found) == 1, f"{page}: {len(found)} lines begin with {beginning!r}"
    return found[0]


def lines_of(page: Path) -> list[Line]:
    """All lines of a page's shell blocks, in order."""
    blocks = blocks_of(page, "sh")
    name = page.relative_to(ROOT).as_posix()
    return [
        Line(name, number, text)
        for number, block in enumerate(blocks)
        for line in block.replace("\\\n", " ").splitlines()
        if (text := re.sub(r"(^|\s)#\s.*$", "", line).strip())
    ]


def start(
    line: Line, directory: Path, environment: dict[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """Start a line in a process group, as a terminal does; its output goes to a file."""
    with output.open("wb") as file:
        return subprocess.Popen(
            ["bash", "-c", line.text],
            cwd=directory, env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


class Place:
    """A directory in which a real shell runs the lines of one block.

    `quick` is a command for `instr` that need not start a process of its own.
    """

    def __init__(
        self, directory: Path, stock: Path, environment: dict[str, str], quick: str = ""
    ) -> None:
        self.directory, self._stock = directory, stock
        directory.mkdir()
        programs = _programs(stock)
        self._environment = environment | {
            "PATH": f"{programs}{os.pathsep}{environment['PATH']}",
            "BROWSER": str(programs / "browser"),
        }
        self._quick = {"QUICK_INSTR": quick} if quick else {}
        self.laid: list[str] = []
        """files that were missing when a line needed them"""

    def run(self, line: Line) -> subprocess.CompletedProcess[str]:
        for command in line.words():
            self._lay(command)
        return self.run_script(line.text.replace("for i in 1 2 3 4 5;", "for i in 1 2;"))

    def start(self, line: Line, output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a line that does not end on its own."""
        for command in line.words():
            self._lay(command)
        return start(line, self.directory, self._environment | variables, output)

    def run_script(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.directory, env=self._environment | self._quick, capture_output=True, text=True,
            timeout=600, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def _lay(self, command: list[str]) -> None:
        for before, word in pairwise(command):
            written = before in ("-o", "--output", "--perfetto", "--heat-map") or (
                before == "--log" and "compare" not in command
            )
            word = word.partition(":")[0] if before == "--lora" else word
            words = [path.name for path in self._stock.glob(word)] if "*" in word else [word]
            for name in () if written else words:
                source = self._source(name)
                target = self.directory / name
                if (self._stock / name).is_dir() and "/" not in name and not target.exists():
                    shutil.copytree(self._stock / name, target)
                if source is not None and not target.exists():
                    if target.suffix == ".gguf":  # caches are keyed by a model's path
                        target.symlink_to(source)
                    else:
                        shutil.copyfile(source, target)
                    self.laid.append(name)

    def _source(self, word: str) -> Path | None:
        """The file that replaces a file of that name."""
        if "/" in word or "%" in word:
            return None
        if (self._stock / word).is_file():
            return self._stock / word
        stand_in = {".gguf": "model-F16.gguf", ".log": "session.log", ".txt": "your-text.txt"}
        name = stand_in.get(Path(word).suffix)
        return self._stock / name if name else None


# fetches the page like a browser, then stops the program that opened it
_LOOK = """
import os, signal, sys, urllib.request
page = urllib.request.urlopen(sys.argv[1].partition("#")[0]).read()
assert b"<html" in page
os.kill(int(sys.argv[2]), signal.SIGINT)
"""


def write_browser(directory: Path) -> Path:
    """A program for BROWSER: it fetches the page and sends SIGINT to the program that opened it."""
    look, browser = directory / "look.py", directory / "browser"
    look.write_text(_LOOK, encoding="utf-8")
    browser.write_text(f'#!/bin/sh\n"{sys.executable}" "{look}" "$1" $PPID &\n', encoding="utf-8")
    browser.chmod(0o755)
    return browser


def measure_machine(stock: Path, environment: dict[str, str]) -> None:
    """Give the commands of all places the file of a short `instr probe`."""
    (stock / "cache").mkdir(exist_ok=True)
    subprocess.run(
        [_programs(stock) / "instr", "probe"], env=environment, cwd=stock, check=True,
        capture_output=True,
    )  # fmt: skip


def _programs(stock: Path) -> Path:
    """A directory with `instr` and `python` as in an active environment, and a browser."""
    directory = stock / "bin"
    if not directory.is_dir():
        directory.mkdir()
        write_browser(directory)
        less = {name: options.format(stock=stock) for name, options in _LESS.items()}
        cases = "\n".join(f'"{name}"*) set -- "$@" {of};;' for name, of in less.items())
        python = f'exec "{sys.executable}" "$@"'
        probe = f'[ "$1" = probe ] && exec "{sys.executable}" -c "{_PROBE}" "$@"'
        instr = f'exec "{sys.executable}" -m llamacpp_instr "$@"'
        quick = '[ -z "$QUICK_INSTR" ] || eval "exec $QUICK_INSTR \\"\\$@\\""'
        # what is built comes from the user's cache, but no probe goes there
        cache = f'[ "$1" = build ] || export LLAMACPP_INSTR_CACHE="{stock}/cache"'
        scripts = {
            "instr": f'case "$*" in\n{cases}\nesac\n{cache}\n{probe}\n{quick}\n{instr}',
            "python": python,
            "python3": python,
            "uvicorn": f'exec "{sys.executable}" -m uvicorn "$@"',
        }
        for name, script in scripts.items():
            program = directory / name
            program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
            program.chmod(0o755)
    return directory
