"""Speed of computing the error of weights, and speed and memory of reading a model's headers.

    python -m benchmarks.quality [--rows 4096] [--pairs 5]

Stores a random tensor of `--rows` rows in files as F16 and, by ggml's own quantizer, in each K
type. In one run, interleaved, it measures CPU seconds of all threads of this process for

    ours    `compute_weight_errors` of the two files: RMSE, largest error, SQNR, cosine, four
            percentiles, the worst block, and elements that are not finite
    peer    gguf-py's `dequantize` of both, from memory, and numpy for RMSE, largest error, SQNR and
            cosine in float32
    equal   peer and `np.percentile`; no worst block, no search for elements that are not finite

BLAS has one thread in all of them, because waiting threads would count as work.

Then it makes a model of 2,000 tensors with a vocabulary of 128,000 tokens and its merges, whose
weights are a hole in the file, and measures in the same way

    ours    all work of `instr inspect`: loading the headers, all tables including the tensors'
    peer    gguf-py's GGUFReader opening the file, and no use of the result

and the peak memory of the real command, with the same headers and files of several sizes.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from benchmarks.harness import arguments, cost_of_instr, cpu_in_turns, median_ratio, scratch
from llamacpp_instr.converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.types import BY_NAME, GgmlType
from llamacpp_instr.prediction.probe.measure import ggml
from tests.kit.block_models import write_blocks
from tests.kit.sparse_models import write_large_header

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
ROW = 4096
N_LAYERS = 222
ROLES = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
         "ffn_down")  # fmt: skip

Bytes = npt.NDArray[np.uint8]
F16 = gguf.GGMLQuantizationType.F16


def main() -> None:
    args = arguments(__doc__, rows=4096, pairs=5)
    compare_weight_errors(args.rows, args.pairs)
    print()
    compare_inspect(args.pairs)


# --- errors of weights ---


def compare_weight_errors(rows: int, pairs: int) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (rows, ROW)).astype(np.float32)
    half = values.astype(np.float16).view(np.uint8)
    print(f"error of a tensor of {ROW} by {rows}, against F16")
    with scratch() as folder:
        reference = write_tensor(folder, "F16", half)
        for type_ in map(BY_NAME.__getitem__, K_TYPES):
            stored = quantize(values, type_)
            candidate = write_tensor(folder, type_.name, stored)
            ours = partial(compute_weight_errors, reference, candidate)
            peer = partial(peer_error, half, stored, type_)
            for figure, value in peer()[0].items():
                assert abs(getattr(ours()[0], figure) - value) <= 1e-3 * abs(value), figure

            def equal() -> object:
                return np.percentile(peer()[1], [50, 90, 99, 99.9])  # noqa: B023

            seconds = cpu_in_turns(pairs, ours=ours, peer=peer, equal=equal)
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


def quantize(values: npt.NDArray[np.float32], type_: GgmlType) -> Bytes:
    rows, row = values.shape
    stored = np.empty((rows, type_.row_bytes(row)), np.uint8)
    at = values.ctypes.data, stored.ctypes.data
    ggml().ggml_quantize_chunk(type_.number, *at, 0, rows, row, None)
    return stored


def write_tensor(folder: Path, type_: str, stored: Bytes) -> ModelFile:
    """A model of one tensor."""
    tensors = {"blk.0.ffn_up.weight": (type_, stored)}
    return load_model_file(write_blocks(folder / f"{type_}.gguf", tensors))


# --- headers ---


def compare_inspect(pairs: int) -> None:
    with scratch() as folder:
        names = [f"blk.{layer}.{role}.weight" for layer in range(N_LAYERS) for role in ROLES]
        names = ["token_embd.weight", "output.weight", *names]
        model, large = (
            write_large_header(folder / f"{row}.gguf", N_LAYERS, names, row, merges=True)
            for row in (256, 4096)
        )
        seconds = cpu_in_turns(
            pairs, ours=partial(inspect, model), peer=partial(gguf.GGUFReader, model)
        )
        ours, peer = seconds["ours"], seconds["peer"]
        header = load_model_file(model)
        head, n_tensors = header.file_size - header.n_bytes, len(header.weights)
        print(f"inspect of {n_tensors:,} tensors, 128,000 tokens, {head / 1e6:.1f} MB of header")
        print(f"  CPU seconds: {min(ours):.3f}, gguf-py's GGUFReader {min(peer):.3f}")
        print(f"  times as fast as GGUFReader: {median_ratio(peer, ours)}")
        for path in (model, large):
            _, peak = cost_of_instr("inspect", path, "-o", "/dev/null")
            size = path.stat().st_size
            print(f"  a file of {size / 1e9:.1f} GB: peak memory {peak / 1e6:.1f} MB")


def inspect(path: Path) -> None:
    model = load_model_file(path)
    compute_inspection(model)
    compute_tensors(model)


if __name__ == "__main__":
    main()
