"""How far `instr capacity` is from llama-servers that were measured in other settings.

    python -m benchmarks.capacity --model smollm2.gguf [--cases FOLDER] [--aiperf PROGRAM]
    python -m benchmarks.capacity --requests 1000000

It records a llama-server in each setting, under the load of aiperf (PyPI), whose clients ask again
when they have their answer. FOLDER keeps a log and aiperf's records of each case, and a case that
it has is not recorded again. Every case is then predicted from the log of the first, BASE. Errors
are those of the prediction against the log, and against what aiperf saw.

A server computes with one thread on the first CPU and aiperf runs on the second, which it needs to
itself. The figures are those of the time in which the load was steady: tokens per second between a
tenth and nine tenths of the arrivals, the median time per token of a request, and the time to the
first token of all requests except a tenth at both ends, or as many as there are clients if more.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.harness import arguments, peak_bytes
from benchmarks.llama_server import cpu_seconds
from llamacpp_instr.cli.capacity import find_prediction
from llamacpp_instr.converters.scheduling.capacity.capacity import (
    Capacity,
    Load,
    Point,
    Recorded,
    recorded_server,
)
from llamacpp_instr.converters.scheduling.capacity.report import replay
from llamacpp_instr.converters.scheduling.capacity.server import Outcome, simulate
from llamacpp_instr.converters.scheduling.capacity.step_times import Predict
from llamacpp_instr.converters.scheduling.capacity.workload import closed_loop, scaled
from llamacpp_instr.log.session import load_session
from tests.kit.aiperf import load_server, read_seen, write_tokenizer
from tests.kit.llama_programs import llama_server

SERVER_CPU, CLIENT_CPU = 0, 1
SLOT_CONTEXT = 1024
SECONDS = 40
"""in which clients ask"""
OUTPUT = 32


@dataclass(frozen=True)
class Case:
    slots: int = 4
    clients: int = 4
    prompt: int = 32
    """mean tokens of a message, without those of the chat template"""
    cache: str = "f16"


BASE = "4 slots, 4 clients"
CASES = {
    BASE: Case(),
    "the same again": Case(),
    "4 slots, 1 client": Case(clients=1),
    "4 slots, 2 clients": Case(clients=2),
    "4 slots, 8 clients": Case(clients=8),
    "4 slots, 16 clients": Case(clients=16),
    "1 slot, 8 clients": Case(slots=1, clients=8),
    "8 slots, 8 clients": Case(slots=8, clients=8),
    "8 slots, 16 clients": Case(slots=8, clients=16),
    "twice the message": Case(prompt=64),
    "a q8_0 cache": Case(cache="q8_0"),
}


class Figures(NamedTuple):
    """Figures of the requests of a server; times in ns."""

    tokens_per_s: float
    each: float
    """per token of a request, median"""
    first: float
    """token of a request, median"""
    late: float
    """95th percentile of the same"""


def main() -> None:
    options = arguments(__doc__, model=None, cases="out/capacity", aiperf="aiperf", requests=0)
    folder = Path(options.cases)
    if options.model:
        for name, case in CASES.items():
            if not (place(folder, name) / "server.log").exists():
                record(Path(options.model), options.aiperf, place(folder, name), case)
    if options.requests:
        print_speed(folder, options.requests)
        return
    print_replays(folder)
    print_predictions(folder)


def place(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-").replace(",", "")


# --- recording ---


def record(model: Path, aiperf: str, folder: Path, case: Case) -> None:
    """Records a server under load, and prints the CPU time that it took."""
    write_tokenizer(folder / "tokenizer", model)
    settings = (
        "-np", case.slots, "-c", case.slots * SLOT_CONTEXT, "-t", 1, "-fa", "on",
        "-ctk", case.cache, "-ctv", case.cache,
    )  # fmt: skip
    load = (
        "--benchmark-duration", SECONDS, "--num-dataset-entries", 1000,
        "--synthetic-input-tokens-mean", case.prompt,
        "--synthetic-input-tokens-stddev", case.prompt // 4,
        "--output-tokens-mean", OUTPUT, "--output-tokens-stddev", OUTPUT // 4,
    )  # fmt: skip
    started = folder / "starting.log"
    with on_cpu(SERVER_CPU), llama_server(model, started, *map(str, settings)) as server:
        before = cpu_seconds(server.process.pid), client_seconds()
        with on_cpu(CLIENT_CPU):
            load_server(
                server.port, case.clients, folder / "tokenizer", folder / "aiperf", *load,
                aiperf=aiperf,
            )  # fmt: skip
        took = cpu_seconds(server.process.pid) - before[0], client_seconds() - before[1]
    started.rename(folder / "server.log")
    print(f"{folder.name}: server {took[0]:.1f} CPU s, aiperf {took[1]:.1f} CPU s", flush=True)


def client_seconds() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """What starts in the block runs there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- figures ---


