"""Plays the sessions of docs/tutorials/stop-a-decode.md.

`python -m tests.kit.debug_page` writes what they print.

A block of shell with `instr debug` begins a session. The blocks of text after it, up to the next
one, have its commands after `(instr) `, each followed by what the debugger prints.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tutorials" / "stop-a-decode.md"
PROMPT = "(instr) "

_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# a command whose output is known ends the output of each other one
_MARK, _MARKED = "help where\n", "where: the op that has just run.\n"

Debug = Callable[[list[str], str], str]
"""arguments and standard input of `instr debug` -> what it prints to standard error"""


def played(page: str, debug: Debug) -> str:
    """The page with what the sessions print now."""
    blocks = list(_BLOCK.finditer(page))
    printed = iter(
        output
        for at, block in enumerate(blocks)
        if _is_session(block)
        for output in _play(block[2], _texts(blocks[at + 1 :]), debug)
    )

    def write(block: re.Match[str]) -> str:
        if block[1] != "text" or not block[2].startswith(PROMPT):
            return block[0]
        text = "".join(f"{PROMPT}{command}\n{next(printed)}" for command in _commands(block[2]))
        return f"```text\n{text.rstrip()}\n```"

    return _BLOCK.sub(write, page)


def _is_session(block: re.Match[str]) -> bool:
    return block[1] == "sh" and block[2].startswith("instr debug ")


def _texts(blocks: list[re.Match[str]]) -> list[str]:
    """The blocks of text up to the next session."""
    end = next((at for at, block in enumerate(blocks) if _is_session(block)), len(blocks))
    return [block[2] for block in blocks[:end] if block[2].startswith(PROMPT)]


def _commands(text: str) -> list[str]:
    return [line[len(PROMPT) :] for line in text.splitlines() if line.startswith(PROMPT)]


def _play(shell: str, texts: list[str], debug: Debug) -> list[str]:
    """What each command of a session prints."""
    commands = [command for text in texts for command in _commands(text)]
    script = _MARK + "".join(f"{command}\n{_MARK}" for command in commands)
    printed = debug(shlex.split(shell)[2:], script)
    outputs = [output.strip("\n") + "\n" for output in printed.split(_MARKED)[1:]]
    assert len(outputs) >= len(commands), printed
    return [output if output.strip() else "" for output in outputs[: len(commands)]]


if __name__ == "__main__":

    def debug(words: list[str], commands: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", "debug", *words, "--log", "out/stop.log",
             "--force"],
            input=commands, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stderr.replace("out/stop.log", "debug.log")

    (ROOT / "out").mkdir(exist_ok=True)
    PAGE.write_text(played(PAGE.read_text(encoding="utf-8"), debug), encoding="utf-8")
