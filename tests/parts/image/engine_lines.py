"""The lines of README and docs that need a container engine, and why some are not run.

tests/parts/image/test_engine.py runs them.
"""

from __future__ import annotations

import re

from tests.kit.commands_kit import PAGES, Line, lines_of
from tests.kit.native_kit import ROOT

NOT_RUN = {
    r"docker build --build-arg BACKEND=cuda ": "its base image comes from a registry only",
    r"docker run .*--gpus all ": "needs that image, and an NVIDIA GPU",
    r"docker build --build-arg BACKEND=vulkan ": "make image-vulkan-test builds and runs it",
    r"docker run .*--device /dev/dri ": "needs that image, and a GPU",
}
"""beginning of a line -> why it is not run"""

COMPOSE = ROOT / "docker" / "compose.yaml"

_NEEDS_AN_ENGINE = re.compile(r"docker |make image$")


def docker_lines() -> list[Line]:
    """Lines from the blocks of all pages, their running text, and the head of the compose file."""
    return [line for line in _all_lines() if _NEEDS_AN_ENGINE.match(line.text)]


def lead(line: Line) -> list[str]:
    """The lines above a line in its block that it needs: folders, variables."""
    lines = _all_lines()
    above = [
        other.text
        for other in lines[: lines.index(line)]
        if (other.page, other.block) == (line.page, line.block)
    ]
    return [text for text in above if not _NEEDS_AN_ENGINE.match(text)]


def reason(line: Line) -> str | None:
    return next((why for what, why in NOT_RUN.items() if re.match(what, line.text)), None)


def kind(line: Line) -> str:
    """The expected behaviour of a line: builds, serves until it is stopped, lists, or runs."""
    if re.match(r"make image$|docker build ", line.text):
        return "builds"
    if re.match(r"docker images ", line.text):
        return "lists"
    if re.match(r"docker (run|compose .* run) ", line.text):
        return "serves" if re.search(r" view ", line.text) else "runs"
    raise ValueError(f"{line.page}: no behaviour is defined for a line of this kind: {line.text}")


def _all_lines() -> list[Line]:
    return [*(line for page in PAGES for line in lines_of(page)), *_of_text(), *_of_compose()]


def _of_text() -> list[Line]:
    """Commands with options in running text, as `docker build -f …`; not the word `docker stop`."""
    return [
        Line(page.relative_to(ROOT).as_posix(), -number, text)
        for page in PAGES
        for number, text in enumerate(
            re.findall(r"(?<!`)`(docker \w+ -[^`\n]+)`(?!`)", page.read_text(encoding="utf-8")), 1
        )
    ]


def _of_compose() -> list[Line]:
    head = COMPOSE.read_text(encoding="utf-8").partition("\nname:")[0]
    shown = re.findall(r"^#   (\S.*?)(?:\s{3,}.*)?$", head, re.M)
    return [Line(COMPOSE.relative_to(ROOT).as_posix(), 0, text) for text in shown]
