"""CPU time and memory of the reports of a large log: `python -m benchmarks.reports [--mb 1000]`.

The log is that of tests/fixtures at `verbose`, two threads, with its decodes repeated. Each command
runs in a process of its own; its start is included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.long_log import write_long_log

RECORDED = Path(__file__).parent.parent / "tests" / "fixtures" / "demo-verbose.log"
COMMANDS = ("summary LOG", "stats LOG", "requests LOG", "tree LOG", "page LOG -o PAGE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of the log")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log, page = Path(directory) / "long.log", Path(directory) / "long.html"
        n_ops = write_long_log(RECORDED, log, asked.mb * 10**6)
        print(f"{log.stat().st_size / 1e6:,.0f} MB, {n_ops:,} kernels of thread 0")
        for command in COMMANDS:
            files = {"LOG": str(log), "PAGE": str(page)}
            seconds, peak = cost([files.get(word, word) for word in command.split()])
            print(f"{command:<20} {seconds:6.1f} CPU s {peak / 1e6:8,.0f} MB")


def cost(words: list[str]) -> tuple[float, int]:
    """CPU seconds and the peak memory in bytes of `instr` with these arguments."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *words], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, words
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
