"""Measures that the memory of every reader of logs is flat.

    python -m tests.programs.flat_memory [--gb 1]

Writes a log of a tenth of the size and one of the size, in which contexts, graphs and plans come
and go. Prints the peak memory of a process that reads each of them. 1 GB takes half an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.log_readers import ALL, write_coming_and_going
from tests.kit.native_kit import ROOT

_READ = """
import sys
from pathlib import Path
from tests.kit.log_readers import ALL
ALL[sys.argv[1]](Path(sys.argv[2]))
# ru_maxrss would count what the parent had when it forked
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
"""


def peak_memory(reader: str, log: Path) -> int:
    """Peak memory in bytes of a process that reads `log` with one of ALL."""
    done = subprocess.run(
        [sys.executable, "-c", _READ, reader, log],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1, help="size of the larger log")
    size = int(parser.parse_args().gb * 1e9)
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small.log", Path(name) / "large.log"
        for log, n_bytes in ((small, size // 10), (large, size)):
            n = write_coming_and_going(log, n_bytes, 1000)
            print(
                f"{log.stat().st_size / 1e9:.2f} GB: {n:,} contexts, one after the other",
                flush=True,
            )
        for reader in ALL:
            peaks = " and ".join(f"{peak_memory(reader, of) / 1e6:.0f} MB" for of in (small, large))
            print(f"{reader}: {peaks}", flush=True)


if __name__ == "__main__":
    main()
