"""Eight processes under one `instr exec` write eight logs."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from tests.conftest import Instr
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_eight_processes_under_one_exec_give_eight_logs(
    started_instr: Instr, tmp_path: Path, method: str
) -> None:
    program = f"""
        import multiprocessing, sys

        def tell(seed):
            import llama_cpp
            llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, n_threads=1, verbose=False)
            llm.create_completion("Once", max_tokens=20, temperature=1.0, seed=seed)

        if __name__ == "__main__":
            multiprocessing.set_start_method(sys.argv[1])
            children = [multiprocessing.Process(target=tell, args=(i,)) for i in range(8)]
            for child in children: child.start()
            for child in children: child.join()
            sys.exit(sum(child.exitcode for child in children))
    """
    script = tmp_path / "app.py"
    script.write_text(textwrap.dedent(program))
    done = started_instr("exec", "--log", "app-%p.log", "--", sys.executable, script, method)
    assert done.returncode == 0, done.stderr
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) == 8
    pids = set()
    for log in logs:
        findings = [finding.message for finding in check_log(log)]
        # a forked worker of multiprocessing exits with _exit(): only the last line is missing
        assert findings == ([] if method == "spawn" else ["was not closed: no session_end"])
        events = [event for _, event in read_events(log)]
        assert isinstance(events[0], schema.SessionStart)
        pids.add(events[0].process.pid)
        steps = Counter(type(event) for event in events)
        assert steps[schema.StepBegin] == steps[schema.StepEnd] > 1
    assert len(pids) == 8
