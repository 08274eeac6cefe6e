"""Every command of README and docs is one that exists, and does what the page says it does."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random

import pytest

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.source_tree import patches_dir, read_upstream
from llamacpp_instr.log.reader import read_events
from tests.debugger import test_dap_docs, test_debug_page_server
from tests.exports import test_otlp
from tests.image import engine_lines
from tests.kit import tiny_models
from tests.kit.adapters import write_adapter
from tests.kit.backends import needs_vulkan, vulkan_environment, vulkan_module
from tests.kit.commands_kit import PAGES, Line, Place, blocks_of, lines_of
from tests.kit.made_log import encode
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.nursery import start_shell_nursery
from tests.kit.rpc_logs import Server, made_logs
from tests.kit.split_log import split_log
from tests.live import test_live_command, test_live_otlp, test_tui
from tests.newcomer import suite
from tests.pages import test_docs_servers
from tests.peers import import_lines
from tests.probe import test_probe
from tests.recording import test_devices_vulkan
from tests.weights_view import test_weights_page

LINES = [line for page in PAGES for line in lines_of(page)]
BLOCKS = [list(block) for _, block in groupby(LINES, lambda line: (line.page, line.block))]

OTHERS = {
    "make test": [
        *test_docs_servers.RUNS,
        *test_live_command.RUNS,
        *test_tui.RUNS,
        test_otlp.SEND,
        test_live_otlp.RUN,
        *test_dap_docs.RUNS,
        *test_debug_page_server.RUNS,
        *test_weights_page.RUNS,
        test_devices_vulkan.RUN,
        *test_probe.RUNS,
    ],
    "make test-docs": suite.RUNS,
    "make docker-test": engine_lines.docker_lines(),
    "make test-peers": [*import_lines.import_lines(), *import_lines.against_lines()],
}
"""what else runs lines, and which: they need an index or an engine, or serve until Ctrl-C"""

WITH_PYTHON = ("debug-a-model", "record-my-app")
"""guides whose Python is run here"""

# run as one script, by a test of its own
PATCHES = "patches/README.md"


def runner(line: Line) -> str | None:
    """What else runs a line; None where it is run here."""
    if line.text.startswith("instr build") and not sdist_at_hand():
        return "make test-docs"
    return next((who for who, lines in OTHERS.items() if line in lines), None)


def sdist_at_hand() -> bool:
    """Whether what `instr build` starts from need not be fetched; in CI it is fetched."""
    version = read_upstream(patches_dir()).version
    kept = cache_dir() / "sdist" / f"llama_cpp_python-{version}.tar.gz"
    return kept.is_file() or "CI" in os.environ


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, quick: str) -> Path:
    """Models and logs that the pages mention, made from the demo model."""
    directory = tmp_path_factory.mktemp("stock")
    shutil.copyfile(DEMO, directory / "model-F16.gguf")
    tiny_models.write_bert(directory / "encoder.gguf")
    write_adapter(directory / "adapter.gguf", DEMO)
    (directory / "your-text.txt").write_text("Once upon a time, Nora was glad. " * 40)
    (directory / "prompt.txt").write_text("Once upon a time\n")
    for name in ("machine.json", "faster.json"):
        shutil.copyfile(ROOT / "tests" / "fixtures" / "machine.json", directory / name)
    (directory / "app.py").write_text(
        "import llama_cpp\n"
        f"model = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, verbose=False)\n"
        "print(model('Once upon a time', max_tokens=4)['choices'][0]['text'])\n"
    )
    (directory / "chip.toml").write_text(
        '[[engine]]\nname = "matrix"\ncount = 2\nruns = ["matrix"]\n'
        '[[engine]]\nname = "other"\nruns = ["vector", "memory"]\n'
    )
    (directory / "graph.toml").write_text(
        '[[task]]\nname = "a"\nns = 30\n[[task]]\nname = "b"\nns = 20\nafter = ["a"]\n'
    )
    (directory / "chat.toml").write_text("prompt = 40\nanswer = 20\n")
    for name in ("slow-server.log.gz", "faster-server.log.gz"):
        shutil.copyfile(ROOT / "docs" / "tutorials" / name, directory / name)
    gpu = (ROOT / "tests" / "fixtures" / "vulkan-timed.log.gz").read_bytes()
    (directory / "gpu.log").write_bytes(gzip.decompress(gpu))
    recorded = [event for _, event in read_events(directory / "faster-server.log.gz")]
    parts = split_log(recorded, 2, Random(1))
    for name, events in zip(("server.log", "server.part2.log"), parts, strict=True):
        (directory / name).write_bytes(encode(events))
    made_logs(1, [Server("10.0.0.2"), Server("10.0.0.3")]).write(directory)
    for words in (
        ["quantize", "model-F16.gguf", "--types", "Q8_0,Q4_K_M"],
        ["run", "model-F16.gguf", "-p", "Once upon a time", "-n", "6", "--repeat", "6"],
        ["run", "model-F16.gguf", "-p", "Hi", "-n", "2", "--stats", "l_out-*", "--log", "f16.log"],
        ["run", "demo", "-p", "Hi", "-n", "2", "--lora", "adapter.gguf", "--log", "adapted.log"],
        [
            "run",
            "model-Q4_K_M.gguf",
            "-p",
            "Hi",
            "-n",
            "2",
            "--stats",
            "l_out-*",
            "--log",
            "q4.log",
        ],
        ["collect", "session.log", "-o", "fleet"],
        ["run", "demo", "-p", "Once upon a time", "-n", "4", "--log", "demo.log"],
        ["to-flashinfer", "session.log", "-o", "flashinfer-trace"],
    ):
        subprocess.run(
            ["bash", "-c", f"{quick} {shlex.join(words)}"],
            cwd=directory, check=True, capture_output=True,
        )  # fmt: skip
    session = (directory / "session.log").read_text()
    identity = json.loads(session.partition("\n")[0])["id"]
    for side in ("main", "branch", "v1", "v2", "v3"):
        for name in (f"{side}-1", f"{side}-2"):
            # of another process
            (directory / f"{name}.log").write_text(session.replace(identity, name, 1))
    return directory


@pytest.fixture(scope="module")
def quick(environment: dict[str, str]) -> Iterator[str]:
    with start_shell_nursery(environment) as command:
        yield command


def named(block: list[Line]) -> str:
    return f"{block[0].page}-{block[0].block}"


def on_device() -> dict[str, str]:
    return {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}


def uses_device(block: list[Line]) -> bool:
    return any(re.search(r"--gpu-layers [1-9]", line.text) for line in block)


# the examples of one command form one block, and some also occur on another page
EXAMPLES = "docs/reference/commands.md"
README = [line.text for line in LINES if line.page == "README.md"]
ELSEWHERE = [line.text for line in LINES if line.page != EXAMPLES]
RUNNABLE = [
    run
    for block in BLOCKS
    for run in ([[line] for line in block] if block[0].page == EXAMPLES else [block])
    if not all(map(runner, run))
    and run[0].page != PATCHES
    and not (run[0].page == EXAMPLES and run[0].text in ELSEWHERE)
]
FIRST: dict[str, Line] = {}
"""the first line with a text that is run here"""
for tried in (line for run in RUNNABLE for line in run if not runner(line)):
    FIRST.setdefault(tried.text, tried)


@pytest.mark.native
@pytest.mark.parametrize(
    "block",
    [pytest.param(run, marks=needs_vulkan) if uses_device(run) else run for run in RUNNABLE],
    ids=named,
)
def test_the_commands_of_a_block_work_one_after_the_other(
    block: list[Line], stock: Path, tmp_path: Path, environment: dict[str, str], quick: str
) -> None:
    # what the README shows first is run as a reader runs it
    is_first = block[0].page == "README.md"
    if uses_device(block):
        environment = environment | on_device()
    place = Place(tmp_path / "place", stock, environment, "" if is_first else quick)
    for line in block:
        if runner(line):
            continue
        if line.page != "README.md" and line.text in README:
            continue  # it works
        if line is block[0] and line != FIRST[line.text] and " -o " not in line.text:
            continue  # so does this, with the same files, and no other reads what it writes
        if shutil.which("jq") is None:
            line = replace(line, text=line.text.partition("| jq ")[0])
        done = place.run(line)
        assert done.returncode == 0, f"{line.page}: {line.text}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{line.page}: {line.text}\n{done.stderr}"
    leftover = [path.name for path in place.directory.rglob("*") if path.suffix == ".part"]
    assert leftover == []


@pytest.mark.native
@pytest.mark.skipif(not sdist_at_hand(), reason="the sdist is not in the cache")
def test_the_patches_are_edited_and_exported_as_their_page_says(
    stock: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In a copy of the checkout; what is exported from an untouched tree is what was there."""
    (block,) = (block for block in BLOCKS if block[0].page == PATCHES)
    script = "\n".join(["set -e", *(line.text for line in block)])
    assert "/tmp/edit" in script
    place = Place(tmp_path / "place", stock, {**environment, "PYTHONPATH": ""})
    for name in ("patches", "tools", "llamacpp_instr", "converters", "pyproject.toml"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, place.directory / name, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, place.directory / name)
    done = place.run_script(script.replace("/tmp/edit", str(tmp_path / "edit")))
    assert done.returncode == 0, done.stderr + done.stdout
    assert contents(place.directory / "patches") == contents(ROOT / "patches")


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.mark.native
@pytest.mark.parametrize(
    "code",
    [
        code
        for page in ("README.md", *(f"docs/how-to/{name}.md" for name in WITH_PYTHON))
        for code in blocks_of(ROOT / page, "python")
    ],
)
def test_the_python_of_a_page_runs(
    code: str, stock: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    place = Place(tmp_path / "place", stock, environment)
    if "record" not in code:
        shutil.copyfile(stock / "session.log", place.directory / "session.log")
    (place.directory / "code.py").write_text(code, encoding="utf-8")
    done = place.run_script("python code.py && instr check *.log")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_line_is_run_somewhere() -> None:
    """By this file, or by one of the others; a new line is tried here unless another takes it."""
    run = {line.text for block in RUNNABLE for line in block if not runner(line)}
    run |= {line.text for line in LINES if line.page == PATCHES}
    run |= {line.text for lines in OTHERS.values() for line in lines}
    assert [line for line in LINES if line.text not in run] == []
    assert all(OTHERS.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for test in re.findall(r"`(?:python -m )?pytest ([^`]+)`", text):
        for path in re.findall(r"tests/\S+", test):
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
        if path.endswith((".cpp", ".h", "CMakeLists.txt")):
            continue  # llama.cpp's
        at = ROOT / path
        assert at.exists() or at.with_suffix(".py").is_file(), path


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"README.md"}
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): ", index, re.M)
    assert len(listed) == len(set(listed))
    assert pages == {link for link in listed if not link.startswith("..")}


def test_a_page_has_the_title_that_the_index_names() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    for title, link in re.findall(r"^- \[([^]]+)\]\(([^)]+)\): ", index, re.M):
        assert (docs / link).read_text(encoding="utf-8").startswith(f"# {title}\n"), link


def test_a_page_is_listed_in_the_group_of_its_folder() -> None:
    """A question of the first table leads to its page at once, so to all within two clicks."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    first, *groups = index.split("\n## ")
    assert len(re.findall(r"^\| .+\? \| \[", first, re.M)) == 10
    folders = {"Tutorials": "tutorials", "How-to guides": "how-to"}
    assert len(groups) == 4
    for group in groups:
        title = group.partition("\n")[0]
        folder = folders.get(title, title.lower())
        links = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", group, re.M)
        assert links, title
        assert all(re.match(rf"({folder}|\.\.)/", link) for link in links), title
