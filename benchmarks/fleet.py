"""What collecting and asking about many logs costs: `python -m benchmarks.fleet [--logs 1000]`.

A log of 10 MB is the recorded session of tests/fixtures with its decodes repeated; the others are
the same with other ids, hosts and builds. Logs are written, collected and removed in batches, so
the disk holds few of them. Printed are

- kernels per CPU second of `instr collect`, and its peak memory by number and size of the logs
- the speed-up of Dask's LocalCluster with 1 and 2 workers
- the time of a percentile by host, op and build over all logs, and of other named queries
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables import ROOT, write_long_log

MB = 10**6
BATCH = 20
HOSTS, BUILDS = 20, 4
QUERIES = ("percentiles", "speed", "requests", "regressions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=int, default=1000)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        print(json.dumps(work(*asked.work)))
        return
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        folder = Path(name)
        source = folder / "source.log"
        n_ops = write_long_log(source, 540_000)
        print(f"a log: {source.stat().st_size / MB:.1f} MB, {n_ops:,} kernels of all threads")
        memory(folder, source, n_ops)
        speed_up(folder, source)
        dataset = folder / "fleet"
        begin = time.perf_counter()
        for paths in batches(folder, source, asked.logs):
            measured("collect", dataset, *paths)
        print(f"collected {asked.logs:,} logs in {time.perf_counter() - begin:.0f} s")
        size = sum(path.stat().st_size for path in dataset.rglob("*.parquet"))
        print(f"the data set: {size / MB:.0f} MB")
        for query in QUERIES:
            seconds = min(measured("ask", dataset, query)["seconds"] for _ in range(3))
            print(f"{query:12} {seconds:6.2f} s")


def memory(folder: Path, source: Path, n_ops: int) -> None:
    """Kernels per CPU second, and the peak of resident memory."""
    for number, (n_logs, times) in enumerate(((1, 1), (BATCH, 1), (1, BATCH))):
        lines = source.read_text().splitlines(keepends=True)
        longer = folder / "longer.log"
        with longer.open("w") as file:
            file.writelines(lines)
        if times > 1:
            write_long_log(longer, times * n_ops)
        (paths,) = batches(folder, longer, n_logs)
        found = measured("collect", folder / f"memory-{number}", *paths)
        rate = n_ops * n_logs * times / found["cpu"]
        print(
            f"{n_logs:3} logs of {longer.stat().st_size / MB:4.0f} MB: {rate:9,.0f} kernels per"
            f" CPU second, {found['peak'] / MB:.0f} MB resident"
        )
        longer.unlink()
        for path in paths:
            path.unlink()


def speed_up(folder: Path, source: Path) -> None:
    """The time of a batch with one and with two workers, interleaved."""
    (paths,) = batches(folder, source, BATCH)
    ratios = []
    for i in range(3):
        one, two = (
            measured("dask", folder / f"dask-{i}-{n}", n, *paths)["seconds"] for n in (1, 2)
        )
        ratios.append(one / two)
        print(f"Dask: {one:.1f} s with 1 worker, {two:.1f} s with 2, {one / two:.2f} times as fast")
    for path in paths:
        path.unlink()


def batches(folder: Path, source: Path, n_logs: int) -> Iterator[list[Path]]:
    """Copies of a log with other ids, hosts and builds; those of the batch before are removed."""
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
            for path in paths if i + 1 < n_logs else ():
                path.unlink()
            paths = []


def measured(*words: object) -> dict[str, float]:
    """The figures of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fleet", "--work", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def work(what: str, dataset: str, *words: str) -> dict[str, float]:
    from functools import partial

    from llamacpp_instr.converters.fleet.collect import collect, find_sources, on_dask
    from llamacpp_instr.converters.fleet.queries import answer, open_database

    begin = time.perf_counter()
    if what == "ask":
        with open_database(Path(dataset)) as connection:
            assert answer(connection, words[0]).rows
    elif what == "collect":
        list(collect(find_sources(words), Path(dataset), None, False, lambda *_: None))
    else:
        from distributed import LocalCluster

        n, *paths = words
        one_thread = {"n_workers": int(n), "threads_per_worker": 1, "dashboard_address": None}
        with LocalCluster(**one_thread) as cluster:  # type: ignore[no-untyped-call]
            spread = partial(on_dask, cluster.scheduler_address)
            sources = find_sources(paths)
            begin = time.perf_counter()
            list(collect(sources, Path(dataset), None, False, lambda *_: None, spread))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.perf_counter() - begin,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak": peak_bytes(),
    }


def peak_bytes() -> int:
    """Of resident memory. `ru_maxrss` counts the process that started this one, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
