"""A disk that stops answering holds neither decoding nor the end of a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.test_stalls import OPEN, run_stalled

pytestmark = pytest.mark.native


@pytest.mark.parametrize("rotate", ["0", "100000"])
def test_a_disk_that_stops_holds_neither_decoding_nor_the_end(tmp_path: Path, rotate: str) -> None:
    log = tmp_path / "disk" / "s.log"
    body = f"""
        {OPEN}
        decode()
        assert not os.path.exists(sys.argv[1])  # and now the disk stops
        decode()
        for number in range(80): note(number)
        decode()
        assert recorder.status() & native.WRITE_FAILED
        assert recorder.dropped() > 60
        llm.close()
        print("done")
    """
    environment = {"LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_ROTATE": rotate}
    done = run_stalled(body, log.with_name("stop"), namespace=log.parent, **environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("inference goes on, events are dropped and counted") == 1
    assert "the log is not complete: the disk or the reader of the pipe has stalled" in done.stderr


def test_a_disk_that_has_stopped_is_not_recorded_to(tmp_path: Path) -> None:
    log = tmp_path / "disk" / "s.log"
    body = f"assert not os.path.exists(sys.argv[1])\n{OPEN}\ndecode()\nprint('done')"
    environment = {"LLAMA_INSTR_LOG": str(log)}
    done = run_stalled(body, log.with_name("stop"), namespace=log.parent, **environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert f"nothing is recorded: {log}: the disk or the reader" in done.stderr
