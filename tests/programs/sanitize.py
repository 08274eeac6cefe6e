"""Runs the recorder's C and C++ under sanitizers: `make test-all PARTS=sanitizers`.

Builds the patched llama.cpp with AddressSanitizer and UndefinedBehaviorSanitizer, and again with
ThreadSanitizer. With each it runs `native/recorder_stress.cpp` (contexts that decode at once, every
level, sessions that begin and end, a full disk, a pipe that is closed or not read),
`native/log_threads.cpp`, `native/threadpool.cpp`, `native/late_context.cpp`, and
`native/models_come_and_go.cpp` for `--seconds`. AddressSanitizer ends the program at a finding.
ThreadSanitizer also reports races inside ggml's kernels, whose barriers it does not understand.
These are counted; every other race is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kit.native_kit import DEMO, ROOT, compile_program, sanitized_library

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
# an access and its frames
ACCESS = r"^  (?:Previous )?(?:atomic )?(?:[Ww]rite|[Rr]ead) .*\n((?:    #.*\n)+)"
NATIVE = ROOT / "tests" / "native"
PROGRAMS = ("recorder_stress", "log_threads", "models_come_and_go", "threadpool", "late_context")


def run(sanitizer: str, seconds: int, library: Path) -> None:
    """Raises CalledProcessError or AssertionError at a finding. For `seconds`, models are loaded
    and freed while the log rotates."""
    with tempfile.TemporaryDirectory() as folder:
        program, log_threads, come_and_go, threadpool, late_context = (
            compile_program(NATIVE / f"{name}.cpp", library, Path(folder), SANITIZERS[sanitizer])
            for name in PROGRAMS
        )
        logs, late = Path(folder) / "logs", Path(folder) / "late"
        logs.mkdir()
        late.mkdir()
        env = {
            **os.environ,
            "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "TSAN_OPTIONS": f"halt_on_error=0:exitcode=0:log_path={folder}/races",
        }
        subprocess.run([program, DEMO, logs], env=env, check=True)
        log_of_threads = f"{folder}/threads.log"
        subprocess.run([log_threads, log_of_threads, "3", "20000", "97"], env=env, check=True)
        subprocess.run([threadpool, DEMO, logs / "threadpool.log", "4", "4"], env=env, check=True)
        subprocess.run([late_context, DEMO, late, "50"], env=env, check=True)
        rotating = {
            "LLAMA_INSTR_LOG": str(logs / "rotated.log"),
            "LLAMA_INSTR_LEVEL": "verbose",
            "LLAMA_INSTR_ROTATE": "150000",
        }
        subprocess.run([program, DEMO], env=env | rotating, check=True)
        assert (logs / "rotated.part3.log").exists(), "the log did not rotate"
        rotating["LLAMA_INSTR_LOG"] = f"{folder}/come-and-go.log"
        subprocess.run([come_and_go, DEMO, str(seconds)], env=env | rotating, check=True)
        text = "".join(path.read_text() for path in Path(folder).glob("races.*"))
        ours, kernels = races(text)
        assert not ours, "\n".join(ours)
        if kernels:
            print(f"{sanitizer}: {kernels} races inside ggml's kernels, none elsewhere")
        checked = subprocess.run(
            [
                sys.executable, "-m", "llamacpp_instr", "check",
                *sorted(logs.glob("*.log")), *sorted(late.glob("*.log")),
            ],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        lines = checked.stdout.splitlines()
        assert checked.returncode == 0, "\n".join(s for s in lines if not s.endswith(": clean"))
        print(f"{sanitizer}: no finding; {len(lines)} logs check clean")


def races(text: str) -> tuple[list[str], int]:
    """ThreadSanitizer's reports that are not about two kernels of ggml, and how many others."""
    ours, kernels = [], 0
    for report in text.split("WARNING: ThreadSanitizer: ")[1:]:
        accesses = re.findall(ACCESS, report, re.MULTILINE)
        places = [
            next((f for f in re.findall(r"#\d+ (\w+)", frames) if not f.startswith("mem")), "")
            for frames in accesses
        ]
        if len(places) == 2 and all(place.startswith("ggml_compute_forward_") for place in places):
            kernels += 1
        else:
            ours.append(report)
    return ours, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizers", nargs="*", default=list(SANITIZERS))
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--library", type=Path, help="of one sanitizer, instead of the cached one")
    options = parser.parse_args()
    # the programs of one sanitizer keep about one CPU busy, and run while the next library compiles
    with ThreadPoolExecutor() as pool:
        runs = []
        for sanitizer in options.sanitizers:
            library = options.library or sanitized_library(sanitizer)
            runs.append(pool.submit(run, sanitizer, options.seconds, library))
        for of in runs:
            of.result()


if __name__ == "__main__":
    main()
