"""A tiny llama-cpp-python: an sdist that pip builds in a second, and a patch set for it.

It has only what the build relies on, so that every step of a build is real: pip fetches it, checks
its hash, builds its wheel in isolation and installs it.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from llamacpp_instr.llama.build.programs import FROM_WHEEL

VERSION = "0.3.36"
COMMIT = "c0ffee" * 6 + "abcd"
ROOT = f"llama_cpp_python-{VERSION}"

_PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "llama_cpp_python"
version = "0"
"""

# Prints like ninja, and packs the source that it "compiled".
_BACKEND = """\
import os, pathlib, re, sys, zipfile

def names():
    text = pathlib.Path("llama_cpp/__init__.py").read_text()
    version = re.search('__version__ = "(.*)"', text)[1]
    return version, f"llama_cpp_python-{version}"

def prepare_metadata_for_build_wheel(directory, settings=None):
    version, name = names()
    info = pathlib.Path(directory) / f"{name}.dist-info"
    info.mkdir()
    meta = f"Metadata-Version: 2.1\\nName: llama_cpp_python\\nVersion: {version}\\n"
    (info / "METADATA").write_text(meta)
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return info.name

def build_wheel(directory, settings=None, metadata=None):
    version, name = names()
    source = pathlib.Path("vendor/llama.cpp/src/llama.c").read_text()
    print(f"[1/2] cc {os.environ['CMAKE_ARGS']}", flush=True)
    if "#error" in source:
        print("llama.c:1:2: error: " + source, flush=True)
        sys.exit(1)
    print("[2/2] link", flush=True)
    path = pathlib.Path(directory) / f"{name}-py3-none-any.whl"
    info = f"{name}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write("llama_cpp/__init__.py")
        wheel.writestr("llama_cpp/lib/libllama.txt", source)
        for part in pathlib.Path("vendor/llama.cpp/src").glob("llama-instr*"):
            wheel.write(part, f"llama_cpp/lib/{part.name}")
        temporary = pathlib.Path(directory) / "meta"
        temporary.mkdir()
        prepare_metadata_for_build_wheel(temporary)
        for part in (temporary / info).iterdir():
            wheel.write(part, f"{info}/{part.name}")
        record = "".join(f"{i.filename},,{i.file_size}\\n" for i in wheel.infolist())
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\\n")
    return path.name
"""

FILES = {
    "pyproject.toml": _PYPROJECT,
    "backend.py": _BACKEND,
    "PKG-INFO": f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {VERSION}\n",
    "llama_cpp/__init__.py": f'__version__ = "{VERSION}"\n',
    "vendor/llama.cpp/src/llama.c": "one\ntwo\nthree\n",
    "vendor/llama.cpp/ggml/CMakeLists.txt": "theirs for ggml\n",
    "vendor/llama.cpp/src/CMakeLists.txt": "theirs for src\n",
    "vendor/llama.cpp/tools/mtmd/CMakeLists.txt": "theirs for tools/mtmd\n",
    "vendor/llama.cpp/.git": "gitdir: ../../.git/modules/vendor/llama.cpp\n",
    ".git/modules/vendor/llama.cpp/HEAD": f"{COMMIT}\n",
}

PATCH = """\
Subject: [PATCH] count further

--- a/src/llama.c
+++ b/src/llama.c
@@ -1,3 +1,4 @@
 one
 two
 three
+four
"""


def make_sdist(directory: Path, files: dict[str, str] | None = None) -> Path:
    """Write the sdist, with `files` replacing its own; returns its path."""
    path = directory / f"{ROOT}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**FILES, **(files or {})}.items():
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def make_patches(directory: Path, sdist: Path, patches: dict[str, str] | None = None) -> Path:
    """Write a patch set that pins `sdist`: `patches` (default PATCH) and one file of our own."""
    patches = {"0001-count.patch": PATCH} if patches is None else patches
    root = directory / "patches"
    (root / "src" / "src").mkdir(parents=True)
    (root / "src" / "src" / "llama-instrumentation.c").write_text("ours\n")
    (root / "UPSTREAM.toml").write_text(
        f'version = "{VERSION}"\n'
        f'sha256 = "{hashlib.sha256(sdist.read_bytes()).hexdigest()}"\n'
        f'commit = "{COMMIT}"\n'
        "revision = 7\n"
    )
    (root / "build-constraints.txt").write_text("")
    for folder in FROM_WHEEL:
        (root / "programs" / folder).mkdir(parents=True)
        (root / "programs" / folder / "CMakeLists.txt").write_text(f"ours for {folder}\n")
    (root / "series").write_text("# in order\n" + "".join(f"{name}\n" for name in patches))
    for name, text in patches.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def make_wheel(directory: Path, name: str, version: str) -> Path:
    """Write a wheel with one module, whose VERSION is `version`."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
    return path
