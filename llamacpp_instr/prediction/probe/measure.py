"""Measures the machine with ggml's own kernels, because these are what is compared with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from math import inf
from pathlib import Path

from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.llama.native import load
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.probe.file import Bandwidth, Barrier, Kernel, Probe
from llamacpp_instr.prediction.probe.ggml import F32, Ggml, Graph, fastest_ns

MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)
"""MiB; caches end between them"""
MOVED_AT_ONCE = 64
"""MiB that one graph moves at least, so that starting its threads does not count"""
ROW = 1024
"""elements of a row that is copied: 4 KiB"""
TYPES_OF_WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
TOKENS = (1, 8, 64, 256)
WIDTH, ROWS = 2048, 256
"""of the weight: 2 MiB in F32, 288 KiB in Q4_K"""
FLOPS_AT_ONCE = 2e8
EMPTY_OPS = 500
SECONDS = 0.3
"""for each figure"""
TRIES = 4
SLOWER = 2
"""times as slow as fewer threads, or as more memory, is implausible"""


def measure(on_progress: OnProgress) -> Probe:
    """Measures everything but what is implausible; `on_progress` gets figures done and in total."""
    (load_average, _, _) = os.getloadavg()
    ggml = Ggml()
    counts = thread_counts()
    sizes = [n for n in SIZES if 4 * n * MIB <= _free_memory()] or [SIZES[0]]
    total = len(counts) * (len(sizes) + len(TYPES_OF_WEIGHTS) * len(TOKENS) + 1)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found: list[Bandwidth | Kernel | Barrier] = []
    for part in (bandwidth(ggml, sizes, counts), _kernels(ggml, counts), barriers(ggml, counts)):
        for figure in part:
            found.append(figure)
            on_progress(len(found), total)
    copied = [of for of in found if isinstance(of, Bandwidth)]
    plausible = [of for of in copied if _is_plausible(of, copied)]
    on_progress(total, total)
    return Probe(
        probe=2,
        time=started,
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        load=round(load_average, 2),
        llama_cpp=str(load().info()["llama_cpp"]),
        bandwidth=plausible,
        kernels=[of for of in found if isinstance(of, Kernel)],
        barriers=[of for of in found if isinstance(of, Barrier)],
        left_out=total - len(found) + len(copied) - len(plausible),
    )


def _is_plausible(of: Bandwidth, all_: Sequence[Bandwidth]) -> bool:
    """Whether it is not far slower than with more memory."""
    more = (o for o in all_ if o.threads == of.threads and o.bytes > of.bytes)
    return all(o.bytes_per_second <= SLOWER * of.bytes_per_second for o in more)


def _times(graph: Graph, counts: Sequence[int]) -> Iterator[tuple[int, float]]:
    """ns for each number of threads, without those that are far slower than fewer threads: a thread
    that another process keeps from its CPU lets all others wait."""
    fewer = inf
    for n in counts:
        for _ in range(TRIES):
            ns = fastest_ns(partial(graph.compute, n), SECONDS)
            if ns <= SLOWER * fewer:
                yield n, ns
                fewer = min(fewer, ns)
                break


def thread_counts() -> list[int]:
    """1, 2, 4 and so on, and as many as `instr run` uses by default."""
    most = default_threads()
    return sorted({most, *(1 << i for i in range(10) if 1 << i < most)})


def bandwidth(ggml: Ggml, sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Bandwidth]:
    """Copies from one half of the memory to the other: they read and write as many bytes."""
    for size in sizes:
        times = max(1, MOVED_AT_ONCE // size)
        with Graph(ggml, (size + 1) * MIB) as graph:
            rows = size * MIB // 2 // (4 * ROW)
            one, other = graph.filled(F32, ROW, rows), graph.filled(F32, ROW, rows)
            for _ in range(times):
                graph.copy(one, other)
            for n, ns in _times(graph, counts):
                yield Bandwidth(n, size * MIB, times * size * MIB / ns * 1e9)


def _kernels(ggml: Ggml, counts: list[int]) -> Iterator[Kernel]:
    for name in TYPES_OF_WEIGHTS:
        for tokens in TOKENS:
            n_flops = 2 * WIDTH * ROWS * tokens
            times = max(1, int(FLOPS_AT_ONCE / n_flops))
            room = 4 * (WIDTH * ROWS + WIDTH * tokens + times * ROWS * tokens)
            with Graph(ggml, room) as graph:
                weight = graph.filled(BY_NAME[name].number, WIDTH, ROWS)
                activations = graph.filled(F32, WIDTH, tokens)
                for _ in range(times):
                    graph.product(weight, activations)
                for n, ns in _times(graph, counts):
                    yield Kernel(name, tokens, n, times * n_flops / ns * 1e9)


def barriers(ggml: Ggml, counts: list[int]) -> Iterator[Barrier]:
    with Graph(ggml, MIB) as graph:
        tensor = graph.filled(F32, 1, 1)
        for _ in range(EMPTY_OPS):
            tensor = graph.double(tensor)
        for n in counts:
            yield Barrier(n, fastest_ns(partial(graph.compute, n), SECONDS) / EMPTY_OPS)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_name() -> str:
    """As `host.cpu` in a log; empty if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")
