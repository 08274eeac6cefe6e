"""The docker lines of README and docs, as written, on a real Docker engine.

Not part of `make test`: `make docker-test` makes the substitute for the base image and then runs
this as root, which starts an engine of its own (engine.py). The lines come from the pages
(engine_lines.py). A user without root types a page's lines in order (reader.py), in a copy of the
checkout, so earlier lines of the page must provide what a line needs.

The first line that builds uses the layers that the engine still has; to build from scratch, remove
the folder `engine` in the cache of build_image.sh. Compiled objects are also kept in this machine's
ccache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import trace_processor
from tests.kit.commands_kit import Line
from tests.kit.native_kit import ROOT
from tests.parts.image import engine_parts
from tests.parts.image.engine import Engine, running
from tests.parts.image.engine_lines import docker_lines, kind, lead, reason
from tests.parts.image.reader import GID, UID, Reader
from tests.parts.image.test_image import AIM, owners

LINES = [line for line in docker_lines() if reason(line) is None]
CACHE = Path(os.environ.get("BUILD_IMAGE_CACHE", "/nowhere"))

BUILD_SECONDS = 7200
"""for all of llama.cpp, in 14 variants, on two shared CPUs"""

ReaderOf = Callable[[str], Reader]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """With the substitute for the base image, and without our images."""
    engine_parts.install_engine()
    base = re.findall(r"^ARG BASE=(.*)$", (ROOT / "docker/Dockerfile").read_text(), re.M)[0]
    with running(CACHE / "engine") as engine:
        archive = CACHE / "base.tar"
        archive.unlink(missing_ok=True)
        subprocess.run(
            ["buildah", "push", "--quiet", base, f"docker-archive:{archive}:{base}"], check=True
        )
        engine.docker("load", "--input", str(archive))
        archive.unlink()
        if engine.docker("images", "--quiet", "llamacpp-instr"):
            engine.docker("rmi", "--force", "--no-prune", "llamacpp-instr")
        engine.let_in(UID, GID)
        yield engine


@pytest.fixture(scope="session")
def reader_of(engine: Engine) -> ReaderOf:
    """One reader per page: later lines find what earlier lines left."""
    # beside the socket, because other users cannot enter pytest's folders and root's cache
    place = Path(engine.host.removeprefix("unix://")).parent / "readers"
    place.mkdir()
    compose = shutil.copy2(engine_parts.compose_plugin(CACHE / "compose"), place)
    readers: dict[str, Reader] = {}

    def of(page: str) -> Reader:
        if page not in readers:
            readers[page] = Reader(
                place / page.replace("/", "-"), engine.host, compose, BUILD_SECONDS
            )
        return readers[page]

    return of


def access() -> list[str]:
    """The mounts that a step of the build needs to reach a package registry, and ccache."""
    kept = Path(os.environ.get("CCACHE_DIR", Path.home() / ".cache/ccache"))
    kept.mkdir(parents=True, exist_ok=True)
    return [*os.environ["BUILD_IMAGE_MOUNTS"].splitlines(), f"{kept}:/root/.cache/ccache"]


def named(line: Line) -> str:
    words = line.text.split()
    return f"{line.page}: {' '.join(words[:2])} .. {words[-1]}"


# lines that build come first: the others need the image
@pytest.mark.parametrize("line", [line for line in LINES if kind(line) == "builds"], ids=named)
def test_a_line_builds_the_image(line: Line, engine: Engine, reader_of: ReaderOf) -> None:
    with engine.access(access()):
        done = reader_of(line.page).type([*lead(line), line.text])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^Successfully tagged llamacpp-instr:latest$", done.stdout, re.M)
    assert size(engine) <= AIM


# then the others, in the order of their pages
@pytest.mark.parametrize("line", [line for line in LINES if kind(line) != "builds"], ids=named)
def test_a_line_does_what_its_page_says(line: Line, engine: Engine, reader_of: ReaderOf) -> None:
    reader = reader_of(line.page)
    if kind(line) == "serves":
        serves(line, engine, reader)
    else:
        {"runs": runs, "lists": lists}[kind(line)](line, reader)
    assert engine.docker("ps", "--all", "--quiet") == "", "a container is left"


def runs(line: Line, reader: Reader) -> None:
    """The line ends on its own, and its output file is complete and belongs to the reader."""
    out = reader.checkout / "out"
    before = written(out)
    done = reader.type([*lead(line), line.text])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.split()) > 0
    new = {path.suffix for path, _ in written(out) - before}
    records = re.search(r" run (?!--)\S+ --prompt ", line.text) is not None
    converts = re.search(r" (to-perfetto|convert) ", line.text) is not None
    assert new == ({".log"} if records else {".pftrace"} if converts else set())
    assert owners(out) <= {f"{UID}:{GID}"}
    for log in out.glob("*.log"):
        assert check(log) == 0
    for trace in out.glob("*.pftrace"):
        assert [imported["problems"] for imported in trace_processor.check(trace)] == [[]]


def serves(line: Line, engine: Engine, reader: Reader) -> None:
    """Serves a page until Ctrl-C or `docker stop`; neither has to kill it (status 137)."""
    script = [*lead(line), line.text]

    for stop_it in ("Ctrl-C", "docker stop"):
        with reader.terminal(script) as terminal:
            address = terminal.wait_for(r"http://127\.0\.0\.1:9001/\S*(?=\r)")
            assert "<html" in ask(9001)
            assert "session.pftrace" in address
            if stop_it == "Ctrl-C":
                terminal.press_ctrl_c()
            else:
                engine.docker("stop", *engine.docker("ps", "--quiet").split())
            assert terminal.end() == 0, terminal.text


def lists(line: Line, reader: Reader) -> None:
    """Prints the size on the page, within 1 %: another Debian release may change some bytes."""
    done = reader.type([line.text])
    (megabytes,) = re.findall(r"^llamacpp-instr\s+latest\s.*\s(\d+)MB$", done.stdout, re.M)
    page = (ROOT / line.page).read_text(encoding="utf-8")
    (written_there,) = re.findall(rf"^{re.escape(line.text)}\s+# (\d+) MB$", page, re.M)
    assert int(megabytes) == pytest.approx(int(written_there), rel=0.01)


# --- statements of the text beside the lines ---

RECORD = (
    "docker run {options} --user $(id -u):$(id -g) -v $PWD/out:/out llamacpp-instr"
    " run demo --prompt {prompt} {more}"
)
LONG = "-n 400 --repeat 50"
"""minutes: a run for tests that stop it"""


@pytest.fixture
def reader(engine: Engine, reader_of: ReaderOf, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """A reader with only the image and an empty folder."""
    reader = reader_of("text-" + re.sub(r"\W+", "-", request.node.name))
    assert reader.type(["mkdir out"]).returncode == 0
    yield reader
    left = engine.docker("ps", "--all", "--quiet").split()
    if left:
        engine.docker("rm", "--force", *left)


def test_docker_stop_lets_a_command_leave_whole_files(engine: Engine, reader: Reader) -> None:
    line = RECORD.format(options="--detach", prompt='"Once upon a time"', more=LONG)
    container = reader.type([line]).stdout.strip()
    wait_until(lambda: len(engine.docker("logs", container).split()) > 10)
    engine.docker("stop", container)
    assert state(engine, container)["ExitCode"] == 130, "Ctrl-C's own; 137 if it had to be killed"
    assert_one_whole_log(reader)


@pytest.mark.parametrize("options", ["--rm -it", "--rm"])
def test_ctrl_c_does_so_with_a_terminal_in_the_container_and_without(
    options: str, reader: Reader
) -> None:
    line = RECORD.format(options=options, prompt='"Once upon a time"', more=LONG)
    with reader.terminal([line]) as terminal:
        terminal.wait_for("run 2")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
    assert_one_whole_log(reader)


def test_i_gives_a_command_standard_input(reader: Reader) -> None:
    line = RECORD.format(options="--rm -i", prompt="-", more="-n 1")
    done = reader.type([line], stdin="The cat")
    assert done.returncode == 0, done.stderr
    with (reader.checkout / "out/session.log").open() as log:
        assert json.loads(next(log))["args"]["prompts"] == ["The cat"]


def test_t_gives_it_the_progress_bar(reader: Reader) -> None:
    with reader.terminal(["docker run --rm -t llamacpp-instr quality demo demo"]) as terminal:
        terminal.wait_for("\x1b.*Comparing outputs")
        terminal.press_ctrl_c()
        assert terminal.end() == 130


def test_a_folder_that_was_not_made_is_roots(reader: Reader) -> None:
    line = RECORD.format(options="--rm", prompt='"The cat"', more="-n 1")
    done = reader.type([line.replace("/out:", "/new:")])
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    folder = (reader.checkout / "new").stat()
    assert (folder.st_uid, folder.st_gid) == (0, 0)


def test_a_context_that_the_container_cannot_hold_is_refused(reader: Reader) -> None:
    """One line, instead of the kernel's OOM kill."""
    line = RECORD.format(options="--rm --memory 256m", prompt='"The cat"', more="-n 1")
    assert reader.type([line]).returncode == 0
    done = reader.type([f"{line} --ctx 1000000 --force"])
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "this machine has 0.3 GB" in done.stderr


