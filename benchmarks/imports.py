"""Memory and time of `instr import`, for models that differ only in the number of layers.

    .venv-peers/bin/python -m benchmarks.imports

Needs PyTorch (`make test-peers` installs it) and 6 GB of disk. The memory is the converter's own,
RssAnon of its process: pages of mapped files, which the system can drop, are not in it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from tests.peers.peer_models import PIECES, add_sentencepiece

SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
LAYERS = (3, 10)


def write_model(folder: Path, shape: dict[str, Any], n_layers: int) -> int:
    """Write a random Llama in BF16, in shards; returns the bytes of its weights."""
    assert shape["vocab_size"] >= PIECES
    config = transformers.LlamaConfig(**shape, num_hidden_layers=n_layers)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400MB")
    finally:
        torch.set_default_dtype(before)
    add_sentencepiece(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def import_measured(arguments: Sequence[object]) -> tuple[int, float]:
    """Run `instr import`; returns the converter's peak of memory in bytes, and seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "llamacpp_instr", "import", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, max(map(_anonymous, _children(process.pid)), default=0))
        time.sleep(0.01)
    assert process.returncode == 0
    return peak, time.monotonic() - begun


def _children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _anonymous(pid: int) -> int:
    """RssAnon of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    print("layers  source MB  type  file MB  peak MB  seconds")
    with TemporaryDirectory() as directory:
        for n_layers in LAYERS:
            folder = Path(directory) / f"model-{n_layers}"
            source = write_model(folder, SHAPE, n_layers)
            for type_ in ("BF16", "F32", "Q8_0"):
                output = Path(directory) / "model.gguf"
                peak, seconds = import_measured([folder, "-o", output, "--type", type_, "--force"])
                print(
                    f"{n_layers:6} {source / 1e6:10.0f} {type_:>5} "
                    f"{output.stat().st_size / 1e6:8.0f} {peak / 1e6:8.0f} {seconds:8.1f}"
                )


if __name__ == "__main__":
    main()
