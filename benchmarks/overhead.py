"""Measures the overhead of recording as ratios of CPU time and of instructions.

`python -m benchmarks.overhead` measures interleaved pairs on the same machine in one run: with and
without a session (block by block, in several processes), the patched library without a session and
the unpatched build of the same sdist (process by process), and with and without a no-op eval
callback in C, which is llama.cpp's own way to observe a graph. --quick uses a fifth of the
processes. Callgrind counts the instructions of a decode with and without the patches; this figure
has hardly any noise. With --devices it measures sessions on BLAS and on Mesa's lavapipe instead:
both compute on the CPU, so its time is the whole cost. With --rpc it measures a client and two
servers on this machine. Both also measure how much two runs without sessions differ.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.harness import MODEL_100M, MODEL_EXPERTS, ROOT, arguments, median_ratio
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.prediction.recorded import write_random_layers
from tests.kit.backends import blas_module, vulkan_environment, vulkan_module
from tests.kit.native_kit import DEMO, countable_library, unpatched_library
from tests.kit.rpc_kit import client, recorded_server

WORKER = ROOT / "benchmarks" / "decode_worker.py"
# the memory layout of a process changes a ratio by about 1 %
PROCESSES, QUICK = 40, 8

Times: TypeAlias = "dict[str, list[int]]"


def main() -> None:
    options = arguments(__doc__, quick=False, devices=False, rpc=False)
    processes = QUICK if options.quick else PROCESSES
    if options.devices:
        measure_devices(processes)
        return
    if options.rpc:
        measure_rpc(processes // 2)
        return
    large = large_model()
    experts = write_random_layers(large.with_name("random-experts.gguf"), *MODEL_EXPERTS)
    # blocks of about 0.1 s, so that other load on the machine affects both of a pair
    models = {
        "demo, 3.7 M parameters": (DEMO, 16, 400),
        "random, 100 M parameters": (large, 8, 12),
        "random, 4 of 16 experts, 107 M parameters": (experts, 8, 24),
    }

    print("| model | threads | measured / peer | CPU time, median ratio [95 % interval] |")
    print("|---|---|---|---|")
    for (name, (model, blocks, decodes)), threads in product(models.items(), (1, 2)):

        def row(what: str, measured: list[int], peer: list[int]) -> None:
            ratio = median_ratio(measured, peer)
            print(f"| {name} | {threads} | {what} | {ratio} |", flush=True)  # noqa: B023

        for variants, part in ((("detailed", "verbose"), 1), (("callback",), 4)):
            times = in_turns(processes, model, threads, blocks // part, decodes, "off", *variants)
            for variant in variants:
                row(f"{variant} / off", times[variant], times["off"])
        by_library: dict[bool, list[int]] = {False: [], True: []}
        for pair in range(processes // 2):
            for unpatched in (False, True) if pair % 2 else (True, False):
                of = work(model, threads, 4, decodes, "off", unpatched=unpatched)
                by_library[unpatched].append(sum(of["off"]))
        row("off / unpatched", by_library[False], by_library[True])
    if shutil.which("valgrind"):
        off, plain = (instructions_per_decode(unpatched=which) for which in (False, True))
        print(
            f"\nInstructions for a decode (demo, 1 thread, callgrind): off / unpatched = "
            f"{off:,.0f} / {plain:,.0f} = {off / plain:.5f}"
        )
    else:
        print("\nvalgrind is not installed: instructions were not counted")


def large_model() -> Path:
    path = cache_dir() / "tests" / "random-100m.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_random_layers(path, *MODEL_100M)


def measure_devices(processes: int) -> None:
    lavapipe = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    blas = {"GGML_BACKEND_PATH": str(blas_module())}
    # BLAS computes batches of 32 tokens and more
    devices = {
        "Vulkan on lavapipe": (lavapipe, "16", "4"),
        "OpenBLAS": (blas, "12x64", "2x64"),
    }
    models = {"demo, 3.7 M parameters": DEMO, "random, 100 M parameters": large_model()}
    print("| device | model | block | measured / not recorded | CPU time [95 % interval] | pairs |")
    print("|---|---|---|---|---|---|")
    variants = ("detailed", "verbose", "again")
    for device, (on, *blocks) in devices.items():
        for (name, model), decodes in zip(models.items(), blocks, strict=True):
            times = in_turns(processes, model, 1, 8, decodes, "off", *variants, on=on)
            for variant in variants:
                cells = (device, name, decodes, variant, beside_off(times, variant))
                print("|", " | ".join(cells), "|", flush=True)


def measure_rpc(rounds: int) -> None:
    models = {
        "demo, 3.7 M parameters": (DEMO, 600),
        "random, 100 M parameters": (large_model(), 60),
    }
    print("A client and two servers, and beside each ratio the range of 95 % of its pairs:\n")
    print("| model | decodes | recorded / not | pairs | not recorded / not | pairs |")
    print("|---|---|---|---|---|---|")
    for name, (model, decodes) in models.items():
        columns = []
        times: Times = defaultdict(list)
        variants = ["off", "on", "again"]
        for _ in range(rounds):
            for variant in variants:
                times[variant].append(cpu_of_machines(model, decodes, variant == "on"))
            variants.append(variants.pop(0))
        for variant in ("on", "again"):
            columns.append(beside_off(times, variant))
        print("|", " | ".join(map(str, [name, decodes, *columns])), "|", flush=True)


def beside_off(times: Times, variant: str) -> str:
    """Two cells: the median ratio, and the range of 95 % of the pairs."""
    low, high = np.quantile(np.divide(times[variant], times["off"]), [0.025, 0.975])
    return f"{median_ratio(times[variant], times['off'])} | {low:.3f} to {high:.3f}"


def cpu_of_machines(model: Path, decodes: int, recorded: bool) -> int:
    """CPU nanoseconds of a client and two servers in this many decodes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder, f"{name}.log") if recorded else None for name in "abc"]
        servers = [stack.enter_context(recorded_server(log)) for log in logs[:2]]
        also = ",".join(str(server.process.pid) for server in servers)
        log = ("--log", logs[2]) if recorded else ()
        options = ("--decodes", decodes, "--also", also, *log)
        addresses = [server.address for server in servers]
        done = client(model, Path(folder, "out.npz"), addresses, *options)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["cpu"])


def in_turns(processes: int, *words: Any, on: Mapping[str, str] | None = None) -> Times:
    """What `work` measures in this many processes."""
    times: Times = defaultdict(list)
    for _ in range(processes):
        for variant, ns in work(*words, on=on).items():
            times[variant] += ns
    return times


def work(
    model: Path, threads: int, blocks: int, decodes: int | str, *variants: str,
    unpatched: bool = False, on: Mapping[str, str] | None = None,
) -> Times:  # fmt: skip
    """CPU nanoseconds of every block, by variant; `on` is the environment of a device."""
    words = [str(model), str(threads), str(blocks), str(decodes), *variants]
    done = subprocess.run(
        [sys.executable, str(WORKER), *words],
        env={**environment(unpatched), **(on or {})}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    times: Times = json.loads(done.stdout)
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
