"""Speed of computing the error of weights.

    python -m benchmarks.quality [--rows 4096] [--pairs 5]

Stores a random tensor in files as F16 and, by ggml's own quantizer, in each K type. In one run, in
turns, it measures CPU seconds of all threads of this process for

    ours    `compute_weight_errors` of the two files: RMSE, largest error, SQNR, cosine, four
            percentiles, the worst block, and elements that are not finite
    peer    gguf-py's `dequantize` of both, from memory, and numpy for RMSE, largest error, SQNR and
            cosine in float32
    equal   peer and `np.percentile`; no worst block, no search for elements that are not finite

BLAS has one thread in all of them, because waiting threads would count as work.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from benchmarks.ratios import median_ratio
from llamacpp_instr.lab.weights.error import WeightError
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.llama.native import load
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME, GgmlType

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
ROW = 4096

Bytes = npt.NDArray[np.uint8]
F16 = gguf.GGMLQuantizationType.F16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4096, help=f"of {ROW} elements")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    compare_weight_errors(args.rows, args.pairs)

    from benchmarks.inspect_model import compare_inspect

    print()
    compare_inspect()


def compare_weight_errors(rows: int, pairs: int) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (rows, ROW)).astype(np.float32)
    half = values.astype(np.float16).view(np.uint8)
    print(f"error of a tensor of {ROW} by {rows}, against F16")
    with tempfile.TemporaryDirectory() as name:
        reference = load_model_file(write_tensor(Path(name) / "f16.gguf", half, BY_NAME["F16"]))
        for type_ in map(BY_NAME.__getitem__, K_TYPES):
            stored = quantize(values, type_)
            candidate = load_model_file(write_tensor(Path(name) / f"{type_}.gguf", stored, type_))

            def ours() -> WeightError:
                return compute_weight_errors(reference, candidate)[0]  # noqa: B023

            def peer() -> tuple[dict[str, float], npt.NDArray[np.float32]]:
                return peer_error(half, stored, type_)  # noqa: B023

            def equal() -> Any:
                return np.percentile(peer()[1], [50, 90, 99, 99.9])

            check_same(ours(), peer()[0])
            seconds: dict[str, list[float]] = {"ours": [], "peer": [], "equal": []}
            for _ in range(pairs):
                for what, function in (("ours", ours), ("peer", peer), ("equal", equal)):
                    seconds[what].append(cpu(function))
            each = {what: np.median(s) / values.size * 1e9 for what, s in seconds.items()}
            figures = ", ".join(f"{what} {ns:.2f}" for what, ns in each.items())
            print(f"{type_}: {figures} ns a weight")
            print(f"  times the peer:  {median_ratio(seconds['peer'], seconds['ours'])}")
            print(f"  and percentiles: {median_ratio(seconds['equal'], seconds['ours'])}")


def peer_error(
    half: Bytes, stored: Bytes, type_: GgmlType
) -> tuple[dict[str, float], npt.NDArray[np.float32]]:
    """The figures of gguf-py and numpy, written in the obvious way; and |x-y|."""
    x = dequantize(half, F16).ravel()
    y = dequantize(stored, gguf.GGMLQuantizationType(type_.number)).ravel()
    error = x - y
    size = np.abs(error)
    return {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "max_error": float(size.max()),
        "sqnr_db": float(10 * np.log10(np.sum(x**2) / np.sum(error**2))),
        "cosine": float(np.dot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y))),
    }, size


def check_same(error: WeightError, peer: dict[str, float]) -> None:
    for name, value in peer.items():
        assert abs(getattr(error, name) - value) <= 1e-3 * abs(value), name


def quantize(values: npt.NDArray[np.float32], type_: GgmlType) -> Bytes:
    lib = load().lib
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, *[number] * 3, pointer]
    rows, row = values.shape
    stored = np.empty((rows, type_.row_bytes(row)), np.uint8)
    lib.ggml_quantize_chunk(
        type_.number, values.ctypes.data, stored.ctypes.data, 0, rows, row, None
    )
    return stored


def write_tensor(path: Path, stored: Bytes, type_: GgmlType) -> Path:
    """A model file of one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType(type_.number)
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cpu(function: Callable[[], Any]) -> float:
    """CPU seconds of a call, of all threads of this process."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
