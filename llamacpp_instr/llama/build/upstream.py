"""The version of llama.cpp that the patches are for, and the digest of the patch set.

`patches/UPSTREAM.toml` is the only place that contains the version, the checksum and the commit;
all code reads them from here. The digest covers everything that the build adds to the pristine
source, so two libraries with equal digests were built from the same text.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import BuildError

PIN_FILE = "UPSTREAM.toml"

_LINE = re.compile(r'(?P<key>\w+)\s*=\s*(?:"(?P<text>[^"]*)"|(?P<number>\d+))\s*(?:#.*)?')


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
    """The directory that contains `UPSTREAM.toml`, `series` and `src/`.

    In a checkout it is at the root, in an installed wheel inside the package. Raises BuildError
    if neither exists.
    """
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
    found: dict[str, str | int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            wanted = 'key = "text" or key = number'
            raise BuildError(f"{path}:{number}: expected {wanted}, got {line!r}")
        text = match["text"]
        found[match["key"]] = int(match["number"]) if text is None else text
    version, sha256, commit, revision = (
        found.pop(key, None) for key in ("version", "sha256", "commit", "revision")
    )
    if not isinstance(version, str) or not re.fullmatch(r"\d+(\.\d+)+", version):
        raise BuildError(f'{path}: version must be text such as "0.3.36", got {version!r}')
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BuildError(f"{path}: sha256 must be 64 hexadecimal digits, got {sha256!r}")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise BuildError(f"{path}: commit must be 40 hexadecimal digits, got {commit!r}")
    if not isinstance(revision, int):
        raise BuildError(f"{path}: revision must be a number, got {revision!r}")
    if found:
        raise BuildError(f"{path}: unknown key {next(iter(found))!r}")
    return Upstream(version, sha256, commit, revision)


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
    names = [line.split("#")[0].strip() for line in _read(path).splitlines()]
    names = [name for name in names if name]
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
