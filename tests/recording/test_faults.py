"""Whatever happens to process, disk or reader: complete lines, counted losses, no crash."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.reader import read_events
from tests.kit.native_kit import DEMO
from tests.kit.programs import python, run_python

pytestmark = pytest.mark.native
KILLS = 10
BEGUN = 50_000
"""bytes of a log that has steps"""
# Loads the library once, then forks one recording child per request, so a kill takes milliseconds.
NURSERY = """
    import ctypes, os, sys
    import llama_cpp.llama_cpp as api
    model_path, folder = sys.argv[1:]
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    for line in sys.stdin:
        number = int(line)
        child = os.fork()
        if child == 0:
            log = f"{folder}/{number}.log".encode()
            assert api._lib.llama_instr_begin(log, b"verbose", None, None, 0) == 0
            model = api.llama_model_load_from_file(
                model_path.encode(), api.llama_model_default_params())
            params = api.llama_context_default_params()
            params.n_ctx = 64
            params.n_threads = params.n_threads_batch = 1
            context = api.llama_init_from_model(model, params)
            token = (ctypes.c_int32 * 1)(7)
            while True:
                for _ in range(60):
                    api.llama_decode(context, api.llama_batch_get_one(token, 1))
                api.llama_memory_clear(api.llama_get_memory(context), True)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
"""
IDLE = f"""
    import sys, time, llamacpp_instr, llama_cpp
    session = llamacpp_instr.record(sys.argv[1])
    llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, n_threads=1, verbose=False)
    llm.create_completion("Once", max_tokens=8, temperature=0)
    print("done", flush=True)
    time.sleep(600)
"""


def test_what_a_waiting_process_has_decoded_is_on_disk(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    with subprocess.Popen(python(IDLE, log), stdout=subprocess.PIPE, text=True) as idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == "done\n"
        deadline = time.monotonic() + 300
        while log.read_bytes().count(b'"event":"token"') < 8:
            assert time.monotonic() < deadline, "the last tokens stay in memory"
            time.sleep(0.05)
        idle.kill()
    reader = read_events(log)
    events = [event for _, event in reader]
    begins = [event.step for event in events if isinstance(event, schema.StepBegin)]
    ends = [event.step for event in events if isinstance(event, schema.StepEnd)]
    assert begins == ends
    assert reader.end is not None
    assert reader.end.state == "unclosed"


def test_a_killed_process_leaves_whole_lines_and_an_unclosed_log(tmp_path: Path) -> None:
    kill_processes(KILLS, tmp_path)


def kill_processes(count: int, tmp_path: Path) -> None:
    """Start so many processes and kill each at another moment; check what they wrote."""
    rng = random.Random(0)
    lines_in_all = 0
    with subprocess.Popen(
        python(NURSERY, DEMO, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin
        assert nursery.stdout
        for number in range(count):
            nursery.stdin.write(f"{number}\n")
            nursery.stdin.flush()
            child = int(nursery.stdout.readline())
            log = tmp_path / f"{number}.log"
            while not log.exists() or log.stat().st_size < BEGUN:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.12))
            os.kill(child, signal.SIGKILL)
            assert nursery.stdout.readline() == "gone\n"
            lines_in_all += assert_unclosed(log)
        nursery.stdin.close()
    assert lines_in_all > 20 * count, "the processes were killed before they did anything"


def assert_unclosed(log: Path) -> int:
    reader = read_events(log)
    lines = sum(1 for _ in reader)
    assert reader.end is not None
    assert reader.end.state in ("unclosed", "truncated")
    assert reader.end.skipped == 0
    assert "was not closed" in reader.end.sentence()
    return lines


RECORD = f"""
    import sys, llamacpp_instr, llama_cpp
    with llamacpp_instr.record(sys.argv[1], level="verbose") as session:
        llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=256, n_threads=1, verbose=False)
        for _ in range(8):
            llm.create_completion("Once upon a time", max_tokens=100, temperature=0)
    print("done")
"""
# a limit on the file's size is a disk that is full at a known place
FILLS = f"""
    import os, resource, sys, time, llamacpp_instr, llama_cpp
    from pathlib import Path
    log, room = Path(sys.argv[1]), int(sys.argv[2])
    with llamacpp_instr.record(log, level="verbose"):
        llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=256, n_threads=1, verbose=False)
        llm.create_completion("Once upon a time", max_tokens=4, temperature=0)
        size = 0
        while size != (size := log.stat().st_size):
            time.sleep(0.5)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages go to where it led before
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
        llm.create_completion("Once upon a time", max_tokens=4, temperature=0)
"""


@pytest.mark.parametrize("room", [0, 100, 6000])
def test_the_last_line_finds_room_wherever_the_disk_ends(room: int, tmp_path: Path) -> None:
    """Even where the write that fails had written less than the last line needs."""
    log = tmp_path / "s.log"
    done = run_python(FILLS, log, room, check=True)
    assert "File too large" in done.stderr
    assert assert_closed_with_gaps(log) > 0


def assert_closed_with_gaps(log: Path) -> int:
    """The number of events that are missing in a log, which has as many as it says."""
    reader = read_events(log)
    *events, end = [event for _, event in reader]
    assert reader.end is not None
    assert reader.end.state == "closed"
    assert isinstance(end, schema.SessionEnd)
    assert end.events == Counter(event.__struct_config__.tag for event in events)
    return end.dropped


def test_a_reader_that_goes_away_does_not_end_the_program(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # like a program that is not Python: SIGPIPE would end it
    default = "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)"
    script = RECORD.replace("    import sys,", f"    {default}\n    import sys,")
    with subprocess.Popen(
        python(script, pipe), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        with pipe.open("rb") as reader:
            reader.readline()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "done\n"
    assert err.count("Broken pipe; ") + err.count("(Broken pipe)") >= 1


NO_THREAD = """
    import sys, llama_cpp, llamacpp_instr
    from llamacpp_instr.base.errors import UsageError
    try:
        llamacpp_instr.record(sys.argv[1])
    except UsageError as error:
        print(error)
"""


def test_a_recorder_without_a_thread_is_one_line(tmp_path: Path) -> None:
    """The stack of a thread would be larger than the machine: it cannot be created."""
    command = ["sh", "-c", 'ulimit -s 1000000000; exec "$@"', "sh", *python(NO_THREAD, "a.log")]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "a.log: Resource temporarily unavailable\n"
    assert list(tmp_path.iterdir()) == []
