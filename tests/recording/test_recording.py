"""Recording from Python: `with llamacpp_instr.record(...)`."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llamacpp_instr
from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.log.schema import FIRST_BYTES
from tests.conftest import Instr, read_events
from tests.kit.dap_kit import is_whole
from tests.kit.native_kit import open_llama
from tests.kit.programs import python, run_python

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def llama(demo_model: Path) -> Iterator[Any]:
    model = open_llama(demo_model, n_ctx=256)
    yield model
    model.close()


def test_a_thread_that_records_gets_the_signals_that_it_got_before(tmp_path: Path) -> None:
    """The recorder's own thread gets none."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with llamacpp_instr.record(tmp_path / "a.log"):
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_any_use_of_llama_cpp_is_recorded(demo_model: Path, tmp_path: Path) -> None:
    with llamacpp_instr.record(tmp_path / "a.log", args={"for": "a test"}) as session:
        model = open_llama(demo_model, n_ctx=256)
        model.create_completion("Once upon a time", max_tokens=4, temperature=0)
        model.close()
    assert session.path == tmp_path / "a.log"
    events = read_events(session.path)
    start, end = events[0], events[-1]
    assert (start["event"], end["event"]) == ("session_start", "session_end")
    assert start["level"] == "detailed"
    assert start["args"] == {"for": "a test"}
    assert start["producer"] == native.load().info()
    assert end["dropped"] == 0
    names = {event["event"] for event in events}
    assert {"model", "context", "graph", "step_begin", "compute", "ops", "step_end"} <= names


def test_a_model_loaded_before_is_known_to_the_log(llama: Any, tmp_path: Path) -> None:
    with llamacpp_instr.record(tmp_path / "a.log") as session:
        llama.create_completion("Once upon", max_tokens=2)
    names = {event["event"] for event in read_events(session.path)}
    assert {"model", "context", "graph", "compute"} <= names


def test_the_memory_of_a_context(llama: Any) -> None:
    uses = native.load().memory(llama.ctx)
    assert all(use["buffer"] for use in uses)
    # 256 cells, 4 layers, K and V of 128 values of two bytes
    assert sum(use["context"] for use in uses) == 256 * 4 * 2 * 128 * 2
    assert sum(use["model"] for use in uses) > 5_000_000


def test_marks_and_notes(llama: Any, tmp_path: Path) -> None:
    with llamacpp_instr.record(tmp_path / "a.log", level="minimal") as session:
        with session.mark("outer"), session.mark('naïve "inner"\n'):
            llama.create_completion("Once upon", max_tokens=2)
        session.instant("now")
        session.note("retrieval", {"documents": 3, "scores": [0.5, None], "text": "ß\u2028"})
        with pytest.raises(UsageError, match="cannot be written as JSON"):
            session.note("bad", object())
    marks = read_events(session.path, "mark")
    assert [(mark["name"], mark["phase"]) for mark in marks] == [
        ("outer", "begin"), ("naïve \"inner\"\n", "begin"),
        ("naïve \"inner\"\n", "end"), ("outer", "end"),
        ("now", "instant"),
    ]  # fmt: skip
    assert marks[0]["mark"] == marks[3]["mark"] != marks[1]["mark"] == marks[2]["mark"]
    [note] = read_events(session.path, "note")
    assert (note["name"], note["data"]) == (
        "retrieval", {"documents": 3, "scores": [0.5, None], "text": "ß\u2028"},
    )  # fmt: skip
    between = [event["t"] for event in read_events(session.path, "step_begin")]
    assert all(marks[1]["t"] <= t <= marks[2]["t"] for t in between)


def test_a_mark_and_its_session_end_when_their_body_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        llamacpp_instr.record(tmp_path / "a.log") as session,
        session.mark("work"),
    ):
        1 / 0  # noqa: B018
    events = read_events(tmp_path / "a.log")
    assert [event["phase"] for event in events if event["event"] == "mark"] == ["begin", "end"]
    assert events[-1]["event"] == "session_end"


def test_sessions_follow_each_other_but_do_not_nest(llama: Any, tmp_path: Path) -> None:
    for name in ("first.log", "second.log"):
        with llamacpp_instr.record(tmp_path / name):
            with (
                pytest.raises(UsageError, match="already being recorded"),
                llamacpp_instr.record(tmp_path / "nested.log"),
            ):
                pass
            llama.create_completion("Once upon", max_tokens=2)
    ids = [read_events(tmp_path / name)[0]["id"] for name in ("first.log", "second.log")]
    assert ids[0] != ids[1]
    assert not (tmp_path / "nested.log").exists()


def test_a_closed_session_is_closed(tmp_path: Path) -> None:
    with llamacpp_instr.record(tmp_path / "a.log") as session:
        pass
    size = session.path.stat().st_size
    session.close()
    for use in (lambda: session.instant("late"), lambda: session.note("late", 1)):
        with pytest.raises(UsageError, match="closed"):
            use()
    assert session.path.stat().st_size == size


