"""Executes pages of docs: `python -m tests.kit.notebook` runs their code and writes the results.

A block of Python that ends in an expression is followed by a block of text with its value. A block
of text after a block of shell is the output of its only command for the fixture's session.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from llamacpp_instr.cli import main

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "how-to" / "use-a-notebook.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "one-word.md"
SESSION = ROOT / "tests" / "fixtures" / "demo-verbose.log"

_BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def executed(page: str) -> str:
    """The page with updated blocks of text; runs in the repository's root."""
    names: dict[str, Any] = {}
    command = ""
    result: Any = None

    def run(block: re.Match[str]) -> str:
        nonlocal result, command
        kind, content = block.groups()
        if kind == "text":
            answer = _printed(command) if command else str(result)
            return f"```text\n{answer.rstrip()}\n```"
        command = content if kind == "sh" else ""
        if kind == "python":
            result = _evaluate(content, names)
        return block[0]

    return _BLOCK.sub(run, page)


def _printed(command: str) -> str:
    """The command's output for the fixture, which the page calls session.log."""
    words = [str(SESSION) if word == "session.log" else word for word in shlex.split(command)]
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, done.output
    return done.output


def _evaluate(code: str, names: dict[str, Any]) -> Any:
    """Run the code; returns the value of its last statement, or None if it is not an expression."""
    statements = ast.parse(code).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), str(PAGE), "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)


if __name__ == "__main__":
    for page in (PAGE, TUTORIAL):
        page.write_text(executed(page.read_text(encoding="utf-8")), encoding="utf-8")
