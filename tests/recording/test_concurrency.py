"""Contexts, threads and processes that decode at once are kept apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from tests.kit.native_kit import DEMO
from tests.kit.programs import run_python

pytestmark = pytest.mark.native
TWO_THREADS = f"""
    import sys, threading, llamacpp_instr, llama_cpp
    import llama_cpp.llama_cpp as api
    texts, both_compute = {{}}, threading.Barrier(2)

    def tell(name, prompt):
        llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=256, n_threads=1, verbose=False)
        arrived = []

        @api.ggml_abort_callback
        def meet(_data):  # each context's first step waits for that of the other
            if not arrived:
                arrived.append(both_compute.wait(60))
            return False

        api.llama_set_abort_callback(llm.ctx, meet, None)
        with session.mark(name):
            out = llm.create_completion(prompt, max_tokens=60, temperature=0)
        texts[name] = out["choices"][0]["text"]

    with llamacpp_instr.record(sys.argv[1], level=sys.argv[2]) as session:
        threads = [threading.Thread(target=tell, args=pair)
                   for pair in [("one", "Once upon a time"), ("two", "One day, a little")]]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    print(repr(texts))
"""
FORKED_AFTER_A_COMPUTE = f"""
    import os, sys, llamacpp_instr, llama_cpp
    llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, n_threads=2, verbose=False)
    with llamacpp_instr.record(sys.argv[1]):
        llm.create_completion("Once", max_tokens=4, temperature=0)
    child = os.fork()
    if child == 0:
        with llamacpp_instr.record(sys.argv[2]) as session:
            for i in range(1000): session.note(str(i), i)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_of_a_fork_ends_its_session_without_the_threads_of_its_parent(
    tmp_path: Path,
) -> None:
    """The recorder's thread writes for the parent; waiting for it in the child would never end."""
    logs = [tmp_path / "parent.log", tmp_path / "child.log"]
    run_python(FORKED_AFTER_A_COMPUTE, *logs, check=True)
    assert list(check_log(logs[1])) == []
    counts = Counter(type(event) for _, event in read_events(logs[1]))
    assert (counts[schema.Note], counts[schema.SessionEnd]) == (1000, 1)


FORKED_WHILE_A_THREAD_RECORDS = """
    import os, signal, sys, threading, llamacpp_instr
    stop = threading.Event()
    def note(session):
        while not stop.is_set(): session.note("parent", 1)
    with llamacpp_instr.record(sys.argv[1] + "/parent.log") as session:
        noting = threading.Thread(target=note, args=(session,))
        noting.start()
        for number in range(30):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                with llamacpp_instr.record(f"{sys.argv[1]}/{number}.log") as own:
                    own.note("child", number)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, number
        stop.set()
        noting.join()
"""


def test_a_fork_may_come_while_another_thread_records(tmp_path: Path) -> None:
    """Whatever lock that thread holds, the child can record, into a log of its own."""
    run_python(FORKED_WHILE_A_THREAD_RECORDS, tmp_path, check=True)
    assert list(check_log(tmp_path / "parent.log")) == []
    for number in range(30):
        log = tmp_path / f"{number}.log"
        assert list(check_log(log)) == []
        notes = [event for _, event in read_events(log) if isinstance(event, schema.Note)]
        assert [(note.name, note.data) for note in notes] == [("child", number)]


ENDED_IN_A_STEP = f"""
    import ctypes, sys, threading, llamacpp_instr
    import llama_cpp.llama_cpp as api
    model = api.llama_model_load_from_file({str(DEMO).encode()!r}, api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_threads, computing = 1, threading.Event()

    def wait(_data):
        computing.set()
        threading.Event().wait()  # the step never ends

    params.abort_callback = callback = api.ggml_abort_callback(wait)
    context = api.llama_init_from_model(model, params)
    llamacpp_instr.record(sys.argv[1])
    token = (ctypes.c_int32 * 1)(7)
    decode = lambda: api.llama_decode(context, api.llama_batch_get_one(token, 1))
    threading.Thread(target=decode, daemon=True).start()
    computing.wait()
    ctypes.CDLL(None).exit(0)
"""


def test_a_step_that_the_end_of_the_program_cuts_off_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    run_python(ENDED_IN_A_STEP, log, check=True)
    dropped, never = [finding.message for finding in check_log(log)]
    assert dropped == "session_end: the log is not complete: 1 event dropped"
    assert never == "step_begin: step 0 is never ended"
    *_, end = (event for _, event in read_events(log))
    assert isinstance(end, schema.SessionEnd)
    assert (end.reason, end.dropped) == ("exit", 1)


WHILE_A_STEP_HOLDS_THE_END = f"""
    import sys, threading, time, llamacpp_instr, llama_cpp
    import llama_cpp.llama_cpp as api
    held, other = (llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, n_threads=1, verbose=False)
                   for _ in range(2))
    computing, go_on = threading.Event(), threading.Event()

    @api.ggml_abort_callback
    def wait(_data):
        computing.set()
        go_on.wait(60)
        return False

    api.llama_set_abort_callback(held.ctx, wait, None)
    session = llamacpp_instr.record(sys.argv[1])
    threads = [threading.Thread(target=held.eval, args=([7],))]
    threads[0].start()
    computing.wait()
    threads.append(threading.Thread(target=session.close))
    threads[1].start()
    for _ in range(20):
        time.sleep(0.01)
        other.reset()
        first = threading.Thread(target=other.eval, args=([7],))
        first.start()
        first.join()
    print(threads[1].is_alive())
    go_on.set()
    for thread in threads: thread.join()
"""


def test_a_thread_that_first_decodes_while_a_session_ends_is_not_recorded(tmp_path: Path) -> None:
    """The session waits for a step of another thread, so the hooks are on."""
    log = tmp_path / "session.log"
    assert run_python(WHILE_A_STEP_HOLDS_THE_END, log, check=True).stdout == "True\n"
    assert list(check_log(log)) == []


def test_two_models_in_two_threads_give_one_clean_log(tmp_path: Path) -> None:
    for level in schema.LEVELS:
        log = tmp_path / f"{level}.log"
        run_python(TWO_THREADS, log, level, check=True)
        assert list(check_log(log)) == []
        events = [event for _, event in read_events(log)]
        contexts = {e.ctx for e in events if isinstance(e, schema.Context)}
        assert contexts == {0, 1}
        begins = {e.step: e for e in events if isinstance(e, schema.StepBegin)}
        ends = {e.step: e for e in events if isinstance(e, schema.StepEnd)}
        assert begins.keys() == ends.keys()
        # both ran at once: some step began before the other context's step had ended
        spans = [(begins[s].t, ends[s].t, begins[s].ctx) for s in begins]
        assert any(a[0] < b[0] < a[1] for a in spans for b in spans if a[2] != b[2]), (
            "the threads took turns"
        )
        # each context's computes are its own, made by one thread
        by_step = {e.step: e.ctx for e in begins.values()}
        for compute in (e for e in events if isinstance(e, schema.Compute)):
            assert compute.ctx == by_step[compute.step]
        threads = {(e.ctx, e.thread) for e in begins.values()}
        assert len(threads) == 2
