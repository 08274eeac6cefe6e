"""What collecting and querying many logs costs: `python -m benchmarks.fleet [--logs 1000]`.

A log of 10 MB is the recorded session of tests/fixtures with its decodes repeated; the others are
the same with other ids, hosts and builds. Logs are written, collected and removed in batches, so
the disk holds few of them. Printed are

- kernels per CPU second of `instr collect`, and its peak memory by number and size of the logs
- the speed-up of Dask's LocalCluster with 1 and 2 workers
- the time of a percentile by host, op and build over all logs, and of other named queries
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from distributed import LocalCluster

from benchmarks.harness import RECORDED, arguments, cost_of_instr, instr, scratch, write_long_log
from llamacpp_instr.converters.fleet.queries import answer, open_database

MB = 10**6
N_OPS = 540_000
BATCH = 20
HOSTS, BUILDS = 20, 4
QUERIES = ("percentiles", "speed", "requests", "regressions")


def main() -> None:
    n_logs = arguments(__doc__, logs=1000).logs
    with scratch() as folder:
        source, dataset = folder / "source.log", folder / "fleet"
        _, n_ops = write_long_log(RECORDED, source, n_ops=N_OPS)
        print(f"a log: {source.stat().st_size / MB:.1f} MB, {n_ops:,} kernels of all threads")
        memory(folder)
        speed_up(folder, source)
        begin = time.perf_counter()
        for paths in batches(folder, source, n_logs):
            instr("collect", *paths, "-o", dataset)
        print(f"collected {n_logs:,} logs in {time.perf_counter() - begin:.0f} s")
        size = sum(path.stat().st_size for path in dataset.rglob("*.parquet"))
        print(f"the data set: {size / MB:.0f} MB")
        for query in QUERIES:
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                with open_database(dataset) as connection:
                    assert answer(connection, query).rows
                seconds.append(time.perf_counter() - begin)
            print(f"{query:12} {min(seconds):6.2f} s")


def memory(folder: Path) -> None:
    """Kernels per CPU second, and the peak of resident memory."""
    longer = folder / "longer.log"
    for number, (n_logs, times) in enumerate(((1, 1), (BATCH, 1), (1, BATCH))):
        _, n_ops = write_long_log(RECORDED, longer, n_ops=times * N_OPS)
        for paths in batches(folder, longer, n_logs):
            cpu, peak = cost_of_instr("collect", *paths, "-o", folder / f"memory-{number}")
        print(
            f"{n_logs:3} logs of {longer.stat().st_size / MB:4.0f} MB:"
            f" {n_ops * n_logs / cpu:9,.0f} kernels per CPU second, {peak / MB:.0f} MB resident"
        )
    longer.unlink()


def speed_up(folder: Path, source: Path) -> None:
    """The time of a batch with one and with two workers, interleaved."""
    for paths in batches(folder, source, BATCH):
        for i in range(3):
            seconds = []
            for n in (1, 2):
                with LocalCluster(n_workers=n, threads_per_worker=1, dashboard_address=None) as of:
                    words = "-o", folder / f"dask-{i}-{n}", "--dask", of.scheduler_address
                    begin = time.perf_counter()
                    instr("collect", *paths, *words)
                    seconds.append(time.perf_counter() - begin)
            one, two = seconds
            speed = f"{one / two:.2f} times as fast"
            print(f"Dask: {one:.1f} s with 1 worker, {two:.1f} s with 2, {speed}")


def batches(folder: Path, source: Path, n_logs: int) -> Iterator[list[Path]]:
    """Copies of a log with other ids, hosts and builds; those of a batch are removed after it."""
    head, _, rest = source.read_text().partition("\n")
    start = json.loads(head)
    paths: list[Path] = []
    for i in range(n_logs):
        start["id"] = f"{i:016x}"
        start["host"]["cpu"] = f"CPU {i % HOSTS}"
        start["producer"]["llama_cpp"] = f"0.3.{i // HOSTS % BUILDS}"
        start["time"] = f"2026-01-{1 + i * 28 // n_logs:02}T00:00:00Z"
        paths.append(folder / f"copy-{i}.log")
        paths[-1].write_text(json.dumps(start, separators=(",", ":")) + "\n" + rest)
        if len(paths) == BATCH or i + 1 == n_logs:
            yield paths
            while paths:
                paths.pop().unlink()


if __name__ == "__main__":
    main()
