"""The child process in which llama.cpp quantizes; `quantize.runner` starts it.

A quantization cannot be stopped from Python, and ggml ends the process on misuse, so it runs in a
child.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from llamacpp_instr.base.child import Answer, Request, remove_output, serve
from llamacpp_instr.base.errors import NativeError
from llamacpp_instr.lab.quantize.plan import PROGRESS
from llamacpp_instr.llama import native
from llamacpp_instr.llama.log import LogLines
from llamacpp_instr.model.imatrix import load_imatrix

# LLAMA_KV_OVERRIDE_TYPE_*
_INT, _STR = 0, 3


def main() -> None:
    serve(_quantize, remove_output)


def _quantize(request: Request, answer: Answer) -> int:
    """The return value of `llama_model_quantize`: 0 on success. Its log becomes answers."""
    lib = native.import_llama_cpp().llama_cpp
    params = lib.llama_model_quantize_default_params()
    _check_layout(params)
    for name, value in request["params"].items():
        if value is not None:
            setattr(params, name, value)
    overrides = [
        lib.llama_model_tensor_override(os.fsencode(pattern), number)
        for pattern, number in request["tensor_types"]
    ]
    if overrides:
        overrides.append(lib.llama_model_tensor_override(None, 0))
        params.tt_overrides = (lib.llama_model_tensor_override * len(overrides))(*overrides)
    if request["imatrix"] is not None:
        _add_imatrix(lib, params, request["imatrix"])
    lines = LogLines()

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, _user_data: int) -> None:
        piece = text.decode(errors="replace")
        if not lines.unfinished and (match := PROGRESS.match(piece)):
            answer("progress", int(match[1]), int(match[2]))
        for line in lines.completed(level, piece):
            answer("log", *line)

    lib.llama_log_set(log, None)
    source, output = os.fsencode(request["source"]), os.fsencode(request["output"])
    try:
        return int(lib.llama_model_quantize(source, output, ctypes.byref(params)))
    finally:
        lib.llama_log_set(lib.llama_log_callback(), None)


def _add_imatrix(lib: Any, params: Any, path: str) -> None:
    matrix = _load_imatrix(Path(path))
    floats = ctypes.POINTER(ctypes.c_float)
    entries = [
        lib.llama_model_imatrix_data(name.encode(), values.ctypes.data_as(floats), values.size)
        for name, values in matrix.entries.items()
    ]
    entries.append(lib.llama_model_imatrix_data(None, None, 0))
    params.imatrix = (lib.llama_model_imatrix_data * len(entries))(*entries)
    overrides = []
    for key, value in matrix.metadata().items():
        override = lib.llama_model_kv_override(_INT, key.encode())
        if isinstance(value, str):
            override.tag = _STR
            override.value.val_str = os.fsencode(value)
        else:
            override.value.val_i64 = value
        overrides.append(override)
    overrides.append(lib.llama_model_kv_override())
    # the library only reads through this pointer, although its type is not const
    array = (lib.llama_model_kv_override * len(overrides))(*overrides)
    params.kv_overrides = ctypes.cast(array, type(params.kv_overrides))
    params._kept = (matrix, array)


# the same for all requests, because they are for one model
_load_imatrix = functools.cache(load_imatrix)


def _check_layout(params: Any) -> None:
    """The parameters are a struct: with another layout the library would read wrong fields."""
    # the defaults of llama_model_quantize_default_params, first to last field
    expected = (0, 7, True, 8 << 30)
    found = (params.nthread, params.ftype, params.quantize_output_tensor, params.max_buf_size)
    if found != expected or params.output_tensor_type != params.token_embedding_type:
        raise NativeError(
            "the quantizer of the installed llama-cpp-python differs from the pinned one; "
            "run `instr build`"
        )
