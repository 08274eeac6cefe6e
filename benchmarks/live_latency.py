"""Measures how old the figures on the page of `instr live` are.

`python -m benchmarks.live_latency` records llama_cpp.server with eight clients, opens the page in
Chromium, and reads what it shows after every change: the number of tokens in its first line. The
age of a token is the time from the end of its sampling, by the log, to the first change that counts
it, by the browser's clock; both clocks are the machine's. Prints the median and the 99th
percentile.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import INSTR, arguments, median_and_late, scratch
from llamacpp_instr.log.session import load_session
from tests.kit import ui_kit
from tests.load.client import ask
from tests.load.mix import requests_of
from tests.load.server import Server

CLIENTS = 8


def main() -> None:
    seconds = arguments(__doc__, seconds=60).seconds
    with scratch() as folder:
        log = folder / "server.log"
        shown = _record(log, seconds)
        session = load_session(log)
    tokens = session.tokens
    done = np.sort(tokens["t"] + tokens["dur"]) - session.start.t
    begin = session.start.wall
    counts = np.array([n for _, n in shown], np.int64)
    times = np.array([t for t, _ in shown])
    # the first change that counts at least this many tokens
    first = np.searchsorted(counts, np.arange(1, len(done) + 1))
    sampled = (done + begin) / 1e6
    seen = (first < len(counts)) & (sampled > times[0])  # while the page was open
    ages = times[first[seen]] - sampled[seen]
    print(f"{len(ages):,} of {len(done):,} tokens in {len(shown):,} changes of the page")
    print(f"age: {median_and_late(ages)}, most {ages.max():.0f} ms")


def _record(log: Path, seconds: int) -> list[tuple[float, int]]:
    """The changes of the page: when, in ms since 1970, and how many tokens it then counted."""
    under = (*INSTR, "exec", "--log", str(log), "--")
    until = time.monotonic() + seconds
    with Server(log.with_suffix(".txt"), under=under) as server:
        server.wait_until_it_answers()

        def client(number: int) -> None:
            while time.monotonic() < until:
                for request in requests_of(number):
                    ask(server, request)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        while not log.exists():
            time.sleep(0.1)
        with ui_kit.served(log, command="live") as address:
            remaining = max(until - time.monotonic(), 1)
            changes = ui_kit.run_script("latency.mjs", address=address, seconds=remaining)
            for thread in clients:
                thread.join()
        server.stop()
    return changes


if __name__ == "__main__":
    main()
