"""The demo model as upstream's llama-quantize writes it, by file type."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import numpy as np

from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import FILE_TYPES
from tests.kit.native_kit import DEMO, unpatched_library
from tests.kit.quantize_kit import write_imatrix

QUANTIZED_FILE_TYPES = [name for name in FILE_TYPES.values() if name != "NVFP4"]
"""those that llama-quantize writes"""

_NEED_IMPORTANCE = ("IQ1", "IQ2", "IQ3_X", "Q2_K_S")
"""how the names of these types begin"""


@functools.cache
def quantized_demo(file_type: str) -> Path:
    """The demo model in `file_type`, such as `Q4_K_M`, without an importance matrix unless the type
    requires one. Cached beside the programs that wrote it."""
    library = unpatched_library()
    directory = library.parent / "quantized"
    directory.mkdir(exist_ok=True)
    path = directory / f"demo-{file_type}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        needs = file_type.startswith(_NEED_IMPORTANCE)
        importance = ["--imatrix", flat_importance()] if needs else []
        subprocess.run(
            [library / "llama-quantize", *importance, DEMO, unfinished, file_type, "1"],
            check=True, capture_output=True,
        )  # fmt: skip
        unfinished.replace(path)
    return path


@functools.cache
def flat_importance() -> Path:
    """An importance matrix of the demo model in which all columns are equally important."""
    path = unpatched_library().parent / "quantized" / "flat-imatrix.gguf"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        matrices = [weight for weight in load_model_file(DEMO).weights if len(weight.ne) == 2]
        ones = {weight.name: np.ones(weight.ne[0], np.float32) for weight in matrices}
        write_imatrix(unfinished, ones, count=1).replace(path)
    return path
