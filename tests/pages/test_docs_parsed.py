"""What README and docs name exists: commands with their options, and extras of the package.

This also parses the lines that need a container; tests/pages/test_docs.py runs the others, or says
which suite does.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from llamacpp_instr import cli
from tests.kit.commands_kit import PAGES, Line, lines_of
from tests.kit.native_kit import ROOT

LINES = [line for page in PAGES for line in lines_of(page)]
SPANS = [
    (page.relative_to(ROOT).as_posix(), span)
    for page in PAGES
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8"))
]
IMAGE = re.compile(r"llamacpp-instr(:\w+)?")


def command_named(name: str) -> click.Command:
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None, f"no command {name}"
    return command


def calls(line: Line) -> list[list[str]]:
    """The arguments of every `instr` in a line, in a container too."""
    found = []
    for words in line.words():
        while words and "=" in words[0]:
            words = words[1:]
        if words[:1] == ["instr"]:
            found.append(words[1:])
        if words[:2] == ["docker", "run"] and "--entrypoint" not in words:
            image = next(i for i, word in enumerate(words) if IMAGE.fullmatch(word))
            found.append(words[image + 1 :])
    return found


@pytest.mark.parametrize(
    "line", [line for line in LINES if calls(line)], ids=lambda line: f"{line.page}-{line.text}"
)
def test_every_command_and_option_exists(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *arguments in calls(line):
        try:
            command_named(name).make_context(name, list(arguments))
        except click.UsageError as error:
            pytest.fail(error.format_message())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_shell_is_in_blocks_that_are_run(page: Path) -> None:
    """Under another name, or indented, no test would see the lines."""
    fences = re.findall(r"^(.*?```|~~~)(.*)$", page.read_text(encoding="utf-8"), re.M)[::2]
    assert {before for before, _ in fences} <= {"```"}
    known = {"sh", "python", "text", "json", "lua", "toml", ""}
    assert {language for _, language in fences} <= known


def test_commands_and_options_within_sentences_exist() -> None:
    every = {
        opt for name in cli.COMMANDS for param in command_named(name).params for opt in param.opts
    }
    every |= {"--kl-divergence"}  # llama-perplexity's
    every |= {"--cache-ram", "--ctx-checkpoints", "--swa-full", "--ubatch-size"}  # llama-server's
    every.update(*cli.OLD_OPTIONS.values())
    for page, span in SPANS:
        first, *words = span.partition("|")[0].split() or [""]
        if first == "instr" and words and words[0] not in ("COMMAND", "--help"):
            own = {"--help", "-h"}.union(*(param.opts for param in command_named(words[0]).params))
            unknown = {word for word in words if re.match("--?[a-z]", word)} - own
            assert not unknown, f"{page}: {span}"
        elif re.match("--[a-z]", first) and page != "docker/README.md":
            assert re.match(r"[\w-]+", first)[0] in every, f"{page}: {span}"  # type: ignore[index]


def test_extras_in_lines_of_pip_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^([\w-]+) = \[", project.partition("optional-dependencies]")[2], re.M)
    for page in PAGES:
        for names in re.findall(r'"(?:llamacpp-instr|\.)\[([\w,]+)\]"', page.read_text("utf-8")):
            assert set(names.split(",")) <= set(extras), page
