"""Makes the source tree that is built: the pinned sdist, unpacked and patched, plus our files.

`patches/UPSTREAM.toml` is the only place that contains the version, the checksum and the commit;
all code reads them from here. Every build starts from the pristine sdist, so no patch can be
applied twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llamacpp_instr.base.errors import BuildError, reason
from llamacpp_instr.base.system import pip, temporary_directory
from llamacpp_instr.llama.build.log import BuildLog

PIN_FILE = "UPSTREAM.toml"
VENDORED = Path("vendor/llama.cpp")
BUILD_HEADER = VENDORED / "src" / "llama-instrumentation-build.h"

_LINE = re.compile(r'(?P<key>\w+)\s*=\s*(?:"(?P<text>[^"]*)"|(?P<number>\d+))\s*(?:#.*)?')
# keys with a text: its pattern, and what it must be
_TEXTS = {
    "version": (r"\d+(\.\d+)+", 'text such as "0.3.36"'),
    "sha256": (r"[0-9a-f]{64}", "64 hexadecimal digits"),
    "commit": (r"[0-9a-f]{40}", "40 hexadecimal digits"),
}


@dataclass(frozen=True)
class Upstream:
    """The pin: the sdist of llama-cpp-python, and the llama.cpp that it vendors."""

    version: str
    """of llama-cpp-python"""
    sha256: str
    """of its sdist, 64 hexadecimal digits"""
    commit: str
    """of the vendored llama.cpp, 40 hexadecimal digits"""
    revision: int
    """number of the patch set's release for this version"""

    @property
    def wheel_version(self) -> str:
        """The version of the patched wheel."""
        return f"{self.version}+instr.{self.revision}"


def patches_dir() -> Path:
    """The directory that contains `UPSTREAM.toml`, `series` and `src/`: at the root of a checkout,
    inside the package of an installed wheel. Raises BuildError if neither exists."""
    package = Path(__file__).resolve().parents[2]
    places = [package.parent / "patches", package / "patches"]
    for place in places:
        if (place / PIN_FILE).is_file():
            return place
    raise BuildError(f"no {PIN_FILE} in {' or '.join(map(str, places))}; reinstall llamacpp-instr")


def read_upstream(patches: Path) -> Upstream:
    """The pin of the patch set in `patches`. Raises BuildError, which names the wrong line.

    Parsed by hand, because the file has four flat keys and Python 3.10 has no TOML reader.
    """
    path = patches / PIN_FILE
    found: dict[str, Any] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            form = 'key = "text" or key = number'
            raise BuildError(f"{path}:{number}: expected {form}, got {line!r}")
        text = match["text"]
        found[match["key"]] = int(match["number"]) if text is None else text
    for key, (pattern, wanted) in _TEXTS.items():
        value = found.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise BuildError(f"{path}: {key} must be {wanted}, got {value!r}")
    if not isinstance(found.get("revision"), int):
        raise BuildError(f"{path}: revision must be a number, got {found.get('revision')!r}")
    if unknown := found.keys() - {*_TEXTS, "revision"}:
        raise BuildError(f"{path}: unknown key {min(unknown)!r}")
    return Upstream(**found)


def pin_line(patches: Path, key: str) -> str:
    """`PATH:LINE` of a key of the pin, for a message that says which line to update."""
    path = patches / PIN_FILE
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.split("=")[0].strip() == key:
            return f"{path}:{number}"
    return str(path)


def read_series(patches: Path) -> list[str]:
    """File names of the patches, relative to `patches`, in the order of application."""
    path = patches / "series"
    lines = [line.split("#")[0].strip() for line in _read(path).splitlines()]
    names = [name for name in lines if name]
    for name in names:
        if not (patches / name).is_file():
            raise BuildError(f"{path}: it names {name}, which does not exist")
    return names


def concerns_wheel(name: str) -> bool:
    """Whether a patch changes the sdist around llama.cpp, and thus how the wheel is made."""
    return name.startswith("wheel/")


def overlay_files(patches: Path) -> list[Path]:
    """The files below `patches/src`, relative to it and sorted; the build copies them in."""
    source = patches / "src"
    return sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())


