"""Executes docs/notebook.md: `python -m tests.notebook` runs its Python and writes its outputs.

A block of Python that ends in an expression is followed by a block of text: what it evaluates to.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "notebook.md"

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def executed(page: str) -> str:
    """The page with every block of text as its Python says; it runs in the repository's root."""
    names: dict[str, Any] = {}
    result: Any = None

    def run(block: re.Match[str]) -> str:
        nonlocal result
        kind, content = block.groups()
        if kind == "text":
            return f"```text\n{result}\n```"
        result = _evaluate(content, names)
        return block[0]

    return _BLOCK.sub(run, page)


def _evaluate(code: str, names: dict[str, Any]) -> Any:
    """Run the code; the value of its last statement, None when that is no expression."""
    statements = ast.parse(code).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), str(PAGE), "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)


if __name__ == "__main__":
    PAGE.write_text(executed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
