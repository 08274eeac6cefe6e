"""Records two sessions of a process whose device uses CUDA graphs before, between and after them.

    cuda_sessions.py MODEL FOLDER

`GGML_BACKEND_PATH` names the module of the device. The second session begins after a graph has been
updated that the first has seen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api

from tests.programs.device_session import begin, context_of, end, ggml, submit


def decode(context: Any, tokens: int) -> None:
    for i in range(tokens):
        submit(context, [5 + i])
        api.llama_synchronize(context)


def main(path: str, folder: str) -> None:
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    assert ggml.ggml_backend_load(os.environ["GGML_BACKEND_PATH"].encode())
    params = api.llama_model_default_params()
    params.n_gpu_layers = -1
    model = api.llama_model_load_from_file(path.encode(), params)
    context = context_of(model)
    submit(context, [1, 2, 3])
    decode(context, 4)
    for name in ("first.log", "second.log"):
        begin(str(Path(folder) / name), "detailed")
        decode(context, 3)
        submit(context, [7] * 9)  # another shape: the graph of single tokens is updated after it
        decode(context, 4)
        end("detailed")
        submit(context, [7] * 5)
        decode(context, 4)
    api.llama_free(context)
    api.llama_model_free(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
