"""The longest line and every argument of `instr exec` leave a log that can be read."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import llamacpp_instr
from llamacpp_instr.log.schema import MAX_LINE, Note
from llamacpp_instr.recording.session import MAX_DATA, MAX_NAME
from tests.recording.test_text import LOADS, NOT_UTF_8, reads, run_instr

pytestmark = pytest.mark.native


def test_the_longest_line_can_be_read(tmp_path: Path) -> None:
    data, name = "x" * (MAX_DATA - 2), "\x01" * ((MAX_NAME - 2) // 6)
    with llamacpp_instr.record(tmp_path / "a.log", args={"x": data[:-7]}) as session:
        session.note(name, data)
    assert max(map(len, session.path.read_bytes().splitlines())) < MAX_LINE
    [note] = [event for event in reads(session.path) if isinstance(event, Note)]
    assert (note.name, note.data) == (name, data)


ARGUMENTS = st.lists(
    st.binary(max_size=20).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
    | st.sampled_from(["x" * 100_000, '{"a": "\\ud800"}', "\x01" * 30_000]),
    max_size=5,
)


@settings(max_examples=8)
@given(arguments=ARGUMENTS)
@example(arguments=[os.fsdecode(NOT_UTF_8)])
def test_every_argument_of_exec_leaves_a_log_that_can_be_read(
    demo_model: Path, arguments: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        command = (sys.executable, "-c", LOADS, demo_model, *arguments)
        run_instr(Path(name), "exec", "--log", "a.log", "--", *command)
        start = reads(Path(name, "a.log"))[0]
        argv = start.process.argv
        assert argv[:4] == [sys.executable, "-c", LOADS, str(demo_model)]
        assert len(argv) == 4 + len(arguments)
