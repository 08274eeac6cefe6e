"""Models that were imported into the cache, so that a folder can be run.

A file of the cache belongs to one state of its folder: the names, sizes and times of the files
there, and the converter. When the folder changes it is imported again, which replaces the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.lab.importer.runner import import_model
from llamacpp_instr.lab.importer.source import Kind, open_source
from llamacpp_instr.llama.build.cache import own_cache
from llamacpp_instr.llama.build.upstream import patches_dir, read_upstream


def imported(folder: Path, notice: Callable[[str], None]) -> Path:
    """The GGUF file of the model in `folder`, imported unless the cache has it; `notice` gets one
    line about it.

    Raises the errors of `open_source` and `import_model`, and UsageError for an adapter.
    """
    source = open_source(folder)
    if source.kind is Kind.LORA:
        raise UsageError(f"{folder} is a LoRA adapter; name the folder of a model")
    place = own_cache() / "imports" / _digest(str(folder.resolve()))
    kept = place / f"{_state(folder)}.gguf"
    if kept.is_file():
        notice(f"model: {kept}, imported from {folder} before")
        return kept
    need("hf")
    place.mkdir(exist_ok=True)
    notice(f"importing {folder} into the cache: {kept}")
    with progress_bar(f"Importing {folder.name}") as on_progress:
        import_model(source, kept, force=True, on_progress=on_progress)
    for other in place.glob("*.gguf"):
        if other != kept:
            other.unlink(missing_ok=True)
    return kept


def _state(folder: Path) -> str:
    """A digest of what the imported file depends on; weights are not read."""
    upstream = read_upstream(patches_dir())
    lines = [upstream.sha256]
    for file in sorted(folder.iterdir()):
        if file.is_file():
            found = file.stat()
            lines.append(f"{file.name}\0{found.st_size}\0{found.st_mtime_ns}")
    return _digest("\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
