"""Fixtures of several tests: models, and the command line as a user runs it."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from llamacpp_instr.cli import main
from llamacpp_instr.llama.build import wheel as build
from llamacpp_instr.log.reader import LogReader
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.model.file import demo_model as find_demo_model
from tests.kit import sdist_kit, tiny_models
from tests.kit.fixed_environment import fix_this_process
from tests.kit.nursery import Nursery, start_nursery

ROOT = Path(__file__).parent.parent

# A suite that runs in the background, or under nohup, is started with these ignored. The commands
# that it tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# collecting creates many objects that live until the end
gc.disable()

# the environment of the peers lacks it
if find_spec("hypothesis"):
    from tests.kit.profiles import load_profiles

    load_profiles()


def pytest_configure() -> None:
    """Not at import: a program that a test records may import a helper of a test."""
    fix_this_process()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that runs `instr` in a process is native."""
    for item in items:
        if not {"nursery", "started_instr"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("native")


def pytest_collection_finish() -> None:
    """What imports created lives until the end, so the garbage collector need not scan it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return find_demo_model()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models of several kinds."""
    directory = tmp_path_factory.mktemp("models")
    tiny_models.write_llama(directory / "llama.gguf")
    tiny_models.write_llama(directory / "no_tokenizer.gguf", tokenizer="none")
    tiny_models.write_gpt2(directory / "gpt2.gguf")
    tiny_models.write_bert(directory / "bert.gguf")
    tiny_models.write_t5(directory / "t5.gguf")
    tiny_models.write_vocabulary(directory / "vocabulary.gguf")
    return directory


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For processes that start elsewhere and must find this package."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


Instr = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def nursery(environment: dict[str, str]) -> Iterator[Nursery]:
    """For commands whose start as a process is not what is tested."""
    with start_nursery(environment) as nursery:
        yield nursery


@pytest.fixture
def instr(tmp_path: Path, environment: dict[str, str], nursery: Nursery) -> Instr:
    """Runs a command line in an empty directory."""

    def run(*args: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in args]
        return nursery.run(words, tmp_path, input, environment=environment)

    return run


@pytest.fixture
def started_instr(tmp_path: Path, environment: dict[str, str]) -> Instr:
    """Like `instr`, but each command starts a process of its own: ten times as slow."""

    def run(*args: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *map(str, args)],
            cwd=tmp_path, env=environment, input=input, capture_output=True, text=True,
            encoding="utf-8", errors="surrogateescape", timeout=120, check=False,
            stdin=subprocess.DEVNULL if input is None else None,
        )  # fmt: skip

    return run


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is pip's only index, with the tiny sdist; its patch set is used."""
    directory = tmp_path / "index"
    directory.mkdir()
    sdist_kit.make_patches(tmp_path, sdist_kit.make_sdist(directory))
    use_index(directory, monkeypatch)
    return directory


def use_index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it pip's only index; the patch set and the cache of builds are beside it."""
    place = directory.parent
    monkeypatch.setattr(build, "patches_dir", lambda: place / "patches")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(place / "cache"))


def start_run(
    environment: dict[str, str], directory: Path, *args: object
) -> subprocess.Popen[bytes]:
    """`instr run` in a directory, with its output in pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "run", *map(str, args)],
        cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def log_parts(log: Path) -> list[Path]:
    """A log and the files that its rotation started after it, in order."""
    later = log.parent.glob(f"{log.stem}.part*{log.suffix}")
    return [log, *sorted(later, key=lambda path: int(path.suffixes[-2][len(".part") :]))]


def read_events(log: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The events of a log as JSON, all or those of one name. Graphs and plans have all their
    columns, and graphs their weights."""
    lines = log.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    if any({"like", "changes"} & event.keys() for event in events):
        for i, (_, event) in enumerate(Resolver().follow(LogReader(log))):
            if {"like", "changes"} & events[i].keys():
                events[i] = json.loads(msgspec.json.encode(event))
    return [event for event in events if name is None or event["event"] == name]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Checks that wrong input gave exit status 2 and one line that contains `words`, and that it
    names no option of another command without that command."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    for word in words:
        assert word in lines[0]
    assert _options_of_others(done.args, lines[0]) == []


def _options_of_others(args: Sequence[str], text: str) -> list[str]:
    """The options that a text of `instr ARGS` names and that neither the command nor ARGS have.
    Those of "record with --level detailed" and of `instr OTHER --option` are advice about other
    commands."""
    context = click.Context(main)
    names = main.list_commands(context)
    command = main.get_command(context, next((word for word in args if word in names), ""))
    if command is None:
        return []
    has = {name for of in command.get_params(context) for name in (*of.opts, *of.secondary_opts)}
    has |= {word.partition("=")[0] for word in args}
    rest = re.sub(r"`instr [^`]*`|record (it )?with(out)? --\S+", "", text)
    return [name for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest) if name not in has]
