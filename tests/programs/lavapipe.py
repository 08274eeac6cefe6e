"""Shows what damages the memory of a process on lavapipe.

    lavapipe.py [MODULE]

Runs `tests/native/two_graphs.cpp`, which has no session, with the patched Vulkan backend or that of
MODULE under valgrind, and prints what valgrind says of invalid frees. Takes two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.backends import vulkan_environment, vulkan_module
from tests.kit.native_kit import ROOT, installed_library, patched_tree


def main(module: Path) -> None:
    ggml, library = patched_tree() / "ggml", installed_library()
    with tempfile.TemporaryDirectory() as folder:
        program, log = Path(folder) / "two_graphs", Path(folder) / "valgrind.log"
        subprocess.run(
            ["c++", "-std=c++17", "-g", "-O1", ROOT / "tests/native/two_graphs.cpp",
             f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", "-o", program,
             f"-L{library}", "-l:libggml-base.so.0", f"-Wl,-rpath,{library}"], check=True,
        )  # fmt: skip
        # valgrind lacks instructions for which the shaders in the cache may be compiled
        env = {**os.environ, **vulkan_environment(), "MESA_SHADER_CACHE_DISABLE": "true"}
        valgrind = ["valgrind", "--smc-check=all-non-file", f"--log-file={log}"]
        done = subprocess.run([*valgrind, program, module], env=env, check=False)
        found = log.read_text()
    print(f"exit status {done.returncode}")
    print("\n".join(part for part in found.split("== \n") if "Invalid free" in part))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else vulkan_module())
