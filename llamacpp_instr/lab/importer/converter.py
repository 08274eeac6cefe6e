"""llama.cpp's own converter, from the sdist that is built: fetched, checked, and then cached."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.llama.build.cache import own_cache
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import VENDORED, fetch_sdist, unpack_pinned
from llamacpp_instr.llama.build.upstream import patches_dir, read_upstream

LORA_SCRIPT = "convert_lora_to_gguf.py"
_PARTS = ("conversion", "gguf-py", LORA_SCRIPT)
"""what is kept: the converter's classes, the gguf that they need, the script for adapters"""


def find_converter() -> Path:
    """The folder with the converter of the pinned sdist, unpacked if the cache does not have it.

    Raises BuildError if the sdist cannot be fetched, is not the pinned one, or has no converter.
    """
    patches = patches_dir()
    upstream = read_upstream(patches)
    cache = own_cache()
    kept = cache / "converters" / upstream.sha256[:12]
    if kept.is_dir():
        return kept
    log = BuildLog(cache / "logs" / "converter.log")
    sdist = fetch_sdist(patches, cache, log)
    with temporary_directory("converter-", kept.parent) as directory:
        tree = unpack_pinned(sdist, directory, patches, only=_is_of_converter) / VENDORED
        try:
            tree.replace(kept)
        except OSError:
            if not kept.is_dir():  # otherwise another process was faster
                raise
    return kept


def _is_of_converter(path: PurePosixPath) -> bool:
    """Whether a member of the sdist belongs to the converter."""
    inside = path.parts[1 + len(VENDORED.parts) :]
    return path.parts[1:3] == VENDORED.parts and bool(inside) and inside[0] in _PARTS
