"""What README and docs name, run or not: its commands, options, targets, files and extras exist.

Here they are looked at; tests/pages/test_docs.py runs them, or says which suite does.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
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


def command_named(name: str) -> click.Command | None:
    return cli.main.get_command(click.Context(cli.main), name)


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
        if words[:2] == ["docker", "compose"]:
            file = ROOT / words[words.index("-f") + 1]
            found.append(
                composed(file.read_text(encoding="utf-8"), words[words.index("--rm") + 1 :])
            )
    return found


def composed(compose: str, words: list[str]) -> list[str]:
    """The arguments of `instr` that `docker compose run SERVICE …` gives it."""
    service, *arguments = words
    own = re.search(
        rf"^  {service}:\n(?:    .*\n)*?    entrypoint: \[instr, (.*)\]$", compose, re.M
    )
    assert own is not None, f"no service {service}"
    fixed = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word.strip('" ')) for word in own[1].split(",")]
    return [*fixed, *arguments]


@pytest.mark.parametrize(
    "line", [line for line in LINES if calls(line)], ids=lambda line: f"{line.page}-{line.text}"
)
def test_every_command_and_option_exists(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *arguments in calls(line):
        command = command_named(name)
        assert command is not None, f"no command {name}"
        try:
            command.make_context(name, list(arguments))
        except click.UsageError as error:
            pytest.fail(error.format_message())


def test_a_command_in_a_container_is_found() -> None:
    """What this file does of them, not only that nothing fails."""
    run = [
        arguments for line in LINES if line.text.startswith("docker ") for arguments in calls(line)
    ]
    assert {arguments[0] for arguments in run} == {"run", "to-perfetto", "view"}
    assert ["view", "--no-browser", "--port", "9001", "session.log"] in run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_line_is_shell(page: Path) -> None:
    script = "\n".join(line.text for line in lines_of(page))
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_shell_stands_in_blocks_that_are_run(page: Path) -> None:
    """Under another name, or indented, no test would see the lines."""
    fences = re.findall(r"^(.*?```|~~~)(.*)$", page.read_text(encoding="utf-8"), re.M)[::2]
    assert {before for before, _ in fences} <= {"```"}
    assert {language for _, language in fences} <= {"sh", "python", "text", "json", ""}


def test_commands_within_sentences_exist_with_their_options() -> None:
    for page, span in SPANS:
        words = span.partition("|")[0].split()
        if words[:1] != ["instr"] or len(words) == 1 or words[1] in ("COMMAND", "--help"):
            continue
        command = command_named(words[1])
        assert command is not None, f"{page}: {span}"
        own = {"--help", "-h"}.union(*(option.opts for option in command.params))
        unknown = {word for word in words[2:] if re.match("--?[a-z]", word)} - own
        assert not unknown, f"{page}: {span}"


def test_options_within_sentences_exist() -> None:
    """But for those of other programs: docker's stand on its page."""
    ours = {opt for name in cli.COMMANDS for of in [command_named(name)] if of
            for parameter in of.params for opt in parameter.opts}  # fmt: skip
    spans = {span for page, span in SPANS if page != "docker/README.md"}
    named = {found[0] for span in spans if (found := re.match(r"--[a-z][\w-]*", span))}
    assert len(named) > 10
    assert named - ours == {"--kl-divergence"}, "llama-perplexity's"


def test_programs_of_python_have_the_options_that_are_named() -> None:
    named = {text for _, text in SPANS} | {line.text for line in LINES}
    seen = 0
    for text in named:
        module = re.search(r"python -m ((?:tools|benchmarks|tests)\.[\w.]+)(.*)", text)
        if module is None:
            continue
        path = ROOT / module[1].replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = path.read_text(encoding="utf-8")
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", module[2]):
            assert f'"{option}"' in source, f"{text}: {option}"
            seen += 1
    assert seen > 0


@pytest.mark.skipif(
    shutil.which("make") is None and "CI" not in os.environ, reason="there is no make"
)
def test_make_knows_every_target() -> None:
    targets = {text.split()[1] for _, text in SPANS if text.startswith("make ")}
    targets |= {line.text.split()[1] for line in LINES if line.text.startswith("make ")}
    assert {"demo", "test", "image", "bench"} <= targets
    done = subprocess.run(
        ["make", "-n", *sorted(targets)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_extras_that_pip_is_told_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^([\w-]+) = \[", project.partition("optional-dependencies]")[2], re.M)
    for page in PAGES:
        for names in re.findall(r'"(?:llamacpp-instr|\.)\[([\w,]+)\]"', page.read_text("utf-8")):
            assert set(names.split(",")) <= set(extras), page


def test_files_that_docker_is_given_exist() -> None:
    given = [
        words[words.index("-f") + 1]
        for line in LINES
        for words in [shlex.split(line.text)]
        if words[0] == "docker" and "-f" in words
    ]
    assert given
    assert [path for path in given if not (ROOT / path).is_file()] == []
