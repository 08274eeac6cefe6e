"""The lines of README and docs that import a model. tests/peers/sources_suite.py runs them."""

from __future__ import annotations

import re

from tests.kit.commands_kit import PAGES, Line, lines_of

HUGGING_FACE, META, ADAPTER = "Llama-3.2-1B", "llama-2-7b", "adapter"
"""the folders that the pages speak of"""

_IMPORTS = re.compile(rf"instr import |instr run {HUGGING_FACE} |make test-peers$")


def import_lines() -> list[Line]:
    """Lines of all pages, in order."""
    return [line for page in PAGES for line in lines_of(page) if _IMPORTS.match(line.text)]
