"""`instr exec --rotate`: a log continues in another file, and nothing is lost."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.schema import (
    FIRST_BYTES,
    Event,
    Graph,
    Kv,
    Mark,
    Model,
    SessionEnd,
    SessionStart,
    StepBegin,
    StepEnd,
    Token,
)
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr, assert_refused, log_parts
from tests.kit.native_kit import ROOT
from tests.kit.programs import run_python

pytestmark = pytest.mark.native

Done = CompletedProcess[str]

# Two contexts decode at once, in two threads, and count their work; full caches are cleared. Each
# then waits until the recorder, which writes ten times a second, has caught up: on a fast machine a
# part would hold the whole log otherwise. One mark spans everything, another one only the end.
APPLICATION = """
import ctypes, json, sys, threading, time
import llama_cpp.llama_cpp as api
from llamacpp_instr.llama import native

STEPS = 1300
marks = native.load()
api.llama_backend_init()
model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())

def tell(name, cleared, sampled):
    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads = 256, 1
    context = api.llama_init_from_model(model, params)
    sampler = api.llama_sampler_init_greedy()
    token = (ctypes.c_int32 * 1)(7)
    for step in range(STEPS):
        if step % 200 == 199:
            api.llama_memory_clear(api.llama_get_memory(context), False)
            cleared.append(step)
            time.sleep(0.15)
        assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
        token[0] = api.llama_sampler_sample(sampler, context, -1)
        sampled.append(token[0])
    api.llama_free(context)

whole = marks.mark(native.BEGIN, -1, "the whole story")
done = [([], []), ([], [])]
threads = [threading.Thread(target=tell, args=(n, *done[n])) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
marks.mark(native.END, whole, "the whole story")
last = marks.mark(native.BEGIN, -1, "the end")
marks.mark(native.END, last, "the end")
json.dump(done, sys.stdout)
"""


@pytest.fixture
def rotated(instr: Instr, tmp_path: Path, demo_model: Path) -> Callable[..., Done]:
    """`instr exec` with the application, its log, and parts of 1 MB."""
    (tmp_path / "app.py").write_text(APPLICATION)

    def run(*options: object) -> Done:
        to = ("--log", "it.log", "--rotate", "1MB", *options)
        return instr("exec", *to, "--", sys.executable, "app.py", demo_model)

    return run


def events_of(path: Path) -> list[Event]:
    return [event for _, event in read_events(path)]


@pytest.mark.parametrize("level", ["detailed", "verbose"])
def test_a_log_rotates_without_a_lost_event(
    rotated: Callable[..., Done], tmp_path: Path, level: str
) -> None:
    done = rotated("--level", level)
    assert done.returncode == 0, done.stderr
    parts = log_parts(tmp_path / "it.log")
    assert [path.name for path in parts[1:3]] == ["it.part2.log", "it.part3.log"]
    printed = [line for line in done.stderr.splitlines() if line.startswith("log: ")]
    assert printed == [f"log: {path}" for path in parts]

    logs = [events_of(path) for path in parts]
    for number, (path, events) in enumerate(zip(parts, logs, strict=True), start=1):
        assert list(check_log(path)) == [], path
        start, end = events[0], events[-1]
        assert isinstance(start, SessionStart)
        assert isinstance(end, SessionEnd)
        assert start.part == number
        assert end.reason == ("exit" if path == parts[-1] else "rotated")
        assert end.dropped == end.dropped_ops == 0
        # what came since the recorder wrote last is added
        assert path.stat().st_size >= 10**6 or path == parts[-1]
        kinds = Counter(type(event) for event in events)
        assert kinds[Model] == 1
        assert kinds[Graph] >= 1
    assert len({log[0].id for log in logs if isinstance(log[0], SessionStart)}) == 1

    everything = [event for events in logs for event in events]
    counts = Counter(type(event) for event in everything)
    counted = json.loads(done.stdout)
    assert sorted(e.step for e in everything if isinstance(e, StepBegin)) == list(range(2600))
    assert sorted(e.step for e in everything if isinstance(e, StepEnd)) == list(range(2600))
    assert counts[Token] == sum(len(sampled) for _, sampled in counted)
    clears = [e for e in everything if isinstance(e, Kv) and e.op == "clear"]
    assert len(clears) == sum(len(cleared) for cleared, _ in counted)
    recorded = Counter(e.id for e in everything if isinstance(e, Token))
    assert recorded == Counter(token for _, sampled in counted for token in sampled)
    check_joined(parts, [sampled for _, sampled in counted])


def check_joined(parts: list[Path], sampled: list[list[int]]) -> None:
    """The parts, read as one log, have the two contexts with what each of them sampled."""
    (run,) = find_runs(parts[::-1])
    session = load_session(run)
    steps, tokens = session.steps, session.tokens
    assert sorted(steps["step"].tolist()) == list(range(2600))
    assert list(session.models) == [0]
    assert list(session.contexts) == [0, 1]
    of_context = [tokens.rows(tokens["ctx"] == ctx) for ctx in (0, 1)]
    assert sorted(of["id"].tolist() for of in of_context) == sorted(sampled)
    assert all((np.diff(of["index"]) == 1).all() for of in of_context)
    for ctx in (0, 1):
        assert len(set(steps["thread"][steps["ctx"] == ctx].tolist())) == 1
    assert session.marks["name"].tolist() == ["the whole story", "the end"]
    assert session.end is not None
    assert session.end.decode_ns > 0
    assert session.log_end.sentence() == ""


def test_an_open_mark_goes_on_in_the_next_part(
    rotated: Callable[..., Done], tmp_path: Path
) -> None:
    assert rotated().returncode == 0
    parts = log_parts(tmp_path / "it.log")
    assert len(parts) >= 3
    for path in parts:
        marks = [event for event in events_of(path) if isinstance(event, Mark)]
        whole = [(mark.mark, mark.phase) for mark in marks if mark.name == "the whole story"]
        assert whole == [(0, "begin"), (0, "end")]
        assert len({mark.thread for mark in marks}) == 1
    assert [mark.mark for mark in marks if mark.name == "the end"] == [1, 1]


# Only one of two contexts decodes when the log rotates; then the other one's cache is cleared.
IDLE_CONTEXT = """
import ctypes, sys
from pathlib import Path
import llama_cpp.llama_cpp as api

def followed():
    part = Path(f"it.part{sys.argv[2]}.log")
    return part.exists() and b"step_begin" in part.read_bytes()

api.llama_backend_init()
model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
params = api.llama_context_default_params()
params.n_ctx, params.n_threads = 256, 1
busy, idle = (api.llama_init_from_model(model, params) for _ in range(2))
token = (ctypes.c_int32 * 1)(7)
step = 0
while not followed():
    if step % 200 == 0:
        api.llama_memory_clear(api.llama_get_memory(busy), False)
    context = idle if step < 3 else busy
    assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
    step += 1
api.llama_memory_clear(api.llama_get_memory(idle), False)
"""


@pytest.mark.parametrize("part", [2, 3], ids=["next part", "part after that"])
def test_what_is_asked_of_an_idle_context_is_in_the_part_that_is_open(
    instr: Instr, demo_model: Path, tmp_path: Path, part: int
) -> None:
    (tmp_path / "idle.py").write_text(IDLE_CONTEXT)
    command = [sys.executable, "idle.py", str(demo_model), str(part)]
    assert instr("exec", "--log", "it.log", "--rotate", "1MB", "--", *command).returncode == 0
    parts = log_parts(tmp_path / "it.log")
    assert len(parts) >= part
    assert list(check_log(parts[-1])) == []
    [context] = [
        event.ctx for event in events_of(parts[-1]) if isinstance(event, Kv) and event.op == "clear"
    ][-1:]
    began = [event.ctx for event in events_of(parts[-1]) if isinstance(event, StepBegin)]
    assert context not in began
    assert began


def test_where_no_part_can_be_made_the_log_goes_on(
    rotated: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "it.part3.log").mkdir()
    done = rotated()
    assert done.returncode == 0
    printed = [line for line in done.stderr.splitlines() if line.startswith("llama-instr")]
    second = tmp_path / "it.part2.log"
    reason = f"{tmp_path}/it.part3.log: File exists"
    assert printed == [f"llama-instr: {reason}; recording continues in {second}"]
    assert list(check_log(second)) == []
    assert second.stat().st_size > 10**6
    logs = [events_of(tmp_path / "it.log"), events_of(second)]
    assert sum(isinstance(event, StepEnd) for log in logs for event in log) == 2600


def test_parts_of_an_older_log_are_not_overwritten(
    rotated: Callable[..., Done], tmp_path: Path
) -> None:
    old = tmp_path / "it.part7.log"
    old.write_text("precious")
    assert_refused(rotated(), "it.part7.log", "--force")
    assert_refused(rotated("--force"), "it.part7.log is not a log")
    assert old.read_text() == "precious"
    old.write_bytes(FIRST_BYTES)
    done = rotated("--force")
    assert done.returncode == 0, done.stderr
    assert not old.exists() or list(check_log(old)) == []


# Each of twelve threads adds marks to one part. glibc gives each thread a heap; printed is
# how many of these have grown meanwhile.
THREADS_IN_TURNS = """
import ctypes, re, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import llama_cpp.llama_cpp as api
from llamacpp_instr.llama import native

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]

