"""`make fuzz`: every surface after the other, FUZZ_SECONDS each; one line of figures for each.

Exit code 1 when something was found; the inputs are then in out/fuzz/findings. What was learnt is
kept in out/fuzz/corpus and begun with the next time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import SURFACES

ROOT = Path(__file__).parent.parent.parent
COMMITTED = Path(__file__).parent / "corpus"
OUT = ROOT / "out" / "fuzz"


def main(names: list[str], seconds: int) -> int:
    wrong = [name for name in names if name not in SURFACES]
    if wrong:
        print(f"no surface {wrong[0]}; there are {', '.join(SURFACES)}", file=sys.stderr)
        return 2
    print(f"{'surface':<15}{'executions':>11}{'seconds':>9}{'coverage':>15}  findings")
    found = [fuzz(name, seconds) for name in names or SURFACES]
    return int(any(found))


def fuzz(surface: str, seconds: int) -> int:
    """Fuzz one surface, print its figures; how much was found."""
    kind = _kind(surface)
    learnt = OUT / "corpus" / surface
    learnt.mkdir(parents=True, exist_ok=True)
    findings = OUT / "findings"
    arguments = [surface, str(findings), str(seconds), str(learnt), str(COMMITTED / kind)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.worker", *arguments],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    (OUT / f"{surface}.txt").write_text(done.stderr)
    places = re.findall(r"^FINDING (.*)$", done.stderr, re.MULTILINE)
    ended = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    if done.returncode or not ended:
        places.append(f"the fuzzer ended with {done.returncode}; see out/fuzz/{surface}.txt")
    took = re.search(r"^Done \d+ runs in (\d+) second", done.stderr, re.MULTILINE)
    covered = [int(n) for n in re.findall(r" cov: (\d+) ", done.stderr)] or [0]
    growth = f"{covered[0]} -> {covered[-1]}"
    runs = int(ended[1]) if ended else 0
    print(f"{surface:<15}{runs:>11,}{took[1] if took else '?':>9}{growth:>15}  {len(places)}")
    for place in places:
        print(f"    {place}")
    sys.stdout.flush()
    return len(places)


def _kind(surface: str) -> str:
    text = (Path(__file__).parent / "targets" / f"{surface}.py").read_text()
    (kind,) = re.findall(r'^KIND = "(\w+)"$', text, re.MULTILINE)
    return str(kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], int(os.environ.get("FUZZ_SECONDS", "60"))))
