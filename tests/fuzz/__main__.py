"""`make fuzz`: fuzzes every surface for FUZZ_SECONDS and prints a table.

A row is printed when its surface is done, sums and findings at the end. Exits with status 1 if
there are findings; their inputs are in out/fuzz/findings. The next run starts with the inputs that
this one kept in out/fuzz/corpus.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import SURFACES

ROOT = Path(__file__).parent.parent.parent
COMMITTED = Path(__file__).parent / "corpus"
OUT = ROOT / "out" / "fuzz"


class Row(NamedTuple):
    surface: str
    executions: int
    seconds: int
    edges: int
    """edges of our code that ran"""
    features: int
    """libFuzzer's: edges, and how often each ran"""
    findings: list[str]


def main(names: list[str], seconds: int) -> int:
    wrong = [name for name in names if name not in SURFACES]
    if wrong:
        print(f"no surface {wrong[0]}; there are {', '.join(SURFACES)}", file=sys.stderr)
        return 2
    print(_line("surface", "executions", "seconds", "edges", "features", "findings"), flush=True)
    rows = []
    for name in names or SURFACES:
        rows.append(row := fuzz(name, seconds))
        _print_row(row)
    findings = [finding for row in rows for finding in row.findings]
    executions, spent = (
        sum(getattr(row, key) for row in rows) for key in ("executions", "seconds")
    )
    print(_line(f"{len(rows)} surfaces", f"{executions:,}", f"{spent:,}", "", "", len(findings)))
    for finding in findings:
        print(finding)
    return int(bool(findings))


def fuzz(surface: str, seconds: int) -> Row:
    learnt = OUT / "corpus" / surface
    learnt.mkdir(parents=True, exist_ok=True)
    findings = OUT / "findings"
    corpus = (str(learnt), str(COMMITTED / SURFACES[surface]))
    arguments = [surface, str(findings), str(seconds), *corpus]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.worker", *arguments],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    (OUT / f"{surface}.txt").write_text(done.stderr)
    places = re.findall(r"^FINDING (.*)$", done.stderr, re.MULTILINE)
    ended = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    if done.returncode or not ended:
        places.append(f"the fuzzer ended with {done.returncode}; see out/fuzz/{surface}.txt")
    covered = re.findall(r" cov: (\d+) ft: (\d+) ", done.stderr) or [("0", "0")]
    edges, features = covered[-1]
    return Row(
        surface,
        int(ended[1]) if ended else 0,
        round(time.monotonic() - begin),
        int(edges),
        int(features),
        places,
    )


def _print_row(row: Row) -> None:
    numbers = (f"{n:,}" for n in (row.executions, row.seconds, row.edges, row.features))
    print(_line(row.surface, *numbers, len(row.findings)), flush=True)


def _line(surface: str, *figures: str | int) -> str:
    executions, seconds, edges, features, findings = figures
    return f"{surface:<15}{executions:>12}{seconds:>9}{edges:>8}{features:>10}{findings:>10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], int(os.environ.get("FUZZ_SECONDS", "60"))))
