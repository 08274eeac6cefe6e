"""Every command of README and docs is one that exists, and does what the page says it does."""

from __future__ import annotations

import gzip
import json
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

from llamacpp_instr.log.reader import read_events
from tests.debugger import test_dap_docs, test_debug_page_server
from tests.exports import test_otlp
from tests.kit import tiny_models
from tests.kit.adapters import write_adapter
from tests.kit.commands_kit import PAGES, Line, Place, blocks_of, lines_of, measure_machine
from tests.kit.made_log import encode
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.nursery import start_shell_nursery
from tests.kit.rpc_logs import Server, made_logs
from tests.kit.split_log import split_log
from tests.live import test_live_command, test_tui
from tests.parts.devices import test_devices_vulkan
from tests.parts.image import engine_lines
from tests.parts.newcomer import test_newcomer as suite
from tests.parts.pages import test_docs_servers
from tests.parts.peers import import_lines
from tests.parts.programs import test_live_otlp
from tests.probe import test_probe
from tests.weights_view import test_weights_page

LINES = [line for page in PAGES for line in lines_of(page)]
BLOCKS = [list(block) for _, block in groupby(LINES, lambda line: (line.page, line.block))]
OTHERS = {
    "make test-all": [
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
    "make test-all PARTS=newcomer": suite.RUNS,
    "make test-all PARTS=engine": engine_lines.docker_lines(),
    "make test-all PARTS=peers": [*import_lines.import_lines(), *import_lines.against_lines()],
}
"""what else runs lines, and which: they need an index or an engine, or serve until Ctrl-C"""
# run as one script, by a test of its own
PATCHES = "patches/README.md"


def runner(line: Line) -> str | None:
    """What else runs a line; None where it is run here."""
    return next((who for who, lines in OTHERS.items() if line in lines), None)


# the examples of one command form one block, and some also occur on another page
EXAMPLES = "docs/reference/commands.md"
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


WITH_PYTHON = ("debug-a-model", "record-my-app")
"""guides whose Python is run here"""


@pytest.fixture(scope="module")
def stock(
    tmp_path_factory: pytest.TempPathFactory, quick: str, environment: dict[str, str]
) -> Path:
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
    measure_machine(directory, environment)
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


def uses_device(block: list[Line]) -> bool:
    return any(re.search(r"--gpu-layers [1-9]", line.text) for line in block)


README = [line.text for line in LINES if line.page == "README.md"]


@pytest.mark.native
@pytest.mark.parametrize(
    "block", [block for block in RUNNABLE if not uses_device(block)], ids=named
)
def test_the_commands_of_a_block_work_one_after_the_other(
    block: list[Line], stock: Path, tmp_path: Path, environment: dict[str, str], quick: str
) -> None:
    run_block(block, stock, tmp_path, environment, quick)


def run_block(
    block: list[Line], stock: Path, tmp_path: Path, environment: dict[str, str], quick: str
) -> None:
    """Run the lines of a block that nothing else runs; each must succeed."""
    # what the README shows first is run as a reader runs it
    is_first = block[0].page == "README.md"
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