def heaps():
    file = libc.fopen(b"heaps.xml", b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    _, main, *others = Path("heaps.xml").read_text().split("<heap ")
    return [int(re.search('system type="current" size="([0-9]+)"', of)[1]) for of in others]

def decode():
    api.llama_memory_clear(api.llama_get_memory(context), False)
    assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0

def add_marks():
    for _ in range(1000):
        marks.mark(native.END, marks.mark(native.BEGIN, -1, 40 * "x"), 40 * "x")

marks = native.load()
api.llama_backend_init()
model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
params = api.llama_context_default_params()
params.n_ctx, params.n_threads = 256, 1
context = api.llama_init_from_model(model, params)
token = (ctypes.c_int32 * 1)(7)
threads = [ThreadPoolExecutor(1) for _ in range(12)]
for thread in threads:
    thread.submit(bytes, 1).result()
before = heaps()
for part, thread in enumerate(threads, start=2):
    decode()  # the step with which a part begins
    thread.submit(add_marks).result()
    while not Path(f"it.part{part}.log").exists():
        decode()
        time.sleep(0.01)
print(sum(heap > least for heap, least in zip(heaps(), before, strict=True)))
"""


def test_parts_share_memory_instead_of_taking_it_from_the_heap_of_each_thread(
    demo_model: Path, tmp_path: Path
) -> None:
    environment = {"LLAMA_INSTR_LOG": "it.log", "LLAMA_INSTR_ROTATE": "100000"}
    done = run_python(
        THREADS_IN_TURNS, demo_model, cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    # at most two parts are open, each with memory for what is added and for what is written
    assert int(done.stdout) <= 6


@pytest.mark.parametrize(
    "size", ["1", "10KB", "0.9MB", "many", "-1GB", "1.5.2GB", ".5GB", "10000000TB"]
)
def test_a_size_that_is_none(instr: Instr, size: str) -> None:
    assert_refused(instr("exec", "--rotate", size, "--", "true"), repr(size))
