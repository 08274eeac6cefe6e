"""A recorded llama-server under load for minutes, with a rotated log, beside one that is not.

    python -m benchmarks.server_load [--model FILE] [--minutes 10] [--clients 8] [--rotate 400000]

Clients ask both servers in turn, without a pause, with prompts that share beginnings. At the end,
the tokens of the log are compared with the servers' own metrics, and the memory of both servers is
printed by minute. Parts of the log are small, so that there are hundreds of them.
"""

from __future__ import annotations

import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.harness import arguments, own_bytes, scratch
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.session import load_session
from tests.kit.llama_programs import Server, llama_server
from tests.kit.native_kit import DEMO

OPTIONS = ("-c", "4096", "-np", "4", "-t", "1")
SAMPLE_S = 1.0
A_MINUTE = round(60 / SAMPLE_S)
"""samples"""


def main() -> None:
    options = arguments(__doc__, model=str(DEMO), minutes=10.0, clients=8, rotate=400_000)
    model, seconds = Path(options.model), 60 * options.minutes
    with scratch() as folder:
        log = folder / "server.log"
        with (
            llama_server(model, log, *OPTIONS, rotate=options.rotate) as recorded,
            llama_server(model, None, *OPTIONS) as plain,
        ):
            memory = load([recorded, plain], seconds, options.clients)
            metrics = figures_at_rest(recorded)
        parts = sorted(folder.glob("server*.log"))
        (run,) = find_runs(parts)
        session = load_session(run, computes=False)
        _, requests = find_requests(session)
        problems = sum(len(list(check_log(part))) for part in parts)
        print(f"{options.minutes:g} minutes, {len(requests):,} requests, {len(parts)} parts of")
        print(f"{sum(part.stat().st_size for part in parts):,} bytes, {problems} problems in them")
        print(f"output tokens: log {sum(len(of.token_times) for of in requests):,},", end=" ")
        print(f"server {metrics['tokens_predicted_total']:,.0f}")
        print(f"prompt tokens: log {sum(of.prompt for of in requests):,},", end=" ")
        print(f"server {metrics['prompt_tokens_total']:,.0f}")
    for name, values in zip(("recorded", "plain"), memory, strict=True):
        minutes = (values[i : i + A_MINUTE] for i in range(0, len(values), A_MINUTE))
        print(f"{name}, MiB:", *(f"{median(of) / 2**20:.1f}" for of in minutes))


def load(servers: list[Server], seconds: float, clients: int) -> list[list[int]]:
    """Keeps the clients busy; returns samples of each server's own memory, bytes."""
    end, memory = time.monotonic() + seconds, [[] for _ in servers]  # type: list[list[int]]
    over = threading.Event()

    def client(number: int) -> None:
        n = 0
        while time.monotonic() < end:
            story = "there was a cat " * ((number + n) % 12)
            for server in servers:
                leave_after = 0.05 if n % 16 == 15 else math.inf
                server.complete(f"Once upon a time {story}", 8 + (7 * number + n) % 40, leave_after)
            n += 1

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            for values, server in zip(memory, servers, strict=True):
                values.append(own_bytes(server.process.pid))

    with ThreadPoolExecutor(clients + 1) as pool:
        sampler = pool.submit(sample)
        try:
            for done in [pool.submit(client, number) for number in range(clients)]:
                done.result()
        finally:
            over.set()
        sampler.result()
    return memory


def figures_at_rest(server: Server) -> dict[str, float]:
    """The server's own metrics, once it has ended what clients left."""
    while (found := figures(server))["requests_processing"] or found["requests_deferred"]:
        time.sleep(SAMPLE_S)
    return found


def figures(server: Server) -> dict[str, float]:
    """The server's own metrics."""
    found = re.findall(r"^llamacpp:(\w+) (\S+)$", server.get("/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in found}


if __name__ == "__main__":
    main()