def figures(
    clients: int, begin: ArrayLike, first: ArrayLike, end: ArrayLike, output: ArrayLike
) -> Figures:
    """Figures of requests; an answer's tokens count as evenly spread from its first to its last."""
    order = np.argsort(begin, kind="stable")
    begin, first, end, output = (np.asarray(of, float)[order] for of in (begin, first, end, output))
    low, high = begin[0] + np.array([0.1, 0.9]) * (begin[-1] - begin[0])
    inside = (np.minimum(end, high) - np.maximum(first, low)).clip(0) / np.maximum(end - first, 1)
    cut = max(len(begin) // 10, clients)
    wait = (first - begin)[cut : len(begin) - cut]
    several = output > 1
    each = (end - first)[several] / (output[several] - 1)
    return Figures(
        float((inside * output).sum() / (high - low) * 1e9), float(np.median(each)),
        float(np.median(wait)), float(np.quantile(wait, 0.95)),
    )  # fmt: skip


def of_log(server: Recorded, clients: int) -> Figures:
    requests = server.requests
    times = [of.token_times for of in requests]
    return figures(
        clients, [of.first for of in requests], [of[0] for of in times], [of[-1] for of in times],
        [len(of) for of in times],
    )  # fmt: skip


def of_client(folder: Path, clients: int) -> Figures:
    seen = read_seen(folder / "aiperf")
    return figures(
        clients, [of.begin for of in seen], [of.first for of in seen], [of.end for of in seen],
        [of.output for of in seen],
    )  # fmt: skip


def simulated(outcome: Outcome, clients: int) -> Figures:
    return figures(clients, outcome.arrival, outcome.first, outcome.end, outcome.output)


# --- tables ---


def load_case(folder: Path, name: str) -> Recorded:
    return recorded_server(load_session(place(folder, name) / "server.log"))


def print_replays(folder: Path) -> None:
    """Print how far each recorded server is from itself, simulated under its own settings: the
    errors of each request that `instr capacity` shows, where requests join the recorded steps, and
    the percentiles of all requests where the simulated queue decides."""
    print(
        "| replay | requests | first token: error median | p99 | end: error median | p99 ", end=""
    )
    print("| freely: duration p50 | p99 | first token p50 | p99 |\n|---|" + 9 * "---:|")
    for name in CASES:
        server = load_case(folder, name)
        found = replay(server).figures
        errors = [
            f"{found[f'error of the {what}, {place}'][0]:.1%}"
            for what in ("first token", "end")
            for place in ("median", "p99")
        ]
        outcome = simulate(server.workload, server.settings, server.times.without_noise())
        ours = outcome.end - outcome.arrival, outcome.first - outcome.arrival
        real = (
            [of.token_times[-1] - of.first for of in server.requests],
            [of.to_first_token or 0 for of in server.requests],
        )
        freely = differences(percentiles(ours), percentiles(real))
        print(f"| {name} | {len(server.requests)} |", " | ".join([*errors, *freely]), "|")


def percentiles(values: Sequence[ArrayLike]) -> list[float]:
    """The 50th and 99th percentile of each."""
    return [float(np.quantile(of, place)) for of in values for place in (0.5, 0.99)]


def print_predictions(folder: Path) -> None:
    """Print what was measured, and how far the predictions from BASE are from it: from the log, and
    from what aiperf saw."""
    print("\n| prediction | tokens/s | time per token | first token p50 | p95 | not recorded |")
    print("|---|---:|---:|---:|---:|---:|")
    log = load_session(place(folder, BASE) / "server.log")
    predict, _, why = find_prediction(log, None)
    assert predict is not None, why
    base = recorded_server(log, predict)
    for name, case in CASES.items():
        point = predicted(base, predict, case)
        found = simulated(point.outcome, case.clients)
        measured = of_log(load_case(folder, name), case.clients)
        by_client = differences(found, of_client(place(folder, name), case.clients))
        shown = [f"{measured.tokens_per_s:.1f}", *(f"{of / 1e6:,.1f} ms" for of in measured[1:])]
        cells = zip(shown, differences(found, measured), by_client, strict=True)
        print(
            f"| {name} |",
            " | ".join(f"{of}: {log} ({client})" for of, log, client in cells),
            end="",
        )
        print(f" | {point.unmeasured:.0%} |")


def predicted(base: Recorded, predict: Predict | None, case: Case) -> Point:
    """The simulation of a case that was not recorded."""
    settings = replace(
        base.settings, slots=case.slots, ctx=case.slots * SLOT_CONTEXT, type_k=case.cache,
        type_v=case.cache,
    )  # fmt: skip
    own = np.mean([of.prompt for of in base.requests])
    longer = 1 + (case.prompt - CASES[BASE].prompt) / own
    load = Load(scaled(base.workload, longer))
    return Capacity(base, load, predict).point(case.clients, settings)


def differences(found: Sequence[float], real: Sequence[float]) -> list[str]:
    return [f"{a / b - 1:+.1%}" for a, b in zip(found, real, strict=True)]


def print_speed(folder: Path, n: int) -> None:
    """Print the CPU time and the memory of a simulation of `n` requests."""
    base = load_case(folder, BASE)
    begin = time.process_time()
    load = closed_loop(base.workload, 8, n, 0)
    made = time.process_time() - begin
    outcome = simulate(load, base.settings, base.times)
    took = time.process_time() - begin
    print(f"{len(outcome.output):,} requests, {outcome.output.sum():,} tokens: {took:.1f} CPU s,")
    print(f"{made:.1f} of them to make the requests; at most {peak_bytes() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
