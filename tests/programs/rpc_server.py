"""A server of ggml's RPC backend with the CPU of this machine: `rpc_server.py LIBRARY`. Prints its
address."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path

import llama_cpp

CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def main() -> None:
    # a process has each library once, under the name by which the others need it
    ggml = ctypes.CDLL(str(Path(llama_cpp.llama_cpp._lib._name).with_name("libggml.so.0")))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(CPU))
    rpc = ctypes.CDLL(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    print(address, flush=True)
    # what the server says must not fill the pipe
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    size = ctypes.c_size_t
    rpc.ggml_backend_rpc_start_server(address.encode(), None, size(2), size(1), devices)


if __name__ == "__main__":
    main()
