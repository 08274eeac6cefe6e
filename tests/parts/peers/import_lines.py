"""The lines of README and docs that need PyTorch.

tests/parts/peers/test_sources.py runs those that import a model, and
tests/parts/peers/test_against.py those that compare one with its folder.
"""

from __future__ import annotations

import re

from tests.kit.commands_kit import PAGES, Line, lines_of

HUGGING_FACE, META, ADAPTER = "Llama-3.2-1B", "llama-2-7b", "adapter"
"""the folders that the pages mention"""

_IMPORTS = re.compile(rf"instr import |instr run {HUGGING_FACE} |make test-all PARTS=peers$")
_COMPARES = re.compile(rf"instr validate .*--reference {HUGGING_FACE}")


def import_lines() -> list[Line]:
    """Lines of all pages, in order."""
    return _lines(_IMPORTS)


def against_lines() -> list[Line]:
    """Those that compare; they are about the file llama.gguf."""
    return _lines(_COMPARES)


def _lines(beginning: re.Pattern[str]) -> list[Line]:
    return [line for page in PAGES for line in lines_of(page) if beginning.match(line.text)]
