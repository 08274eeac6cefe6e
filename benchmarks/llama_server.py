"""Compares the log of a llama-server with its clients' own clocks, and a recorded server with one
that is not.

    python -m benchmarks.llama_server [--model FILE] [--clients 8] [--pairs 6]

The server has four slots; every client asks twice, greedily, and reads the stream of its answer.
The first table has the bytes of the log by event. The second has the medians and the largest of the
differences between the log and the clients: positive if the client saw it later. The ratio is that
of the server's CPU time from its first request to its last, recorded divided by not recorded; there
one client asks ROUNDS times, so that the batches of both are the same.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import arguments, median_ratio, scratch
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import load_session
from tests.kit.llama_programs import Answer, llama_server
from tests.kit.native_kit import DEMO

ROUNDS = 6
OPTIONS = ("-c", "8192", "-np", "4")


def main() -> None:
    options = arguments(__doc__, model=str(DEMO), clients=8, pairs=6)
    model = Path(options.model)
    with scratch() as folder:
        log = folder / "server.log"
        answers, _ = serve(model, log, options.clients)
        print(f"{log.stat().st_size:,} bytes of log for {len(answers)} requests\n")
        print_bytes(log)
        compare(log, answers)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for i in range(options.pairs):
            for recorded in (True, False) if i % 2 else (False, True):
                path = folder / f"{i}.log" if recorded else None
                seconds[recorded].append(serve(model, path, 1, ROUNDS)[1])
        if options.pairs:
            ratio = median_ratio(seconds[True], seconds[False])
            print(f"\nCPU time, recorded / not recorded: {ratio}")


def serve(
    model: Path, log: Path | None, clients: int, rounds: int = 1
) -> tuple[list[Answer], float]:
    """The answers of a server, and the CPU seconds that it spent on them."""
    prompts = [[f"Once upon a time {'there was a cat ' * i}"] * 2 * rounds for i in range(clients)]
    tokens = [[16 + 2 * i, 17 + 2 * i] * rounds for i in range(clients)]
    with llama_server(model, log, *OPTIONS) as server:
        before = cpu_seconds(server.process.pid)
        answers = server.complete_all(prompts, tokens)
        return answers, cpu_seconds(server.process.pid) - before


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, of all its threads, as Linux counts it: in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_bytes(log: Path) -> None:
    """Print the bytes of a log by event, the largest first."""
    lines = log.read_bytes().splitlines(keepends=True)
    count, size = Counter[str](), Counter[str]()
    for line in lines:
        event = msgspec.json.decode(line)["event"]
        count[event] += 1
        size[event] += len(line)
    print("| event | lines | bytes |\n|---|---:|---:|")
    for event, n in size.most_common():
        print(f"| {event} | {count[event]:,} | {n:,} |")
    print()


def compare(log: Path, answers: list[Answer]) -> None:
    """Print how much later the clients saw what the log has."""
    _, requests = find_requests(load_session(log))
    assert len(requests) == len(answers)
    of = {len(request.token_times): request for request in requests}
    found = []
    for answer in answers:
        timings = answer.timings
        request = of[timings["predicted_n"]]
        assert (request.prompt, request.reused) == (timings["prompt_n"], timings["cache_n"])
        to_first = request.to_first_token or 0
        found.append((
            answer.first - request.token_times[0], answer.end - request.token_times[-1],
            answer.first - answer.begin - to_first,
        ))  # fmt: skip
    print("| the client's clock minus the log's | median | largest |")
    print("|---|---:|---:|")
    names = ("first token", "last token", "time to the first token")
    for name, values in zip(names, np.array(found).T / 1e6, strict=True):
        print(f"| {name} | {np.median(values):.2f} ms | {np.abs(values).max():.2f} ms |")


if __name__ == "__main__":
    main()
