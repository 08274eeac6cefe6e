"""Idioms that a native reader stumbles over stay out of the product and its pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TEXTS = sorted(
    path
    for pattern in (
        "*.md", "docs/**/*.md", "patches/*.md", "docker/*.md", "llamacpp_instr/**/*.py",
        "converters/**/*.py", "converters/**/*.html", "llamacpp_instr/**/*.html",
        "llamacpp_instr/**/*.js", "converters/**/*.js",
    )
    for path in ROOT.glob(pattern)
)  # fmt: skip
IDIOMS = (
    r"what somebody",
    r"\b[Bb]y phase, context and mark count",
    r"\bwhoever\b",
    r"\bof which\b",
    r"\bbetter \w+ it again",
    r"\bthat one is \w+ into",
    r"\bhas what really\b",
    r"\bOf a [A-Z]{3,}",
    r"\bWhole are\b",
    r"\b(the|its|their) begin\b(?! (after|directly|at|with|in)\b)",
    r"\b[Ss]omebody\b|\b[Nn]obody\b",
    r", too[.;:,)\"]",
    r"\bso many\b",
    r"\bby (itself|themselves)\b",
    r"\bwhose like\b",
    r"\bto the bit\b",
    r"\bin turns\b",
    r"\b[Ww]hat became of\b",
    r"^\s*\"\"\"Of (a|the|each|all|what|so)\b",
    r"\b(results?|repl(y|ies)) (is|are|was|were) there\b",
    r"\bis none of\b",
)
"""each with what a native writer would say: speed and latency; a row by phase counts; the caller
that; whose; record it again; a remote machine; contains; for a MODEL; not divided; the start; the
user, no process; also; this many; on its own; unlike any; bit-identical; alternately, interleaved;
what happened to; a noun; is ready; is not one of"""


@pytest.mark.parametrize("idiom", IDIOMS)
def test_no_text_has_it(idiom: str) -> None:
    assert len(TEXTS) > 200
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(idiom, line)
    ]
    assert found == []
