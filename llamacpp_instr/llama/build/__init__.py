"""Builds and installs the patched llama.cpp, and diagnoses an installation."""

import re

from llamacpp_instr.base.machine import IS_MAC

_BLAS = "Apple" if IS_MAC else "OpenBLAS"
BACKENDS = {
    "blas": ("-DGGML_BLAS=ON", f"-DGGML_BLAS_VENDOR={_BLAS}"),
    "cuda": ("-DGGML_CUDA=ON",),
    "rpc": ("-DGGML_RPC=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
}
"""backends of `instr build --backend`, and CMake's arguments for them; on macOS, BLAS and Metal are
part of every build"""

_LIBRARIES = {
    "libvulkan.so": "install Vulkan's loader (Debian, Ubuntu: apt install libvulkan1)",
    "libopenblas.so": "install OpenBLAS (Debian, Ubuntu: apt install libopenblas0)",
    "libcuda.so": "install NVIDIA's driver",
    "libcublas.so": "install the CUDA toolkit",
    "libcudart.so": "install the CUDA toolkit",
}
"""libraries that backends are linked with, and what to do if one is missing"""


def missing_library(error: str) -> str:
    """What to do about an error of the dynamic linker, if it lacks the library of a backend."""
    found = re.match(r".*?(lib\w+\.so)\S*: cannot open shared object file", error)
    return _LIBRARIES.get(found[1], "") if found else ""
