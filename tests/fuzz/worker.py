"""Fuzzes one surface with atheris, in a child process: `python -m tests.fuzz.worker`.

A finding does not end the run: its input is kept, one for each line of our code that raised it. A
hang, in CPU time, is a finding. A crash, or a hang in foreign C code, ends the run; libFuzzer keeps
that input.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found]

from tests.fuzz.mutate import MUTATORS
from tests.fuzz.targets import SURFACES, attempt_of

MAX_LENGTH = 1 << 16
HANG = 60.0
"""CPU seconds"""


def main(surface: str, findings: Path, corpus: list[str], seconds: int) -> None:
    with atheris.instrument_imports(include=["llamacpp_instr", "converters"]):
        # the modules that the guard imports are also the product's code
        guard = importlib.import_module("tests.fuzz.guard")
        attempt = attempt_of(surface)
    mutator = MUTATORS[SURFACES[surface]]
    findings.mkdir(parents=True, exist_ok=True)
    known: set[str] = set()

    def hangs(_number: int, _frame: object) -> None:
        raise guard.Finding(f"still running after {HANG:.0f} s of CPU time")

    signal.signal(signal.SIGPROF, hangs)

    with guard.workspace() as directory:

        def one_input(data: bytes) -> None:
            signal.setitimer(signal.ITIMER_PROF, HANG)
            try:
                guard.try_input(attempt, data, directory)
            except Exception as error:
                _keep(error, data)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)

        def _keep(error: Exception, data: bytes) -> None:
            place = _place(error)
            if place in known:
                return
            known.add(place)
            name = f"{surface}-{hashlib.sha1(place.encode()).hexdigest()[:8]}"
            (findings / name).write_bytes(data)
            (findings / f"{name}.json").write_text(
                json.dumps({"place": place, "trace": traceback.format_exception(error)}, indent=1)
            )
            print(f"FINDING {name} {place}", file=sys.stderr, flush=True)

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            changed: bytes = mutator(data, most, Random(seed), atheris.Mutate)
            return changed[:most]

        options = [
            f"-max_total_time={seconds}",
            f"-max_len={MAX_LENGTH}",
            "-len_control=0",
            "-timeout=1200",
            "-report_slow_units=1200",
            "-rss_limit_mb=3072",
            f"-artifact_prefix={findings}/{surface}-",
            "-print_final_stats=1",
            "-reload=0",
        ]
        atheris.Setup(
            [sys.argv[0], *options, *corpus],
            one_input,
            custom_mutator=mutate,
            internal_libfuzzer=True,
        )
        atheris.Fuzz()


def _place(error: BaseException) -> str:
    """The kind of an error and the innermost line of our code in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/llamacpp_instr/" in f.filename or "/converters/" in f.filename]
    at = ours[-1] if ours else frames[-1]
    what = type(error).__name__
    if what == "Finding":
        what = str(error)[:30]
    return f"{what} {Path(at.filename).name}:{at.lineno} {at.name}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3]))
