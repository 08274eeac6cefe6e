"""Measures how often `instr diff` reports a difference between equal sessions.

Records the demo model N times with the same settings and compares independent pairs of neighbours:
1 with 2, 3 with 4, ... Prints, for each table, the share of rows and of tables with a difference,
and of --fail-above 0% and 5%. Run `python -m benchmarks.diff_noise` on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from converters.analyses.diff import DEFAULT_VIEWS, compute_diff
from llamacpp_instr.log.session import load_session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    rows, seen, tables, wrong, failed = Counter[str](), *(Counter[str]() for _ in range(4))
    with tempfile.TemporaryDirectory() as name:
        for _ in range(chosen.pairs):
            logs = [Path(name) / "a.log", Path(name) / "b.log"]
            for log in logs:
                _record(log, chosen.repeat, chosen.threads)
            a, b = (load_session(log) for log in logs)
            found = compute_diff(a, b)
            for threshold in (0.0, 0.05):
                failed[f"{threshold:.0%}"] += bool(found.slower_by(threshold))
            for report in found.reports[1:]:
                words = [row[-1] for row in report.rows]
                differing = sum(word in ("slower", "faster") for word in words)
                rows[report.title] += len(words)
                seen[report.title] += differing
                tables[report.title] += 1
                wrong[report.title] += differing > 0
    print(
        f"{chosen.pairs} pairs, --repeat {chosen.repeat} --threads {chosen.threads},"
        f" tables by {' and '.join(DEFAULT_VIEWS)}"
    )
    for title, n in tables.items():
        print(f"{title}: {seen[title]} of {rows[title]} rows, {wrong[title]} of {n} tables")
    for threshold, n in failed.items():
        print(f"--fail-above {threshold}: {n} of {chosen.pairs}")


def _record(log: Path, repeat: int, threads: int) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", "run", "demo", "--force", "--log", str(log)]
    command += ["--prompt", "Once upon a time", "-n", "64"]
    command += ["--repeat", str(repeat), "--threads", str(threads)]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
