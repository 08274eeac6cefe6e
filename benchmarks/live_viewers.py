"""Measures whether a recorded program notices that it is watched, as ratios of its CPU time.

`python -m benchmarks.live_viewers` decodes in blocks, in one process and one context, each block
recorded in a log of its own. The blocks of a round differ in what `instr live` and eight viewers do
meanwhile: they show this log, or another one that grows as fast, or they do not run. The
first two keep the machine equally busy, which makes any program slower; the first against the
second is what being watched costs. CPU time is that of the program's threads, the recorder's
included.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.ratios import Ratio, median_ratio
from tests.kit import ui_kit
from tests.kit.native_kit import DEMO, ROOT

VIEWERS = 8
ROUNDS, DECODES = 30, 1200
WHAT = ("this", "another", "none")
"""what the viewers see"""
N_CTX = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--worker", metavar="THREADS", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker)
        return
    print("| threads | 8 viewers see | CPU time, median ratio [95 % interval] |")
    print("|---|---|---|")
    for threads in asked.threads:
        for what, ratio in measure(threads, asked.rounds).items():
            print(f"| {threads} | {what} | {ratio} |", flush=True)


def measure(threads: int, rounds: int) -> dict[str, Ratio]:
    """The ratios of the blocks' CPU times."""
    times: dict[str, list[int]] = {what: [] for what in WHAT}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.live_viewers", "--worker", str(threads)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as worker,
    ):  # fmt: skip
        log, other = Path(folder) / "it.log", Path(folder) / "other.log"
        block(worker, log, None, None)
        recorded = log.read_bytes()
        for n in range(rounds):
            for what in WHAT if n % 2 else WHAT[::-1]:
                log.unlink()
                with replayed(recorded, other) as go:
                    shown = {"this": log, "another": other}.get(what)
                    times[what].append(block(worker, log, shown, go if shown == other else None))
        assert worker.stdin is not None
        worker.stdin.close()
    return {
        "this log / another log": median_ratio(times["this"], times["another"]),
        "another log / none": median_ratio(times["another"], times["none"]),
        "this log / none": median_ratio(times["this"], times["none"]),
    }


@contextmanager
def replayed(recorded: bytes, log: Path) -> Iterator[threading.Event]:
    """A log that this process writes as fast as it was recorded, from the event that it gives."""
    begin = recorded.index(b'{"event":"step_begin"')
    head = re.sub(rb'"pid":\d+', b'"pid":%d' % os.getpid(), recorded[:begin], count=1)
    lines = recorded[begin : recorded.rindex(b'{"event":"session_end"')].splitlines(True)
    first, last = (int(re.findall(rb'"t":(\d+)', line)[0]) for line in (lines[0], lines[-1]))
    each = max(1, round(len(lines) * 1e8 / (last - first)))  # in a tenth of a second
    log.write_bytes(head)
    go, over = threading.Event(), threading.Event()

    def write() -> None:
        go.wait()
        with log.open("ab", buffering=0) as file:
            for at in range(0, len(lines), each):
                if over.wait(0.1):
                    break
                file.write(b"".join(lines[at : at + each]))

    writer = threading.Thread(target=write)
    writer.start()
    yield go
    over.set()
    go.set()
    writer.join()


def block(
    worker: subprocess.Popen[str], log: Path, shown: Path | None, go: threading.Event | None
) -> int:
    """CPU ns of a block that is recorded in `log`, while `shown` is watched. `go` is set as it
    begins."""
    tell(worker, str(log))
    assert hear(worker) == "begun"
    if shown is None:
        return int(tell_and_hear(worker))
    with (
        ui_kit.served(shown, command="live") as address,
        subprocess.Popen(
            [sys.executable, "-m", "tests.kit.live_viewers", address, "--viewers", str(VIEWERS)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as viewers,
    ):  # fmt: skip
        assert hear(viewers).startswith("frame ")
        if go is not None:
            go.set()
        ns = int(tell_and_hear(worker))
        time.sleep(0.3)  # for the last frames
        told, _ = viewers.communicate(timeout=60)
        assert told.count("frame ") > 1
    return ns


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell_and_hear(worker: subprocess.Popen[str]) -> str:
    tell(worker, "go")
    return hear(worker)


def work(threads: int) -> None:
    """For each log that standard input names: begin it, wait for a line, decode, print the ns."""
    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(DEMO).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = N_CTX
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    for log in sys.stdin:
        begun = api._lib.llama_instr_begin(log.strip().encode(), b"detailed", None, None, 1)
        assert begun == 0, begun
        decode(api, context, 3)
        print("begun", flush=True)
        sys.stdin.readline()
        begin = time.process_time_ns()
        decode(api, context, DECODES)
        assert api._lib.llama_instr_end() == 0
        print(time.process_time_ns() - begin, flush=True)


def decode(api: Any, context: Any, n: int) -> None:
    token = (ctypes.c_int32 * 1)(7)
    for i in range(n):
        if i % (N_CTX // 2) == 0:
            api.llama_memory_clear(api.llama_get_memory(context), False)
        assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0


if __name__ == "__main__":
    main()
