"""Speed and memory of reading a model's headers.

    python -m benchmarks.inspect_model

Makes a model of 2,000 tensors with a vocabulary of 128,000 tokens and its merges; its weights are a
hole in the file. In one run, in turns, it measures CPU seconds of this process for

    ours    all work of `instr inspect`: loading the headers, all tables including the tensors'
    peer    gguf-py's GGUFReader opening the file, and no use of the result

and the peak memory of the real command, with the same headers and files of several sizes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf

from benchmarks.ratios import median_ratio
from llamacpp_instr.converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.model.file import load_model_file

PAIRS = 5
N_LAYERS, N_TOKENS = 222, 128_000
ROLES = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
         "ffn_down")  # fmt: skip
INSPECT = """
import sys
from llamacpp_instr.cli import main
try:
    main(["inspect", sys.argv[1], "-o", "/dev/null"])
except SystemExit as leaving:
    assert leaving.code == 0
# ru_maxrss would count what the parent had when it forked
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
"""


def main() -> None:
    compare_inspect()


def compare_inspect() -> None:
    """Print how `inspect` compares with gguf-py in CPU time, and how much memory it needs."""
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model.gguf", row=256)
        ours, peer = list[float](), list[float]()
        for _ in range(PAIRS):
            ours.append(cpu(inspect, model))
            peer.append(cpu(gguf.GGUFReader, model))
        header = load_model_file(model)
        head, n_tensors = header.file_size - header.n_bytes, len(header.weights)
        print(
            f"inspect of {n_tensors:,} tensors, {N_TOKENS:,} tokens, {head / 1e6:.1f} MB of header"
        )
        print(f"  CPU seconds: {min(ours):.3f}, gguf-py's GGUFReader {min(peer):.3f}")
        print(f"  times as fast as GGUFReader: {median_ratio(peer, ours)}")
        large = write_model(Path(name) / "large.gguf", row=4096)
        for path in (model, large):
            done = subprocess.run(
                [sys.executable, "-c", INSPECT, path], check=True, capture_output=True, text=True
            )
            size = path.stat().st_size
            print(f"  a file of {size / 1e9:.1f} GB: peak memory {int(done.stdout) / 1e6:.1f} MB")


def cpu(function: Callable[[Path], object], path: Path) -> float:
    """CPU seconds of a call, from start to end of this process's only thread."""
    begin = time.process_time()
    function(path)
    return time.process_time() - begin


def inspect(path: Path) -> None:
    model = load_model_file(path)
    compute_inspection(model)
    compute_tensors(model)


def write_model(path: Path, row: int) -> Path:
    """A model of about 2,000 tensors of row x row elements, without data."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(N_LAYERS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(N_TOKENS)])
    writer.add_token_types([1] * N_TOKENS)
    writer.add_token_merges([f"tok en{i}" for i in range(N_TOKENS)])
    writer.add_bos_token_id(N_TOKENS - 2)
    writer.add_eos_token_id(N_TOKENS - 1)
    names = [f"blk.{layer}.{role}.weight" for layer in range(N_LAYERS) for role in ROLES]
    n_bytes = row * row * 2
    for name in ["token_embd.weight", "output.weight", *names]:
        type_ = gguf.GGMLQuantizationType.F16
        writer.add_tensor_info(name, [row, row], "float16", n_bytes, type_)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        data_start = -(-file.seek(0, 2) // 32) * 32
        file.truncate(data_start + n_bytes * (len(names) + 2))
    return path


if __name__ == "__main__":
    main()
