"""Whatever a program puts into its log, the strict reader reads it."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import llamacpp_instr
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Mark, Note, SessionStart
from llamacpp_instr.recording.session import MAX_DATA, MAX_DEPTH, MAX_NAME, Recording
from tests.kit.native_kit import ROOT

pytestmark = pytest.mark.native


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ANY_TEXT = st.text(st.characters(), max_size=20)  # with surrogates, NUL and control characters
HARD_TEXT = st.sampled_from(
    ["", "\0", "a\0b", "\udcff", "\ud800", "\ud83d\ude00", "\udcc3\udcb6", '"\\\n\r\t\x1b\x7f',
     "\u2028\ufeff\uffff", "ö😀", "\\udcff", "x" * 100_000, "\x01" * 100_000]
)  # fmt: skip
TEXTS = ANY_TEXT | HARD_TEXT
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
    | st.sampled_from([10**400, -(10**30), 2**64, math.nan, math.inf, object(), b"x", {1, 2}, 1j])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXTS | st.integers() | st.floats() | st.just((1, 2)), inner, max_size=4)
    ),
    max_leaves=12,
) | st.sampled_from([nested(depth) for depth in (MAX_DEPTH, MAX_DEPTH + 1, 500, 900)])


def reads(log: Path) -> list[Any]:
    """The events; raises unless the whole log is valid and nothing is missing."""
    assert [str(finding) for finding in check_log(log)] == []
    return [event for _, event in read_events(log)]


def use(session: Recording, kind: str, name: str, data: Any) -> None:
    if kind == "note":
        session.note(name, data)
    elif kind == "instant":
        session.instant(name)
    else:
        with session.mark(name):
            session.instant(name)


USES = st.lists(st.tuples(st.sampled_from(["note", "instant", "mark"]), TEXTS, VALUES), max_size=6)


@settings(max_examples=300)
@given(args=st.dictionaries(TEXTS, VALUES, max_size=3), uses=USES, stats=st.none() | TEXTS)
@example(args={"t": math.nan}, uses=[], stats=None)
@example(args={"path": "\udcff.gguf"}, uses=[("note", "\udcff", {"\udcff": "\ud800"})], stats=None)
@example(args={}, uses=[("note", "n", 10**400), ("mark", "a\0b", 0)], stats="\udcff")
def test_every_log_of_the_python_api_can_be_read(
    args: dict[str, Any], uses: list[tuple[str, str, Any]], stats: str | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "a.log")
        # errors are raised before anything is written
        try:
            session = llamacpp_instr.record(log, level="minimal", args=args, stats=stats)
        except UsageError:
            assert not log.exists()
            return
        done = 0
        with session:
            for kind, name, data in uses:
                with contextlib.suppress(UsageError):
                    use(session, kind, name, data)
                    done += {"note": 1, "instant": 1, "mark": 3}[kind]
        events = reads(log)
        assert sum(isinstance(event, Mark | Note) for event in events) == done


def test_bytes_that_are_not_utf_8_are_written_out(tmp_path: Path) -> None:
    name = os.fsdecode(b"m\xff\xc3\xb6")
    with llamacpp_instr.record(tmp_path / "a.log", args={"path": Path(name)}) as session:
        session.instant(f"{name}\0")
        session.note(name, [name, "\ud800", "\\udcff"])
    start, mark, note = (
        e for e in reads(session.path) if isinstance(e, SessionStart | Mark | Note)
    )
    assert start.args == {"path": "m\\xffö"}
    assert mark.name == "m\\xffö\\x00"
    assert (note.name, note.data) == ("m\\xffö", ["m\\xffö", "\\ud800", "\\udcff"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (math.nan, "not JSON compliant"),
        ([math.inf], "not JSON compliant"),
        ([10**5000], "out of range|limit"),
        (nested(MAX_DEPTH + 1), f"levels deep; a log allows {MAX_DEPTH}"),
        (nested(100_000), "cannot be written as JSON"),
        ("x" * MAX_DATA, f"a log allows {MAX_DATA}"),
        ({(1, 2): 3}, "keys must be"),
    ],
)
def test_what_no_reader_would_take_is_refused(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        llamacpp_instr.record(tmp_path / "b.log", args={"data": data})
    assert str(refused.value).startswith("args ")
    with llamacpp_instr.record(tmp_path / "a.log") as session:
        with pytest.raises(UsageError, match=words):
            session.note("name", data)
        for use_of in (session.instant, lambda name: session.note(name, 1)):
            with pytest.raises(UsageError, match=f"a log allows {MAX_NAME}"):
                use_of("\x01" * (MAX_NAME // 6 + 1))
    assert not [event for event in reads(session.path) if isinstance(event, Mark | Note)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


NOT_UTF_8 = b"\xff\xfe\xc3"


def run_instr(directory: Path, *arguments: str | bytes | Path) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_log_and_a_prompt_of_run_with_any_name(tmp_path: Path) -> None:
    log = os.fsdecode(b"l" + NOT_UTF_8 + b".log")
    prompt = 'a\x1b"\\\u2028😀'
    run_instr(tmp_path, "run", "demo", "-p", prompt, "-n", "1", "--log", log, "--stats", "[\\x01]")
    start = reads(tmp_path / log)[0]
    assert (start.args["log"], start.args["prompts"]) == ("l\\xff\\xfe\\xc3.log", [prompt])


# the recorder opens a log as soon as a model is loaded
LOADS = (
    "import sys; import llama_cpp.llama_cpp as api; params = api.llama_model_default_params(); "
    "api.llama_model_load_from_file(sys.argv[1].encode(), params)"
)


def test_a_command_of_ten_thousand_files_runs(demo_model: Path, tmp_path: Path) -> None:
    files = [f"some/directory/with-a-file-{number}.txt" for number in range(10_000)]
    command = (sys.executable, "-c", LOADS, demo_model, *files)
    run_instr(tmp_path, "exec", "--log", "a.log", "--", *command)
    assert reads(tmp_path / "a.log")[0].process.argv[4:] == files