def patch_digest(patches: Path) -> str:
    """12 hexadecimal digits over the pin, the series, its patches and the overlay.

    Each file is hashed with its name and length, so that moving text between files changes the
    digest. Other files in `patches` (its README) do not change it.
    """
    names = [PIN_FILE, "series", *read_series(patches)]
    names += [f"src/{path.as_posix()}" for path in overlay_files(patches)]
    digest = hashlib.sha256()
    for name in names:
        content = (patches / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from None


def fetch_sdist(patches: Path, cache: Path, log: BuildLog) -> Path:
    """The pinned sdist, fetched through pip unless `cache` has it; its sha256 is the pin's.

    pip gets the checksum, so that it runs no code from another archive. Raises BuildError if pip is
    missing, the index has no such sdist, or its checksum differs.
    """
    upstream = read_upstream(patches)
    kept = cache / "sdist" / f"llama_cpp_python-{upstream.version}.tar.gz"
    if kept.is_file() and sha256_of(kept) == upstream.sha256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory("fetch-", kept.parent) as directory:
        requirement = f"llama-cpp-python=={upstream.version} --hash=sha256:{upstream.sha256}"
        fetched, output = download_sdist(requirement, directory, log)
        if fetched is None:
            if other := re.search(r"^\s*Got\s+([0-9a-f]{64})", output, re.MULTILINE):
                check_sdist(other[1], patches)
            raise log.failure(f"pip could not fetch llama-cpp-python {upstream.version}", output)
        check_sdist(sha256_of(fetched), patches)
        fetched.replace(kept)
    return kept


def download_sdist(requirement: str, into: Path, log: BuildLog) -> tuple[Path | None, str]:
    """Let pip fetch the sdist of one line of a requirements file into the directory `into`. Returns
    its path (None if pip failed) and pip's output."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{requirement}\n")
    source = ("--no-binary", "llama-cpp-python", "-r", str(requirements))
    status, output = log.run(pip("download", "--no-deps", "-d", str(into), *source))
    return next(into.glob("*.tar.gz"), None) if status == 0 else None, output


def check_sdist(sha256: str, patches: Path) -> None:
    """Raises BuildError, which names the line of the pin, unless the sha256 is the pin's."""
    upstream = read_upstream(patches)
    if sha256 != upstream.sha256:
        raise BuildError(
            f"the sdist of llama-cpp-python {upstream.version} has sha256 {sha256}, but "
            f"{pin_line(patches, 'sha256')} says {upstream.sha256}; "
            "update that line only if the new file is the one you trust"
        )


def make_tree(sdist: Path, into: Path, patches: Path, log: BuildLog, *, patched: bool) -> Path:
    """Unpack `sdist` into the empty directory `into`; returns the root of the tree.

    With `patched`, the series is applied, our files are copied in, and version and digest are
    written where the native code and the wheel read them. Otherwise only the patches of the wheel
    are applied, and llama.cpp stays pristine. Raises BuildError if the sdist vendors a commit
    other than the pin's, or a patch fails.
    """
    root = unpack_pinned(sdist, into, patches)
    upstream = read_upstream(patches)
    for name in read_series(patches):
        if patched or concerns_wheel(name):
            apply_patch(root, patches, name, log)
    if patched:
        for file in overlay_files(patches):
            target = root / VENDORED / file
            if target.exists():
                raise BuildError(
                    f"{patches / 'src' / file} would replace a file of llama.cpp; patch it instead"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(patches / "src" / file, target)
        write_build_header(root, upstream, patch_digest(patches))
        _set_wheel_version(root, upstream)
    return root


def unpack_pinned(
    sdist: Path,
    into: Path,
    patches: Path,
    only: Callable[[PurePosixPath], bool] = lambda _path: True,
) -> Path:
    """Unpack `sdist`, or those of its files that `only` accepts, and return the root. Raises
    BuildError if it vendors a commit other than the pin's."""
    root, commit = unpack_sdist(sdist, into, only)
    upstream = read_upstream(patches)
    if commit is not None and commit != upstream.commit:
        raise BuildError(
            f"the sdist vendors llama.cpp {commit}, but {pin_line(patches, 'commit')} says "
            f"{upstream.commit}; update that line"
        )
    return root


def unpack_sdist(
    sdist: Path, into: Path, only: Callable[[PurePosixPath], bool] = lambda _path: True
) -> tuple[Path, str | None]:
    """Unpack the regular files of `sdist` that `only` accepts; returns the root and the commit of
    the vendored code.

    `.git` is omitted, because a build must not depend on git. The commit is read from it, and is
    None if `.git` is missing. Raises BuildError for a member that would be written outside `into`
    or that is neither a file nor a directory.
    """
    roots: set[str] = set()
    commit: str | None = None
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or "\\" in member.name:
                    raise BuildError(f"{sdist}: {member.name!r} would be written outside; refused")
                if not (member.isreg() or member.isdir()):
                    raise BuildError(
                        f"{sdist}: {member.name!r} is not a file or directory; refused"
                    )
                if ".git" in path.parts:
                    if path.parts[1:] == (".git", "modules", *VENDORED.parts, "HEAD"):
                        head = archive.extractfile(member)
                        text = head.read().decode("ascii", "replace").strip() if head else ""
                        commit = text if re.fullmatch("[0-9a-f]{40}", text) else None
                    continue
                roots.add(path.parts[0])
                if not only(path):
                    continue
                target = into.joinpath(*path.parts)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
                if member.mode & 0o100:
                    target.chmod(0o755)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BuildError(f"{sdist}: cannot be unpacked: {reason(error)}") from None
    if len(roots) != 1 or not (into / min(roots) / VENDORED).is_dir():
        raise BuildError(f"{sdist}: it has no {VENDORED}; is it llama-cpp-python's sdist?")
    return into / roots.pop(), commit


def apply_patch(root: Path, patches: Path, name: str, log: BuildLog) -> None:
    """Apply one patch of the series with git, or with patch(1) if git is missing.

    Patches below `wheel/` change the sdist itself, all others the vendored llama.cpp. Both
    programs require the exact context, so that the result is the same. Raises BuildError, which
    names the patch and the file that does not fit.
    """
    directory = root if concerns_wheel(name) else root / VENDORED
    file = str(patches / name)
    if shutil.which("git"):
        command = ["git", "apply", "-p1", "--whitespace=nowarn", file]
    elif shutil.which("patch"):
        command = ["patch", "-p1", "-N", "-t", "-F", "0", "--no-backup-if-mismatch", "-i", file]
    else:
        raise BuildError("neither git nor patch is installed (Debian, Ubuntu: apt install patch)")
    status, output = log.run(command, cwd=directory, env=no_repository(root))
    if status != 0:
        raise BuildError(
            f"{file} does not apply to {directory.relative_to(root.parent)}: "
            f"{misfit(output)}; refresh the patch; the full log is {log.path}"
        )


def no_repository(root: Path) -> dict[str, str | None]:
    """An environment in which git finds no repository, neither one around the cache nor a hook's.

    Inside a repository, `git apply` would silently skip files, and CMake would use its commit as
    llama.cpp's.
    """
    unset = dict.fromkeys(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"))
    return {
        **unset,
        "GIT_CEILING_DIRECTORIES": str(root.parent.resolve()),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }


def sha256_of(path: Path) -> str:
    """The sha256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def misfit(output: str) -> str:
    """The file that does not fit, from the output of `git apply` or `patch`: `ggml/src/x.c:120
    differs`."""
    place = re.search(r"^error: patch failed: (\S+:\d+)", output, re.MULTILINE)
    if place:
        return f"{place[1]} differs"
    place = re.search(r"^error: (\S+): (.+)", output, re.MULTILINE)
    if place:
        return f"{place[1]}: {place[2]}"
    file = ""
    for line in output.splitlines():
        if line.startswith("patching file "):
            file = line.removeprefix("patching file ").strip("'")
        hunk = re.match(r"Hunk #\d+ FAILED at (\d+)", line)
        if hunk:
            return f"{file}:{hunk[1]} differs"
        missing = re.match(r"\|\+\+\+ [^/]+/(\S+)", line)
        if missing:
            return f"{missing[1]}: no such file"
    if file:
        return f"{file} differs"
    return (output.strip().splitlines() or ["it printed nothing"])[-1]


def write_build_header(
    root: Path, upstream: Upstream, digest: str, header: Path = BUILD_HEADER
) -> None:
    """Write the header with what the native code reports in every log (schema: `Producer`)."""
    (root / header).write_text(
        "// Written by the build; says which build this is.\n"
        "#pragma once\n\n"
        f'#define LLAMA_INSTR_BUILD_LLAMA_CPP "{upstream.wheel_version}"\n'
        f'#define LLAMA_INSTR_BUILD_COMMIT    "{upstream.commit}"\n'
        f'#define LLAMA_INSTR_BUILD_PATCHES   "{digest}"\n'
    )


def _set_wheel_version(root: Path, upstream: Upstream) -> None:
    """Set the wheel's local version in the package, where scikit-build-core reads it."""
    path = root / "llama_cpp" / "__init__.py"
    text = path.read_text(encoding="utf-8")
    pinned, ours = (f'__version__ = "{v}"' for v in (upstream.version, upstream.wheel_version))
    if text.count(pinned) != 1:
        raise BuildError(f"{path.relative_to(root)}: no line {pinned}; is the pin's version right?")
    path.write_text(text.replace(pinned, ours), encoding="utf-8")
