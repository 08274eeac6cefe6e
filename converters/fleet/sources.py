"""Where logs come from: files, folders, globs, and object stores that fsspec knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import LogError, UsageError, reason
from llamacpp_instr.base.system import need, temporary_directory

SUFFIXES = (".log", ".ndjson", ".jsonl")
PACKED = ("", ".gz", ".zst")


@dataclass(frozen=True)
class Source:
    """A file that may be a log."""

    name: str
    """path, or URL"""
    size: int
    """bytes"""
    version: str
    """changes when the file changes"""

    @contextmanager
    def local(self) -> Iterator[Path]:
        """The file on this machine; an object is copied for the time of the block. Raises
        LogError if that fails."""
        if "://" not in self.name:
            yield Path(self.name)
            return
        with temporary_directory("instr-collect-") as folder:
            path = folder / self.name.rpartition("/")[2]
            system, inner = _opened(self.name)
            try:
                system.get_file(inner, str(path))
            except Exception as error:  # every store has its own
                raise LogError(f"cannot be fetched: {reason(error)}", self.name) from None
            yield path


def find_sources(names: Sequence[str]) -> list[Source]:
    """The files that the names mean, each once, in order: files, all logs in folders and below
    them (.log, .ndjson, .jsonl, also .gz and .zst), globs (**, *, ?), and the same of URLs. Raises
    UsageError for a name that means no file."""
    found: dict[str, Source] = {}
    for name in names:
        matched = list(_remote(name) if "://" in name else _local(name))
        if not matched:
            raise UsageError(f"{name}: no such file, or a folder without logs")
        found.update((source.name, source) for source in matched)
    return list(found.values())


def _local(name: str) -> Iterator[Source]:
    path = Path(name)
    if path.is_dir():
        paths = sorted(of for of in path.rglob("*") if _is_log(of.name) and of.is_file())
    elif path.exists():
        paths = [path]
    else:
        root = Path(path.anchor)
        paths = sorted(of for of in root.glob(str(path.relative_to(root))) if of.is_file())
    for of in paths:
        status = of.stat()
        yield Source(str(of), status.st_size, f"{status.st_mtime_ns}")


def _remote(name: str) -> Iterator[Source]:
    system, inner = _opened(name)
    scheme = name.partition("://")[0]
    try:
        if any(mark in inner for mark in "*?["):
            details = system.glob(inner, detail=True).values()
        elif system.isdir(inner):
            details = system.find(inner, detail=True).values()
            details = [of for of in details if _is_log(of["name"])]
        else:
            details = [system.info(inner)] if system.exists(inner) else []
    except Exception as error:  # every store has its own
        raise UsageError(f"{name}: {reason(error)}") from None
    for of in sorted(details, key=lambda of: str(of["name"])):
        if of["type"] == "file":
            marks = [of[key] for key in ("ETag", "etag", "mtime", "LastModified", "created")
                     if key in of]  # fmt: skip
            url = str(of["name"])
            url = (
                url
                if "://" in url
                else f"{scheme}://{url.lstrip('/') if scheme != 'file' else url}"
            )
            yield Source(url, int(of["size"] or 0), ",".join(map(str, marks)))


def _opened(url: str) -> tuple[Any, str]:
    need("fleet", "fsspec")
    from fsspec.core import url_to_fs

    try:
        system, inner = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url}: {error}") from None
    return system, inner


def _is_log(name: str) -> bool:
    return any(name.endswith(suffix + packed) for suffix in SUFFIXES for packed in PACKED)
