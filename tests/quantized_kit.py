"""The demo model as upstream's own llama-quantize stores it, kept in the product's cache."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from tests.native_kit import DEMO, unpatched_library


@functools.cache
def quantized_demo(file_type: str) -> Path:
    """The demo model in a file type of llama-quantize."""
    library = unpatched_library()
    models = library.parent / "quantized"
    models.mkdir(exist_ok=True)
    path = models / f"demo-{file_type}.gguf"
    if not path.exists() or path.stat().st_mtime < DEMO.stat().st_mtime:
        written = path.with_suffix(f".{os.getpid()}")
        command = [library / "llama-quantize", DEMO, written, file_type]
        subprocess.run(command, check=True, capture_output=True)
        written.replace(path)
    return path
