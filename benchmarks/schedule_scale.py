"""CPU seconds and memory of list scheduling: `python -m benchmarks.schedule_scale`.

A million tasks with two million dependencies, on eight equal engines, and on three kinds of engine
with different speeds and a hand-over. Each is measured in a process of its own, without the time to
import and to make the graph; the memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np

from llamacpp_instr.converters.scheduling.optimum import compute_bounds
from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.tasks import (
    EngineKind,
    Engines,
    Label,
    Tasks,
    equal_engines,
)

ENGINES = {
    "8 equal engines": equal_engines(8),
    "3 kinds, hand-over": Engines(
        (
            EngineKind("matrix", 4, frozenset({"matrix"}), {"MUL_MAT": 2.0}, 50e9),
            EngineKind("vector", 3, frozenset({"vector", "memory"})),
            EngineKind("any", 1, None, {"*": 0.5}),
        ),
        handover_ns=200,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=ENGINES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only, asked.tasks)))
        return
    for name in ENGINES:
        command = [sys.executable, "-m", "benchmarks.schedule_scale"]
        command += ["--only", name, "--tasks", str(asked.tasks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(
            f"{name:<20} {found['cpu_s']:5.1f} CPU s, {found['rss_mb']:5.0f} MB,"
            f" makespan {found['over_bound']:.3f} times the lower bound"
        )


def measure(name: str, n: int) -> dict[str, float]:
    """List scheduling of `n` tasks: CPU seconds, peak RSS in MB, makespan over the lower bound."""
    tasks = random_tasks(n)
    begun = time.process_time()
    made = schedule_list(tasks, ENGINES[name])
    cpu = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    bound = compute_bounds(tasks, ENGINES[name])[0].ns
    return {"cpu_s": cpu, "rss_mb": peak, "over_bound": made.makespan / bound}


def random_tasks(n: int, seed: int = 0) -> Tasks:
    """`n` tasks, each after two of the hundred before it; two in five are products of matrices."""
    rng = np.random.default_rng(seed)
    labels = [
        Label("product", "MUL_MAT product", "MUL_MAT", "matrix", 0, "attention"),
        Label("sum", "ADD sum", "ADD", "vector", 0, "feed-forward"),
        Label("copy", "CPY copy", "CPY", "memory", 0, "kv"),
    ]
    label = rng.choice(3, n, p=[0.4, 0.5, 0.1]).astype(np.int32)
    ns = rng.integers(200, 200_000, n)
    back = rng.integers(1, 100, (n, 2))
    sources = np.arange(n)[:, None] - back
    counts = np.where(sources.min(axis=1) >= 0, 2, 0)
    return Tasks(
        labels,
        label,
        ns,
        ns * 10,
        np.zeros(n, np.int64),
        np.zeros(n, np.int32),
        np.concatenate(([0], np.cumsum(counts))),
        sources[counts == 2].ravel(),
    )


if __name__ == "__main__":
    main()
