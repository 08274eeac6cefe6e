"""What a program gets from `import llamacpp_instr`, and that the import alone costs little."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

import llamacpp_instr
from llamacpp_instr.base.errors import LogError

FIXTURE = Path(__file__).parent / "fixtures" / "demo-verbose.log"


def test_every_public_name_is_there() -> None:
    for name in llamacpp_instr.__all__:
        assert getattr(llamacpp_instr, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'loads'"):
        getattr(llamacpp_instr, "loads")  # noqa: B009


def test_a_log_is_read_as_events_as_columns_and_as_tables() -> None:
    events = [event for _, event in llamacpp_instr.read_events(FIXTURE)]
    session = llamacpp_instr.load_session(FIXTURE)
    tables = llamacpp_instr.load(FIXTURE).tables
    assert sum(type(event).__name__ == "StepEnd" for event in events) == len(session.steps)
    assert tables.steps.step.tolist() == session.steps["step"].tolist()


def closed_stream() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO())
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), io.StringIO(), closed_stream()])
def test_no_call_needs_a_standard_stream(
    stream: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service closes them; a notebook replaces them by streams of text."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    log = llamacpp_instr.load(FIXTURE)
    assert len(log.tables.steps) == len(llamacpp_instr.load_session(FIXTURE).steps)
    assert list(llamacpp_instr.read_events(FIXTURE))
    assert log._repr_html_()
    log.page(tmp_path / "page.html")
    with pytest.raises(LogError, match=r"^standard input: (closed|empty)"):
        llamacpp_instr.load("-")


@pytest.mark.native
def test_the_import_loads_nothing_else() -> None:
    program = (
        "import sys, llamacpp_instr;"
        "print(*sorted(m for m in sys.modules if m.startswith(('llamacpp_instr.', 'converters'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")