def test_no_command_needs_a_network(reader: Reader) -> None:
    line = RECORD.format(options="--rm --network none", prompt='"The cat"', more="-n 1")
    assert reader.type([line]).returncode == 0


def test_a_published_port_does_not_reach_the_page(engine: Engine, reader: Reader) -> None:
    """`instr view` listens on the container's own loopback."""
    record = RECORD.format(options="--rm", prompt='"The cat"', more="-n 1")
    view = (
        "docker run --detach --user $(id -u):$(id -g) -p 127.0.0.1:9002:9001 -v $PWD/out:/out"
        " llamacpp-instr view --no-browser --port 9001 session.log"
    )
    done = reader.type([f"{record} >/dev/null", view])
    container = done.stdout.strip()
    wait_until(lambda: "http://127.0.0.1:9001/" in engine.docker("logs", container))
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        ask(9002)


def test_the_engine_finds_a_container_healthy(engine: Engine, reader: Reader) -> None:
    """The health check runs every 30 minutes; here, more often."""
    check = json.loads(engine.docker("image", "inspect", "llamacpp-instr"))[0]["Config"][
        "Healthcheck"
    ]
    assert check["Interval"] == 30 * 60 * 1_000_000_000
    options = "--detach --health-interval 2s"
    line = RECORD.format(options=options, prompt='"Once upon a time"', more=LONG)
    container = reader.type([line]).stdout.strip()
    wait_until(lambda: state(engine, container)["Health"]["Status"] != "starting")
    health = state(engine, container)["Health"]
    assert health["Status"] == "healthy"
    assert json.loads(health["Log"][0]["Output"])["ok"]


# --- helpers ---


def size(engine: Engine) -> int:
    """Bytes of all layers, unpacked."""
    output = engine.docker("image", "inspect", "--format", "{{.Size}}", "llamacpp-instr")
    return int(output)


def state(engine: Engine, container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.docker("inspect", container))[0]["State"]
    return found


def written(folder: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in folder.glob("*")}


def check(log: Path) -> int:
    """The exit status of `instr check`, run outside of the container."""
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "check", log], capture_output=True, text=True
    )
    return done.returncode


def assert_one_whole_log(reader: Reader) -> None:
    (log,) = (reader.checkout / "out").iterdir()
    assert log.name == "session.log"
    assert check(log) == 0
    assert owners(log.parent) == {f"{UID}:{GID}"}


def ask(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        page: bytes = answer.read()
    return page.decode()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)
