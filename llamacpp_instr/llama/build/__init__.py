"""Builds and installs the patched llama.cpp, and diagnoses an installation."""

BACKENDS = {
    "blas": ("-DGGML_BLAS=ON", "-DGGML_BLAS_VENDOR=OpenBLAS"),
    "cuda": ("-DGGML_CUDA=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
}
"""backends of `instr build --backend`, and CMake's arguments for them"""
