"""The recorder's C and C++ under sanitizers: `make sanitize`.

Builds the patched llama.cpp with AddressSanitizer and UndefinedBehaviorSanitizer, and again with
ThreadSanitizer, and runs `native/recorder_stress.cpp` with each: contexts that decode at once,
every level, sessions that come and go, a full disk, a closed pipe. A finding ends the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.native_kit import DEMO, ROOT, compile_program, sanitized_library

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
STRESS = ROOT / "tests" / "native" / "recorder_stress.cpp"


def run(sanitizer: str) -> None:
    """Raises CalledProcessError at the first finding."""
    library = sanitized_library(sanitizer)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(STRESS, library, Path(folder), SANITIZERS[sanitizer])
        logs = Path(folder) / "logs"
        logs.mkdir()
        env = {
            **os.environ,
            "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        }
        subprocess.run([program, DEMO, logs], env=env, check=True)
        checked = subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", "check", *sorted(logs.glob("*.log"))],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        print(f"{sanitizer}: no finding; {len(checked.stdout.splitlines())} logs check clean")


def main() -> None:
    for sanitizer in sys.argv[1:] or SANITIZERS:
        run(sanitizer)


if __name__ == "__main__":
    main()
