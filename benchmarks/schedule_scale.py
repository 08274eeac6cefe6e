"""CPU seconds and memory of list scheduling: `python -m benchmarks.schedule_scale [--tasks N]`.

A million tasks with two million dependencies, on eight equal engines, and on three kinds of engine
with different speeds and a hand-over. Each is measured in a process of its own, without the time to
import and to make the graph; the memory is the peak of the whole process.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import arguments, in_own_process, peak_bytes
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
    n = arguments(__doc__, tasks=1_000_000).tasks
    for name in ENGINES:
        cpu, peak, over_bound = in_own_process(measure, name, n)
        print(
            f"{name:<20} {cpu:5.1f} CPU s, {peak / 1e6:5.0f} MB,"
            f" makespan {over_bound:.3f} times the lower bound"
        )


def measure(name: str, n: int) -> tuple[float, int, float]:
    """List scheduling of `n` tasks: CPU seconds, peak memory, makespan over the lower bound."""
    tasks = random_tasks(n)
    begun = time.process_time()
    made = schedule_list(tasks, ENGINES[name])
    cpu, peak = time.process_time() - begun, peak_bytes()
    return cpu, peak, made.makespan / compute_bounds(tasks, ENGINES[name])[0].ns


def random_tasks(n: int, seed: int = 0) -> Tasks:
    """`n` tasks, each after two of the previous hundred; two in five are products of matrices."""
    rng = np.random.default_rng(seed)
    labels = [
        Label("product", "MUL_MAT product", "MUL_MAT", "matrix", 0, "attention"),
        Label("sum", "ADD sum", "ADD", "vector", 0, "feed-forward"),
        Label("copy", "CPY copy", "CPY", "memory", 0, "kv"),
    ]
    label = rng.choice(3, n, p=[0.4, 0.5, 0.1]).astype(np.int32)
    ns = rng.integers(200, 200_000, n)
    sources = np.arange(n)[:, None] - rng.integers(1, 100, (n, 2))
    counts = np.where(sources.min(axis=1) >= 0, 2, 0)
    first = np.concatenate(([0], np.cumsum(counts)))
    size, layer = np.zeros(n, np.int64), np.zeros(n, np.int32)
    return Tasks(labels, label, ns, ns * 10, size, layer, first, sources[counts == 2].ravel())


if __name__ == "__main__":
    main()
