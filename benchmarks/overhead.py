"""Measures the overhead of recording as ratios of CPU time and of instructions.

`python -m benchmarks.overhead` measures interleaved pairs on the same machine in one run: with a
session and without (block by block, in several processes), the patched library without a session
and the unpatched build of the same sdist (process by process), and with a no-op eval callback in C,
which is llama.cpp's own way to observe a graph, and without. Callgrind counts the instructions of a
decode with and without the patches; this figure has hardly any noise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.ratios import median_ratio
from benchmarks.shaped_model import LLAMA_100M, write_model
from llamacpp_instr.base.system import cache_dir
from tests.kit.native_kit import DEMO, ROOT, countable_library, unpatched_library

WORKER = ROOT / "benchmarks" / "decode_worker.py"
# the memory layout of a process changes a ratio by about 1 %
PROCESSES, QUICK = 40, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the processes")
    processes = QUICK if parser.parse_args().quick else PROCESSES
    large = cache_dir() / "tests" / "random-100m.gguf"
    large.parent.mkdir(parents=True, exist_ok=True)
    # blocks of about 0.1 s, so that other load on the machine affects both of a pair
    models = {
        "demo, 3.7 M parameters": (DEMO, 16, 400),
        "random, 100 M parameters": (write_model(large, LLAMA_100M), 8, 12),
    }

    print("| model | threads | measured / peer | CPU time, median ratio [95 % interval] |")
    print("|---|---|---|---|")
    for name, (model, blocks, decodes) in models.items():
        for threads in (1, 2):
            for variants, part in ((("detailed", "verbose"), 1), (("callback",), 4)):
                times = of_processes(
                    processes, model, threads, blocks // part, decodes, "off", *variants
                )
                for variant in variants:
                    ratio = median_ratio(times[variant], times["off"])
                    row(name, threads, f"{variant} / off", ratio)
            by_library: dict[bool, list[int]] = {False: [], True: []}
            for pair in range(processes // 2):
                for unpatched in (False, True) if pair % 2 else (True, False):
                    blocks_ns = work(model, threads, 4, decodes, "off", unpatched=unpatched)["off"]
                    by_library[unpatched].append(sum(blocks_ns))
            ratio = median_ratio(by_library[False], by_library[True])
            row(name, threads, "off / unpatched", ratio)
    if shutil.which("valgrind"):
        off, plain = (instructions_per_decode(unpatched=which) for which in (False, True))
        print(
            f"\nInstructions for a decode (demo, 1 thread, callgrind): off / unpatched = "
            f"{off:,.0f} / {plain:,.0f} = {off / plain:.5f}"
        )
    else:
        print("\nvalgrind is not installed: instructions were not counted")


def row(model: str, threads: int, what: str, ratio: object) -> None:
    print(f"| {model} | {threads} | {what} | {ratio} |", flush=True)


def of_processes(
    processes: int, model: Path, threads: int, blocks: int, decodes: int, *variants: str
) -> dict[str, list[int]]:
    """Like `work`, in `processes` processes."""
    each = [work(model, threads, blocks, decodes, *variants) for _ in range(processes)]
    return {variant: [ns for times in each for ns in times[variant]] for variant in variants}


def work(
    model: Path, threads: int, blocks: int, decodes: int, *variants: str, unpatched: bool = False
) -> dict[str, list[int]]:
    """CPU nanoseconds of every block, by variant."""
    arguments = [str(model), str(threads), str(blocks), str(decodes), *variants]
    done = subprocess.run(
        [sys.executable, str(WORKER), *arguments],
        env=environment(unpatched), check=True, capture_output=True, text=True,
    )  # fmt: skip
    times: dict[str, list[int]] = json.loads(done.stdout)
    return times


def instructions_per_decode(*, unpatched: bool) -> float:
    """Instructions of a single-token decode, by callgrind: the difference of two runs' lengths."""
    few, many = 20, 120
    counted = {}
    for decodes in (few, many):
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
             sys.executable, str(WORKER), str(DEMO), "1", "1", str(decodes), "off"],
            env={
                **environment(unpatched),
                "LLAMA_CPP_LIB_PATH": str(countable_library(patched=not unpatched)),
                "PYTHONHASHSEED": "0",
            },
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found = re.search(r"Collected : (\d+)", done.stderr)
        assert found, done.stderr[-2000:]
        counted[decodes] = int(found[1])
    return (counted[many] - counted[few]) / (many - few)


def environment(unpatched: bool) -> dict[str, str]:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads spin at first
    if unpatched:
        env["LLAMA_CPP_LIB_PATH"] = str(unpatched_library())
    return env


if __name__ == "__main__":
    main()
