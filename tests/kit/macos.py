"""Compilers for macOS on Linux: Zig brings macOS's headers and the names of what its libSystem has,
but neither Metal nor Accelerate. Nothing here runs what it makes."""

from __future__ import annotations

import functools
import shutil
import subprocess

from tests.kit.native_kit import ROOT

ARM, INTEL = "aarch64-macos.11.0", "x86_64-macos.11.0"
"""Macs with Apple's and with Intel's CPUs, with the oldest macOS that Python's wheels are for"""

# the compilers are scripts, whose contents name the version of Zig
CCACHE = {"CCACHE_COMPILERTYPE": "clang", "CCACHE_COMPILERCHECK": "content"}


@functools.cache
def flags(target: str) -> tuple[str, ...]:
    """CMake's flags for a build that macOS could load."""
    found = sorted((ROOT / ".venv-macos").glob("lib/python*/site-packages/ziglang/zig"))
    assert found, "Zig is missing: make test-all PARTS=macos installs it"
    version = subprocess.run([found[0], "version"], capture_output=True, text=True, check=True)
    place = ROOT / ".venv-macos" / target
    place.mkdir(exist_ok=True)
    tools = {"AR": "ar", "RANLIB": "ranlib"}
    for language, name in (("C", "cc"), ("CXX", "c++")):
        # not optimized: it never runs; without what Zig adds to such code
        tools[f"{language}_COMPILER"] = f'{name} -target {target} "$@" -O0 -fno-sanitize=undefined'
    for name, command in tools.items():
        script = f'#!/bin/sh\n# {version.stdout}exec "{found[0]}" {command}'
        (place / name).write_text(script if '"$@"' in script else f'{script} "$@"')
        (place / name).chmod(0o755)
    return (
        "-DCMAKE_SYSTEM_NAME=Darwin", f"-DCMAKE_SYSTEM_PROCESSOR={target.partition('-')[0]}",
        "-DCMAKE_OSX_SYSROOT=", f"-DCMAKE_INSTALL_NAME_TOOL={shutil.which('true')}",
        *(f"-DCMAKE_{name}={place / name}" for name in tools), "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{part}=OFF" for part in ("METAL", "BLAS", "ACCELERATE", "OPENMP")),
    )  # fmt: skip
