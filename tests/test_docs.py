"""Every command of README and docs is one that exists, and does what the page says it does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click
import pytest

from llamacpp_instr import cli
from tests import tiny_models
from tests.commands_kit import PAGES, Line, Place, lines_of
from tests.native_kit import DEMO, ROOT

LINES = [line for page in PAGES for line in lines_of(page)]
BLOCKS = [list(block) for _, block in groupby(LINES, lambda line: (line.page, line.block))]

NOT_RUN = {
    r"make( |$)": "is what runs the tests, or CI runs it (make image-test), or it takes an hour",
    r"(pip|python3? -m (pip|venv)) ": "installs into the environment; `make` does the same",
    r"docker ": "needs an engine; `make image-test` runs the commands in the image",
    r"(export INSTR_USER|mkdir -p out)": "prepares what docker is given",
    r"instr build": "fetches and compiles: tests/test_build.py",
    r"instr view": "serves until Ctrl-C: tests/test_view.py, tests/test_ui.py",
    r"instr exec .* llama_cpp\.server ": "serves until Ctrl-C: tests/test_server_load.py",
    r"instr exec .* uvicorn ": "needs a server of the reader's own",
    r"python -m tools\.(check|train)_demo_model": "needs PyTorch: tests/test_demo_model.py",
    r"(python -m tools\.patches|cd |git |cmake |PYTHONPATH=/tmp/edit|instr check /tmp/edit)":
        "edits a release that is fetched: tests/test_patches_*.py",
}  # fmt: skip


def reason(line: Line) -> str | None:
    """Why a line is not run."""
    if line.page == "docker/README.md":
        return NOT_RUN[r"docker "]
    return next((why for what, why in NOT_RUN.items() if re.match(what, line.text)), None)


def calls(line: Line) -> list[list[str]]:
    """The arguments of every `instr` in a line, behind `docker run … IMAGE` too."""
    found = []
    for words in line.words():
        if "llamacpp-instr" in words and "run" in words[:3] and "--entrypoint" not in words:
            found.append(words[words.index("llamacpp-instr") + 1 :])
        while words and "=" in words[0]:
            words = words[1:]
        if words[:1] == ["instr"]:
            found.append(words[1:])
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Models and logs that the pages speak of, made of the demo model."""
    directory = tmp_path_factory.mktemp("stock")
    shutil.copyfile(DEMO, directory / "model-F16.gguf")
    tiny_models.write_bert(directory / "encoder.gguf")
    (directory / "your-text.txt").write_text("Once upon a time, Nora was glad. " * 40)
    (directory / "prompt.txt").write_text("Once upon a time\n")
    (directory / "app.py").write_text(
        "import llama_cpp\n"
        f"model = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, verbose=False)\n"
        "print(model('Once upon a time', max_tokens=4)['choices'][0]['text'])\n"
    )
    for words in (
        ["quantize", "model-F16.gguf", "--types", "Q8_0,Q4_K_M"],
        ["run", "model-F16.gguf", "-p", "Once upon a time", "-n", "6", "--repeat", "6"],
    ):
        subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *words],
            cwd=directory, env=environment, check=True, capture_output=True,
        )  # fmt: skip
    return directory


def named(block: list[Line]) -> str:
    return f"{block[0].page}-{block[0].block}"


@pytest.mark.parametrize("block", BLOCKS, ids=named)
def test_every_command_and_option_exists(
    block: list[Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block:
        for name, *arguments in calls(line):
            command = cli.main.get_command(click.Context(cli.main), name)
            assert command is not None, f"{line.page}: no command {name}: {line.text}"
            try:
                command.make_context(name, list(arguments))
            except click.UsageError as error:
                pytest.fail(f"{line.page}: {line.text}: {error.format_message()}")


# the examples of one command stand beside each other, and some stand on another page too
EXAMPLES = "docs/cli.md"
README = [line.text for line in LINES if line.page == "README.md"]
ELSEWHERE = [line.text for line in LINES if line.page != EXAMPLES]
RUNNABLE = [
    run
    for block in BLOCKS
    for run in ([[line] for line in block] if block[0].page == EXAMPLES else [block])
    if not all(map(reason, run))
    and not (run[0].page == EXAMPLES and any(text.startswith(run[0].text) for text in ELSEWHERE))
]


@pytest.mark.parametrize("block", RUNNABLE, ids=named)
def test_the_commands_of_a_block_work_one_after_the_other(
    block: list[Line], stock: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    place = Place(tmp_path / "place", stock, environment)
    for line in block:
        if reason(line):
            continue
        if line.page != "README.md" and line.text in README:
            continue  # it works
        if shutil.which("jq") is None:
            line = replace(line, text=line.text.partition("| jq ")[0])
        done = place.run(line)
        assert done.returncode == 0, f"{line.page}: {line.text}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{line.page}: {line.text}\n{done.stderr}"
    leftover = [path.name for path in place.directory.rglob("*") if path.suffix == ".part"]
    assert leftover == []


def test_q4_k_against_q8_0_begins_with_one_file(
    stock: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Three commands, and the reader has to have nothing but the F16 model."""
    block = next(b for b in BLOCKS if b[0].text.startswith("instr quantize model-F16.gguf"))
    assert [line.text.split()[1] for line in block] == ["quantize", "quality", "compare"]
    place = Place(tmp_path / "place", stock, environment)
    assert place.run(block[0]).returncode == 0
    wanted = {word for line in block for word in line.text.split() if word.endswith(".gguf")}
    assert {path.name for path in place.directory.glob("*.gguf")} == wanted
    assert place.laid == ["model-F16.gguf"]


def test_what_is_not_run_is_there() -> None:
    """A reason that no line needs any more goes away."""
    idle = [what for what in NOT_RUN if not any(re.match(what, line.text) for line in LINES)]
    assert idle == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for test in re.findall(r"`(?:python -m )?pytest ([^`]+)`", text):
        for path in test.split():
            assert (ROOT / path).is_file(), path
    for module in re.findall(r"python -m ((?:tools|benchmarks|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", os.sep)
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M), target
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:tests|tools|benchmarks|llamacpp_instr|converters)/[^`*]+)`", text
    ):
        at = ROOT / path
        assert at.exists() or at.with_suffix(".py").is_file(), path


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    listed = re.findall(r"^\| \[([\w-]+\.md)\]", index, re.M)
    assert len(listed) == len(set(listed))
    assert pages <= set(listed)


def test_every_module_has_a_room_in_the_house() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.split("## Rooms\n")[1].split("\nImports")[0].splitlines()[3:]
    named = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[2])]
    native = {
        p.stem
        for p in (ROOT / "llamacpp_instr").iterdir()
        if p.name[0] != "_" and p.suffix in ("", ".py")
    }
    shared = {"report", "render", "page", "charts"}
    assert sorted(named) == sorted((native - {"cli", "data", "patches"}) | shared)
