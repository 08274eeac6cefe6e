"""Takes out of an environment what nothing runs: tests, debug symbols, C sources, second copies.

What is left behaves as before; `make image-test` runs the commands in it.

    slim.py ENVIRONMENT
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

TESTED = ("contourpy", "fontTools", "matplotlib", "mpl_toolkits", "numpy", "pandas")
"""packages that ship their tests"""

# auditwheel rewrote the libraries in these, and strip is known to break such ones
VENDORED = ".libs"


def main(environment: str) -> None:
    packages = next(Path(environment).glob("lib/python3*/site-packages"))
    before = size(packages)
    for name in TESTED:
        for tests in sorted((packages / name).rglob("tests")):
            if tests.is_dir():
                shutil.rmtree(tests)
    for pattern in ("*.c", "*.pyx", "*.pxd", "*.pyi", "*.h"):
        for source in packages.rglob(pattern):
            source.unlink()
    strip(packages)
    link_copies(packages / "llama_cpp" / "lib")
    print(f"{packages}: {before / 1e6:.0f} MB, slimmed to {size(packages) / 1e6:.0f} MB")


def strip(packages: Path) -> None:
    """Remove the symbols that only debuggers read."""
    libraries = [
        path
        for path in packages.rglob("*.so")
        if not any(part.endswith(VENDORED) for part in path.parts)
    ]
    subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=True)


def link_copies(directory: Path) -> None:
    """Make links of `libx.so` and `libx.so.0.1`, which a wheel can hold only as copies of a third."""
    for library in sorted(directory.glob("*.so.?")):
        for copy in directory.glob(f"{library.name.partition('.')[0]}.so*"):
            if copy != library and filecmp.cmp(copy, library, shallow=False):
                copy.unlink()
                copy.symlink_to(library.name)


def size(directory: Path) -> int:
    """Bytes of the files in a directory, links not counted."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink())


main(sys.argv[1])
