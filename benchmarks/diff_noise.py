"""Measures how often `instr diff` reports a difference between equal sessions.

Records the demo model with the same settings and compares independent sides: one log with one, or
with `--logs 5` groups of five, recorded alternately. Prints, for each table, the share of rows and
of tables with a difference, and of --fail-above 0% and 5%. `--busy` lets as many processes as there
are CPUs compute meanwhile; without it, run this on an idle machine. Standard error has a line for
each pair. A pair that could not be recorded or compared is left out, and is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import arguments, record_demo, scratch
from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.converters.analyses.diff import Diff, compute_diff
from llamacpp_instr.log.session import Session, load_session


def main() -> None:
    chosen = arguments(__doc__, pairs=20, repeat=5, threads=1, logs=1, busy=False)
    tables: dict[str, list[tuple[int, int]]] = defaultdict(list)
    """title -> for each pair the rows, and those with a difference"""
    failed = Counter[str]()
    done = 0
    with scratch() as folder, neighbours(chosen.busy * (os.cpu_count() or 1)):
        for i in range(chosen.pairs):
            begin = time.monotonic()
            try:
                found = one_pair(folder / "session.log", chosen)
            except (InstrError, subprocess.CalledProcessError) as error:
                said = (getattr(error, "stderr", None) or str(error)).strip()
                tell(f"pair {i + 1} of {chosen.pairs}: left out: {said}")
                continue
            done += 1
            for threshold in (0.0, 0.05):
                failed[f"{threshold:.0%}"] += bool(found.slower_by(threshold))
            for report in found.reports[1:]:
                n_differing = sum(row[-1] in ("slower", "faster") for row in report.rows)
                tables[report.title].append((len(report.rows), n_differing))
            differ = [of.title for of in found.reports[1:] if tables[of.title][-1][1]]
            took = f"{time.monotonic() - begin:.0f} s"
            tell(f"pair {i + 1} of {chosen.pairs}, {took}: {'; '.join(differ) or 'no difference'}")
    print(
        f"{done} pairs of {chosen.logs}, {'busy' if chosen.busy else 'idle'},"
        f" --repeat {chosen.repeat} --threads {chosen.threads},"
        " tables by block and op"
    )
    for title, pairs in tables.items():
        n_rows, n_differing = np.transpose(pairs)
        wrong = f"{np.count_nonzero(n_differing)} of {len(pairs)} tables"
        print(f"{title}: {n_differing.sum()} of {n_rows.sum()} rows, {wrong}")
    for threshold, n in failed.items():
        print(f"--fail-above {threshold}: {n} of {done}")


def one_pair(log: Path, chosen: argparse.Namespace) -> Diff:
    """The differences of two sides that were recorded alternately."""
    sides: tuple[list[Session], list[Session]] = ([], [])
    for i in range(chosen.logs):
        for side in sides if i % 2 else reversed(sides):
            record_demo(log, 64, "--repeat", chosen.repeat, "--threads", chosen.threads)
            side.append(load_session(log))
    return compute_diff(*sides)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def neighbours(n: int) -> Iterator[None]:
    """While the block runs, `n` processes compute, on no CPU of their own."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
