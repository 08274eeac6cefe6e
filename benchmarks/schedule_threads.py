"""Compares schedules on two engines with recordings of two threads.

    python -m benchmarks.schedule_threads [--rounds 8] [--decodes 48]

For five models of different shapes and types: a recording with one thread gives the tasks, whose
rows are divided among two engines as ggml divides them among threads. No kernel begins before all
parts of the one before it have ended, and each takes a measured barrier more; matrix products and
flash attention take two. An engine moves at most half of what two threads copied.
Recordings with one and two threads take turns. Prints the predicted and the measured median of a
decode with their ratio, `halved` for half the time of one thread against the measured one, and by
op where the difference is; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.shaped_model import LLAMA_1B_BLOCK, Shape, write_model
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.converters.analyses.noise import Ratio, compare, median_of_group
from llamacpp_instr.converters.scheduling.schedule import costs_of, schedule_program
from llamacpp_instr.converters.scheduling.sources import Recorded, recorded_graph
from llamacpp_instr.converters.scheduling.split import Divided, divide
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, Tasks
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.measure import bandwidth, barriers

INNER_BARRIER = frozenset({"MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT"})
"""kernels in which the threads wait for each other once: ggml-cpu.c, ops.cpp"""
SMALL = Shape(layers=8, width=768, heads=12, kv_heads=4, feed_forward=2048)
EXPERTS = Shape(6, 512, 8, 4, 1024, experts=8, used=2)
SHOWN = 0.02
"""share of a decode from which an op is shown"""
MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """What two threads cost and share."""

    barrier_ns: float
    bandwidth: float
    """bytes per second of two threads together, for the model's working set"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="recordings of each kind")
    parser.add_argument("--decodes", type=int, default=48)
    chosen = parser.parse_args()
    print("| model | predicted | measured | predicted / measured [95 % interval] | halved |")
    print("|---|---|---|---|---|")
    by_op: list[str] = []
    for name, model in models().items():
        predicted, measured, halved = [], [], []
        ops: dict[str, list[tuple[float, float]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for i in range(chosen.rounds):
                logs = {}
                for threads in (1, 2) if i % 2 else (2, 1):
                    logs[threads] = Path(folder) / f"{threads}.log"
                    record(model, threads, chosen.decodes, logs[threads])
                one, two = (recorded_graph(load_session(logs[n])) for n in (1, 2))
                machine = measure_machine(int(one.timed.bytes.sum()))
                predicted.append(float(predict(one, machine)))
                for op, both in compare_ops(one, two, machine).items():
                    ops.setdefault(op, []).append(both)
                measured.append(float(two.timed.ns.sum() + two.rest_ns))
                halved.append((int(one.timed.ns.sum()) + one.rest_ns) / 2)
        ratio = compare(median_of_group(measured), median_of_group(predicted), 1)
        print(row(name, ratio, float(np.median(halved) / np.median(measured))), flush=True)
        for op, rounds in ops.items():
            told, found = np.median(rounds, axis=0) / 1e3
            if max(told, found) > SHOWN * np.median(measured) / 1e3:
                by_op.append(f"| {name} | {op} | {told:.1f} µs | {found:.1f} µs |")
    print("\n| model | op | predicted | measured |\n|---|---|---|---|")
    print("\n".join(by_op))


def models() -> dict[str, str]:
    """Five models by name; those that do not exist are made."""
    folder = cache_dir() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    small = write_model(folder / "shaped-small-F16.gguf", SMALL)
    quantized = folder / "shaped-small-Q4_K_M.gguf"
    if not quantized.exists():
        instr("quantize", small, "--types", "Q4_K_M", "-o", folder)
    block = replace(LLAMA_1B_BLOCK, layers=2)
    return {
        "demo, 4 layers of 256": "demo",
        "8 layers of 768, F16": str(small),
        "8 layers of 768, Q4_K_M": str(quantized),
        "2 layers of 2048, Q8_0": str(write_model(folder / "shaped-2048-Q8_0.gguf", block, "Q8_0")),
        "6 layers of 8 experts, Q8_0": str(
            write_model(folder / "shaped-experts-Q8_0.gguf", EXPERTS, "Q8_0")
        ),
    }


def record(model: str, threads: int, decodes: int, log: Path) -> None:
    instr("run", model, "--prompt", "Once upon a time", "-n", decodes, "--threads", threads,
          "--ctx", 512, "--seed", 1, "--force", "--log", log)  # fmt: skip


def instr(*words: object) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True)


def measure_machine(working_set: int) -> Machine:
    """Now: what else runs on the machine changes it."""
    one, two = (of.ns for of in barriers([1, 2]))
    size = min(256, max(1, 2 ** int(np.ceil(np.log2(working_set / MIB)))))
    (copied,) = bandwidth([size], [2])
    return Machine(max(0.0, two - one), copied.bytes_per_second)


def predict(one: Recorded, machine: Machine) -> int:
    """The time of a decode on two engines, ns."""
    engines = two_engines(machine)
    tasks = with_barriers(divide(one.timed, "rows", engines), one, machine.barrier_ns)
    return schedule_program(tasks, engines).makespan + one.rest_ns


def two_engines(machine: Machine) -> Engines:
    return Engines((EngineKind("thread", 2, bandwidth=machine.bandwidth / 2),))


def compare_ops(one: Recorded, two: Recorded, machine: Machine) -> dict[str, tuple[float, float]]:
    """By op, and between kernels: the predicted and the measured ns of a decode."""
    engines = two_engines(machine)
    divided = divide(one.timed, "rows", engines)
    own = costs_of(divided.tasks, engines).ns[0]
    longest = np.zeros(len(one.timed.ns), np.int64)
    np.maximum.at(longest, np.array(divided.kernel), own)
    found: dict[str, tuple[float, float]] = {}
    for kernel, nodes in enumerate(one.timed.inside):
        op = one.timed.nodes.op[nodes[0]]
        # the barrier inside a kernel is in its time, the one after it is not
        waits = machine.barrier_ns * (op in INNER_BARRIER)
        told, measured = found.get(op, (0.0, 0.0))
        found[op] = (told + float(longest[kernel]) + waits, measured + float(two.timed.ns[kernel]))
    found["between kernels"] = (one.rest_ns + len(longest) * machine.barrier_ns, float(two.rest_ns))
    return found


def with_barriers(divided: Divided, one: Recorded, barrier_ns: float) -> Tasks:
    """Each kernel's parts wait for all parts of the kernel before, and take the barriers, too."""
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


def row(name: str, ratio: Ratio, halved: float) -> str:
    interval = "unknown" if ratio.low is None else f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    return (
        f"| {name} | {ratio.b / 1e6:.3f} ms | {ratio.a / 1e6:.3f} ms |"
        f" {ratio.value:.3f} {interval} | {halved:.3f} |"
    )


if __name__ == "__main__":
    main()
