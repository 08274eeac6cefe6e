"""Measures whether a recorded program notices that it is watched, as ratios of its CPU time.

`python -m benchmarks.live_viewers` decodes in blocks, in one process and one context, each block
recorded in a log of its own. The blocks of a round differ in what `instr live` and eight viewers do
meanwhile: they show this log, or another one that grows as fast, or they do not run. The
first two keep the machine equally busy, which makes any program slower; the first against the
second is what being watched costs. CPU time is that of the program's threads, the recorder's
included.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from benchmarks.harness import arguments, median_ratio, scratch
from tests.kit import ui_kit
from tests.kit.native_kit import DEMO
from tests.kit.programs import line, program, say

VIEWERS = 8
WHAT = ("this", "another", "none")
"""what the viewers see"""
WORKER = ("-m", "benchmarks.decode_worker", "--recorded", DEMO)


def main() -> None:
    asked = arguments(__doc__, rounds=30, threads=[1, 2])
    print("| threads | 8 viewers see | CPU time, median ratio [95 % interval] |")
    print("|---|---|---|")
    for threads in asked.threads:
        times = measure(threads, asked.rounds)
        for what, measured, peer in (
            ("this log / another log", "this", "another"),
            ("another log / none", "another", "none"),
            ("this log / none", "this", "none"),
        ):
            ratio = median_ratio(times[measured], times[peer])
            print(f"| {threads} | {what} | {ratio} |", flush=True)


def measure(threads: int, rounds: int) -> dict[str, list[int]]:
    """The blocks' CPU times."""
    times: dict[str, list[int]] = {what: [] for what in WHAT}
    with scratch() as folder, program(*WORKER, threads) as worker:
        log, other = folder / "it.log", folder / "other.log"
        block(worker, log, None, None)
        recorded = log.read_bytes()
        for n in range(rounds):
            for what in WHAT if n % 2 else WHAT[::-1]:
                log.unlink()
                with replayed(recorded, other) as go:
                    shown = {"this": log, "another": other}.get(what)
                    times[what].append(block(worker, log, shown, go if shown == other else None))
    return times


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


def block(worker: Popen[str], log: Path, shown: Path | None, go: threading.Event | None) -> int:
    """CPU ns of a block that is recorded in `log`, while `shown` is watched. `go` is set as it
    begins."""
    say(worker, log)
    assert line(worker) == "begun"
    if shown is None:
        say(worker)
        return int(line(worker))
    viewing = ("-m", "tests.kit.live_viewers", "--viewers", VIEWERS)
    with (
        ui_kit.served(shown, command="live") as address,
        program(*viewing, address) as viewers,
    ):
        assert line(viewers).startswith("frame ")
        if go is not None:
            go.set()
        say(worker)
        ns = int(line(worker))
        time.sleep(0.3)  # for the last frames
        said, _ = viewers.communicate(timeout=60)
        assert said.count("frame ") > 1
    return ns


if __name__ == "__main__":
    main()
