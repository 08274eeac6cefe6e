"""The demo model in every file type, as the quantizer of the installed library writes it.

`tests/parts/unpatched/test_quantize.py` shows that these are llama-quantize's bytes.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.llama.build.source_tree import sha256_of
from llamacpp_instr.llama.build.wheel import wheel_key
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import FILE_TYPES
from tests.kit.native_kit import DEMO, ROOT, installed_library
from tests.kit.quantize_kit import quantize_model, write_imatrix

QUANTIZED_FILE_TYPES = [name for name in FILE_TYPES.values() if name != "NVFP4"]
"""those that llama-quantize writes"""

_NEED_IMPORTANCE = ("IQ1", "IQ2", "IQ3_X", "Q2_K_S")
"""how the names of these types begin"""


@functools.cache
def quantized_demo(file_type: str) -> Path:
    """The demo model in `file_type`, such as `Q4_K_M`, without an importance matrix unless the type
    requires one."""
    path = _directory() / f"demo-{file_type}.gguf"
    if not path.exists():
        needs_importance = file_type.startswith(_NEED_IMPORTANCE)
        importance = flat_importance() if needs_importance else None
        unfinished = path.with_suffix(f".{os.getpid()}")
        options = QuantizeOptions(imatrix=importance, threads=1)
        quantize_model(load_model_file(DEMO), file_type, unfinished, options)
        unfinished.replace(path)
    return path


@functools.cache
def flat_importance() -> Path:
    """An importance matrix of the demo model in which all columns are equally important."""
    path = _directory() / "flat-imatrix.gguf"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        matrices = [weight for weight in load_model_file(DEMO).weights if len(weight.ne) == 2]
        ones = {weight.name: np.ones(weight.ne[0], np.float32) for weight in matrices}
        write_imatrix(unfinished, ones, count=1).replace(path)
    return path


@functools.cache
def _directory() -> Path:
    """The folder of the files that this library and this version of our code write."""
    code = sorted((ROOT / "llamacpp_instr" / "lab" / "quantize").glob("*.py"))
    key = wheel_key({"library": str(installed_library()), "code": [sha256_of(f) for f in code]})
    directory = cache_dir() / "tests" / f"quantized-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory
