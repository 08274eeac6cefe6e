"""Compares schedules on two engines with recordings of two threads.

    python -m benchmarks.schedule_threads [--rounds 8] [--decodes 48]

For five models of different shapes and types: a recording with one thread gives the tasks, whose
rows are divided among two engines as ggml divides them among threads. No kernel begins before all
parts of the previous one have ended, and each takes one measured barrier longer; matrix products
and flash attention take two. An engine moves at most half of what two threads copied. Recordings
with one and two threads take turns. Prints the predicted and the measured median of a decode with
their ratio, `halved` for half the time of one thread against the measured one, and by op where the
difference is; run it on an idle machine.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import arguments, instr, median_ratio, scratch
from llamacpp_instr.converters.scheduling.schedule import costs_of, schedule_program
from llamacpp_instr.converters.scheduling.sources import Recorded, recorded_graph
from llamacpp_instr.converters.scheduling.split import Divided, divide
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, Int64, Tasks
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.measure import bandwidth, barriers
from llamacpp_instr.prediction.recorded import Run, Shape, record_runs, write_random_layers
from tests.kit.native_kit import DEMO

INNER_BARRIER = frozenset({"MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT"})
"""kernels in which the threads wait for each other once: ggml-cpu.c, ops.cpp"""
SMALL = Shape(768, 2048, 12, 4, 1024)
BLOCKS_OF_1B = Shape(2048, 8192, 32, 8, 1024)
EXPERTS = Shape(512, 1024, 8, 4, 1024, experts=8, used=2)
PAST = 4
SHOWN = 0.02
"""the least share of a decode for which an op is shown"""
MIB = 1 << 20


def main() -> None:
    with scratch() as folder:
        compare(folder, arguments(__doc__, rounds=8, decodes=48))


def compare(folder: Path, chosen: argparse.Namespace) -> None:
    print("| model | predicted | measured | predicted / measured [95 % interval] | halved |")
    print("|---|---|---|---|---|")
    by_op: list[str] = []
    for name, model in made_models(folder).items():
        predicted, measured, halved = [], [], []
        ops: dict[str, list[tuple[float, float]]] = {}
        for i in range(chosen.rounds):
            recorded = {}
            for threads in (1, 2) if i % 2 else (2, 1):
                log = folder / "session.log"
                record_runs(model, log, threads, [Run(1, chosen.decodes, past=PAST)])
                recorded[threads] = recorded_graph(load_session(log))
            one, two = recorded[1], recorded[2]
            engines, barrier_ns = measure_machine(int(one.timed.bytes.sum()))
            divided = divide(one.timed, "rows", engines)
            tasks = with_barriers(divided, one, barrier_ns)
            predicted.append(schedule_program(tasks, engines).makespan + one.rest_ns)
            own = costs_of(divided.tasks, engines).ns[0]
            for op, both in compare_ops(one, two, divided, own, barrier_ns).items():
                ops.setdefault(op, []).append(both)
            measured.append(float(two.timed.ns.sum() + two.rest_ns))
            halved.append((int(one.timed.ns.sum()) + one.rest_ns) / 2)
        ratio, whole = median_ratio(predicted, measured), np.median(measured)
        print(
            f"| {name} | {np.median(predicted) / 1e6:.3f} ms | {whole / 1e6:.3f} ms |"
            f" {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] |"
            f" {np.median(halved) / whole:.3f} |",
            flush=True,
        )
        for op, rounds in ops.items():
            forecast, real = np.median(rounds, axis=0) / 1e3
            if max(forecast, real) > SHOWN * whole / 1e3:
                by_op.append(f"| {name} | {op} | {forecast:.1f} µs | {real:.1f} µs |")
    print("\n| model | op | predicted | measured |\n|---|---|---|---|")
    print("\n".join(by_op))


def made_models(folder: Path) -> dict[str, Path]:
    """Five models by name."""
    small, block, experts = (
        write_random_layers(folder / f"{name}.gguf", shape, [kind] * layers)
        for name, shape, kind, layers in (
            ("small-F16", SMALL, "F16", 8),
            ("block", BLOCKS_OF_1B, "Q8_0", 2),
            ("experts", EXPERTS, "Q8_0", 6),
        )
    )
    instr("quantize", small, "--types", "Q4_K_M", "-o", folder)
    return {
        "demo, 4 layers of 256": DEMO,
        "8 layers of 768, F16": small,
        "8 layers of 768, Q4_K_M": folder / "small-Q4_K_M.gguf",
        "2 layers of 2048, Q8_0": block,
        "6 layers of 8 experts, Q8_0": experts,
    }


def measure_machine(working_set: int) -> tuple[Engines, float]:
    """The engines of two threads, for `working_set` bytes, and the ns of a barrier, now: other work
    on the machine changes them."""
    one, two = (of.ns for of in barriers([1, 2]))
    size = min(256, max(1, 2 ** int(np.ceil(np.log2(working_set / MIB)))))
    (copied,) = bandwidth([size], [2])
    engines = Engines((EngineKind("thread", 2, bandwidth=copied.bytes_per_second / 2),))
    return engines, max(0.0, two - one)


def compare_ops(
    one: Recorded, two: Recorded, divided: Divided, own: Int64, barrier_ns: float
) -> dict[str, tuple[float, float]]:
    """By op, and between kernels: the predicted and the measured ns of a decode. `own` has the ns
    of each task on an engine."""
    longest = np.zeros(len(one.timed.ns), np.int64)
    np.maximum.at(longest, np.array(divided.kernel), own)
    found: dict[str, tuple[float, float]] = {}
    for kernel, nodes in enumerate(one.timed.inside):
        op = one.timed.nodes.op[nodes[0]]
        # the barrier inside a kernel is in its time, the one after it is not
        waits = barrier_ns * (op in INNER_BARRIER)
        predicted, measured = found.get(op, (0.0, 0.0))
        predicted += float(longest[kernel]) + waits
        found[op] = (predicted, measured + float(two.timed.ns[kernel]))
    found["between kernels"] = (one.rest_ns + len(longest) * barrier_ns, float(two.rest_ns))
    return found


def with_barriers(divided: Divided, one: Recorded, barrier_ns: float) -> Tasks:
    """Each kernel's parts wait for all parts of the previous kernel, and also take the barriers."""
    tasks, kernel = divided.tasks, np.array(divided.kernel)
    begins = np.flatnonzero(np.diff(kernel, prepend=-1))
    ends = [*begins[1:].tolist(), len(tasks)]
    first, sources = [0], []
    before: range = range(0)
    for begin, end in zip(begins.tolist(), ends, strict=True):
        for _ in range(begin, end):
            sources.extend(before)
            first.append(len(sources))
        before = range(begin, end)
    nodes = one.timed.nodes
    ops = [nodes.op[one.timed.inside[k][0]] for k in divided.kernel]
    waits = np.array([1 + (op in INNER_BARRIER) for op in ops])
    return replace(
        tasks,
        ns=tasks.ns + np.round(waits * barrier_ns).astype(np.int64),
        first=np.array(first, np.int64),
        sources=np.array(sources, np.int64),
    )


if __name__ == "__main__":
    main()
