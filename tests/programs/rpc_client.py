"""`instr` with an RPC server as a device: `rpc_client.py LIBRARY ADDRESS LAYERS WORDS...`."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp

from llamacpp_instr.__main__ import main


def add_server(library: str, address: str) -> None:
    """As llama.cpp's own programs do (common/arg.cpp)."""
    ggml = ctypes.CDLL(str(Path(llama_cpp.llama_cpp._lib._name).with_name("libggml.so.0")))
    rpc = ctypes.CDLL(library)
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register(ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(address.encode())))


def place(layers: int) -> None:
    """How many layers the device gets, the last ones; -1 is all."""
    default: Any = llama_cpp.llama_cpp.llama_model_default_params

    def params() -> Any:
        chosen = default()
        chosen.n_gpu_layers = layers
        return chosen

    llama_cpp.llama_cpp.llama_model_default_params = params


if __name__ == "__main__":
    add_server(sys.argv[1], sys.argv[2])
    place(int(sys.argv[3]))
    sys.argv = ["instr", *sys.argv[4:]]
    main()
