"""No docker line of README and docs is left out: `make docker-test` runs it, or there is a reason.

What runs them is tests/image/engine_suite.py, which takes an engine and minutes; this takes the
same lists, and looks whether they are whole.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.image.engine_lines import COMPOSE, NOT_RUN, docker_lines, kind, lead, reason
from tests.kit.commands_kit import PAGES
from tests.kit.native_kit import ROOT

LINES = docker_lines()
RUN = [line for line in LINES if reason(line) is None]

# how a command begins; `docker stop` alone is a word of a sentence
COMMAND = re.compile(
    r"^(?:# *|\$ *|.*`)?((?:docker (?:build|run|compose|images|pull|push|stop|exec|inspect) -?\S"
    r"|make image$|make image\s*#).*)$"
)


@pytest.mark.parametrize("line", RUN, ids=lambda line: f"{line.page}: {line.text}")
def test_something_is_expected_of_a_line_that_runs(line: object) -> None:
    assert kind(line) in ("builds", "lists", "runs", "serves")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page", [*PAGES, COMPOSE], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_command_of_a_page_is_among_the_lines(page: Path) -> None:
    """Also one that stands in a block of another language, or in running text."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [found[1] for line in text.splitlines() if (found := COMMAND.match(line))]
    known = [line.text for line in LINES if line.page == page.relative_to(ROOT).as_posix()]
    assert [one for one in shown if not any(one.startswith(line) for line in known)] == []
    assert len(shown) >= len(known)


def test_every_page_that_could_have_one_is_looked_at() -> None:
    """A page beside the known ones: none speaks of docker."""
    pages = {path for path in ROOT.glob("*/*.md") if path.parts[-2][0] != "."}
    pages |= set(ROOT.glob("*.md"))
    others = [path for path in pages - set(PAGES) if "docker run" in path.read_text("utf-8")]
    assert others == []


def test_a_reason_is_of_a_line() -> None:
    """One that no line needs any more goes away."""
    idle = [what for what in NOT_RUN if not any(re.match(what, line.text) for line in LINES)]
    assert idle == []
    kept_apart = [line.text for line in LINES if reason(line) is not None]
    assert all(":cuda" in text for text in kept_apart)


def test_what_stands_above_a_line_only_prepares_it() -> None:
    """The suite runs it before the line: folders, variables, nothing else."""
    above = {text.split()[0] for line in RUN for text in lead(line)}
    assert above <= {"mkdir", "export"}
