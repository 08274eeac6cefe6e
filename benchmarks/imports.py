"""Memory and time of `instr import`, for models that differ only in the number of layers.

    .venv-peers/bin/python -m benchmarks.imports

Needs PyTorch (`make test-all PARTS=peers` installs it) and 6 GB of disk. The memory is the
converter's own: it does not include pages of mapped files, which the system can drop.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from benchmarks.harness import INSTR, own_bytes, sampled, scratch
from tests.parts.peers.peer_models import PIECES, add_sentencepiece

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
LAYERS = (3, 10)


def write_model(folder: Path, n_layers: int, **changes: int) -> int:
    """Write a random Llama of SHAPE with `changes` in BF16, in shards; returns the bytes of its
    weights."""
    assert SHAPE["vocab_size"] >= PIECES
    config = transformers.LlamaConfig(**{**SHAPE, **changes}, num_hidden_layers=n_layers)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400MB")
    finally:
        torch.set_default_dtype(before)
    add_sentencepiece(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def import_measured(*words: object) -> tuple[int, float]:
    """Run `instr import`; returns the converter's peak memory in bytes, and seconds."""
    begun = time.monotonic()
    command = [*INSTR, "import", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def of_children() -> int:
            with suppress(OSError):  # it has ended
                return max(map(own_bytes, children.read_text().split()), default=0)
            return 0

        with sampled(of_children) as sizes:
            assert process.wait() == 0
    return max(sizes), time.monotonic() - begun


def main() -> None:
    print("layers  source MB  type  file MB  peak MB  seconds")
    with scratch() as directory:
        for n_layers in LAYERS:
            folder = directory / f"model-{n_layers}"
            source = write_model(folder, n_layers)
            for type_ in ("BF16", "F32", "Q8_0"):
                output = directory / "model.gguf"
                peak, seconds = import_measured(folder, "-o", output, "--type", type_, "--force")
                print(
                    f"{n_layers:6} {source / 1e6:10.0f} {type_:>5} "
                    f"{output.stat().st_size / 1e6:8.0f} {peak / 1e6:8.0f} {seconds:8.1f}"
                )


if __name__ == "__main__":
    main()