def test_an_existing_log_is_overwritten_by_force_only(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("precious")
    with pytest.raises(UsageError, match=r"a\.log exists; use force=True to overwrite it"):
        llamacpp_instr.record(log)
    with pytest.raises(UsageError, match=r"a\.log is not a log"):
        llamacpp_instr.record(log, force=True)
    assert log.read_text() == "precious"
    log.write_bytes(FIRST_BYTES[:9])  # the disk was full
    with llamacpp_instr.record(log, force=True):
        pass
    assert read_events(log)[-1]["event"] == "session_end"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".", "is a directory"),
        ("missing/a.log", "does not exist"),
        ("file/a.log", "is not a directory"),
        ("/proc/a.log", "/proc"),
        ("a\0b", "embedded null byte"),
        ("a" * 300, "name too long"),
    ],
)
def test_a_log_that_cannot_be_opened(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=words) as caught:
        llamacpp_instr.record(tmp_path / path)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wrong_arguments_are_named_without_options_of_the_command_line(tmp_path: Path) -> None:
    log, mine = tmp_path / "a.log", tmp_path / "a.txt"
    mine.write_text("mine")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path": mine}, ""), ({"path": mine, "force": True}, ""), ({"path": tmp_path}, ""),
        ({"path": tmp_path / "none" / "a.log"}, ""), ({"path": "a\0b"}, ""),
        ({"level": "loud"}, "'loud' is not one of minimal, detailed, verbose"),
        ({"on_log_error": "no"}, ""), ({"stop_on_nan": True}, "stats"), ({"stats": "("}, "("),
        ({"stats": "(" * 300}, ""), ({"stats": "x" * 2000}, ""), ({"args": {"a": math.nan}}, ""),
    ]  # fmt: skip
    for arguments, words in wrong:
        with pytest.raises(UsageError, match=rf"^(?!.*--\w).*{re.escape(words)}"):
            llamacpp_instr.record(**{"path": log, **arguments})
    assert not log.exists()
    assert not native.load().status() & native.ACTIVE


def test_a_full_disk_is_reported_and_counted(llama: Any) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"/dev/full: .* [1-9]\d* events are missing"),
        llamacpp_instr.record("/dev/full") as session,
    ):
        text = llama.create_completion("Once upon", max_tokens=8)["choices"][0]["text"]
    assert text
    assert session.dropped > 0


def test_a_full_disk_ends_instr_run_with_one_line(instr: Instr) -> None:
    run = ("run", "demo", "-p", "Once upon", "-n", 8, "--threads", 1, "--log", "/dev/full")
    done = instr(*run, "--force")
    assert done.returncode == 1
    assert len(done.stdout) > 8, "the text is whole"
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: /dev/full")]
    stopped = instr(*run, "--force", "--on-log-error", "stop")
    assert stopped.returncode != 0
    assert len(stopped.stderr.splitlines()) == 1, stopped.stderr
    assert "/dev/full" in stopped.stderr


def printed(code: str, path: Path, environment: dict[str, str]) -> str:
    """What code prints that finds modules in `path` first."""
    environment = environment | {"PYTHONPATH": f"{path}:{environment['PYTHONPATH']}"}
    return run_python(code, env=environment, check=True).stdout.strip()


LOAD = """
    from llamacpp_instr.base import errors
    from llamacpp_instr.llama import native
    try:
        native.load()
    except errors.NativeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('no numpy')", ("does not load (no numpy)", "run `instr build`")),
        (
            "from . import llama_cpp; __version__ = '0.1'",
            ("is not the patched one", "libc.so.6", "run `instr build`"),
        ),
    ],
)
def test_another_library_is_refused(
    tmp_path: Path, environment: dict[str, str], source: str, words: tuple[str, ...]
) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "llama_cpp.py").write_text("import ctypes; _lib = ctypes.CDLL('libc.so.6')")
    line = printed(LOAD, tmp_path, environment)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_a_missing_library_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    hide = "import sys; sys.modules['llama_cpp'] = None\n"
    hidden = textwrap.dedent(LOAD).replace("native.load()", "find(); native.load()")
    code = hide + "import importlib.util\ndef find(): importlib.util.find_spec = lambda _: None\n"
    line = printed(code + hidden, tmp_path, environment)
    assert line == "the patched llama-cpp-python is not installed; run `instr build`"


def test_another_abi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", 99)
    with pytest.raises(NativeError, match=r"has ABI \d+, this package needs ABI 99"):
        native.load.__wrapped__()


def test_the_package_is_light(environment: dict[str, str], tmp_path: Path) -> None:
    """`import llamacpp_instr` imports no library, but `record` is available."""
    code = """
        import sys
        import llamacpp_instr
        heavy = {"llama_cpp", "numpy", "gguf", "msgspec"} & set(sys.modules)
        import llamacpp_instr.recording.session
        print(heavy or "light", callable(llamacpp_instr.record))
    """
    assert printed(code, tmp_path, environment) == "light True"


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "</dev/null"])
@pytest.mark.parametrize("begin", ["record", "debug"])
def test_a_program_without_standard_streams_is_recorded(
    begin: str, streams: str, demo_model: Path, tmp_path: Path
) -> None:
    code = f"""
        import sys, llamacpp_instr
        if sys.stdin is not None:  # as a notebook replaces them
            sys.stdin = sys.stdout = sys.stderr = object()
        with llamacpp_instr.{begin}("a.log"):
            import llama_cpp
            llama = llama_cpp.Llama({str(demo_model)!r}, n_ctx=64, verbose=False)
            llama.create_completion("Once", max_tokens=2)
            llama.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        """
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$@" {streams}', *python(code)], cwd=tmp_path, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    assert is_whole(tmp_path / "a.log")
