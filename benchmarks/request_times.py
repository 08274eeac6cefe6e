"""Compares the times of requests in a log with what the clients' own clocks saw.

    python -m benchmarks.request_times [--runs 5]

Every run records `tests.kit.batch_server`: 8 clients, 4 slots, the demo model. A client reads the
clock once it runs again, so the delay of its thread is part of each difference and printed too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, arguments, scratch
from llamacpp_instr.converters.analyses.clock import compute_requests
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import load_session
from tests.kit.native_kit import DEMO


def main() -> None:
    differences: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments(__doc__, runs=5).runs):
        with scratch() as folder:
            log = folder / "server.log"
            command = [sys.executable, "-m", "tests.kit.batch_server", str(DEMO), str(log)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            compare(log, json.loads(done.stdout), differences)
    print("| difference of the log from the clients | median | p90 |")
    print("|---|---|---|")
    for what, values in differences.items():
        median, p90 = np.quantile(values, (0.5, 0.9))
        shown = [
            f"{100 * v:.2f} %" if "rate" in what else f"{v / 1e6:.2f} ms" for v in (median, p90)
        ]
        print(f"| {what} | {shown[0]} | {shown[1]} |")


def compare(log: Path, seen: list[dict[str, Any]], into: dict[str, list[float]]) -> None:
    """Add the differences of one run, in ns; of the rate, as a fraction."""
    session = load_session(log)
    _, requests = find_requests(session)
    requests.sort(key=lambda request: (request.name, request.arrival))
    seen.sort(key=lambda call: (f"client {call['client']}", call["sent"]))
    for request, call in zip(requests, seen, strict=True):
        assert len(request.token_times) == call["n_tokens"]
        first = call["got"][0] - call["sent"]
        into["to the first token"].append(abs(first - (request.to_first_token or 0)))
        between = np.abs(np.diff(call["got"]) - request.between_tokens)
        into["between tokens"] += between.tolist()
        delays = np.array(call["got"]) - np.array(call["pushed"])
        into["(delay of a client's thread)"] += delays.tolist()
    seconds = (max(c["done"] for c in seen) - min(c["sent"] for c in seen)) / 1e9
    rate = compute_requests(session)[0].figures["tokens/s by the clock"][0]
    assert isinstance(rate, float)
    into["rate by the clock"].append(abs(rate * seconds / sum(c["n_tokens"] for c in seen) - 1))


if __name__ == "__main__":
    main()
