"""Runs the recorder's own tests on an emulated arm64 processor: `make test-all PARTS=arm64`.

The patched llama.cpp and the programs of tests/native are cross compiled, and qemu runs them. This
needs Debian's packages `g++-aarch64-linux-gnu` and `qemu-user-static`. Speeds mean nothing there.
"""

from __future__ import annotations

import os
import subprocess
import sys

from llamacpp_instr.base.machine import usable_cpus
from tests.kit.native_kit import ARM64, arm64_build

EMULATOR = f"qemu-aarch64-static -L /usr/{ARM64}"
TESTS = (
    "tests/parts/arm64",
    "tests/parts/limits/test_native.py",
    "tests/recording/test_cpu_names.py",
    "tests/recording/test_native.py",
    "tests/recording/test_ticks.py",
    "tests/recording/test_secrets.py::test_secrets_are_redacted_and_nothing_else",
    "tests/recording/test_secrets.py::test_an_argument_of_a_megabyte_is_looked_at",
    "tests/recording/test_accounting.py::test_the_last_wait_of_every_thread_and_compute_is_in_the_log",
)


def main() -> int:
    env = {**os.environ, **arm64_build().environment, "INSTR_TEST_EMULATOR": EMULATOR}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=5"]
    command += ["-n", str(usable_cpus()), "--dist", "loadfile"]
    return subprocess.run([*command, *TESTS, *sys.argv[1:]], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
