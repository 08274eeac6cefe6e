"""LoRA adapters for a model, and the model with an adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.kit.gguf_files import save

ROLES = ("attn_q", "attn_v", "ffn_down")


def write_adapter(
    path: Path,
    model: Path,
    rank: int = 8,
    alpha: float = 16,
    roles: Sequence[str] = ROLES,
    seed: int = 1,
    strength: float = 1,
) -> Path:
    """An adapter with random matrices for the weights of `model` in these roles."""
    random = np.random.default_rng(seed)
    writer = new_adapter(path, architecture(model), alpha)
    writer.add_name(f"Adapter {seed}")
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name.split(".")[-2] in roles and tensor.name.endswith(".weight"):
            n_in, n_out = tensor.shape.tolist()
            for matrix, shape in (("lora_a", (rank, n_in)), ("lora_b", (n_out, rank))):
                values = random.normal(0, strength / np.sqrt(shape[1]), shape)
                writer.add_tensor(f"{tensor.name}.{matrix}", values.astype(np.float32))
    save(writer)
    return path


def new_adapter(path: Path, arch: str, alpha: float = 16) -> gguf.GGUFWriter:
    """An adapter without tensors, to be saved."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return writer


def write_merged(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """The model with `scale` times the adapter in its weights; those become F32."""
    given, added = gguf.GGUFReader(model), gguf.GGUFReader(adapter)
    alpha = added.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
    matrices = {tensor.name: tensor.data.astype(np.float64) for tensor in added.tensors}
    writer = gguf.GGUFWriter(path, architecture(model))
    for key, of in given.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = of.types[0]
            writer.add_key_value(key, of.contents(), kind, of.types[-1] if kind == 9 else None)
    for tensor in given.tensors:
        a, b = (matrices.get(f"{tensor.name}.lora_{name}") for name in "ab")
        if a is None or b is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            weight = tensor.data.astype(np.float64) + scale * alpha / len(a) * (b @ a)
            writer.add_tensor(tensor.name, weight.astype(np.float32))
    save(writer)
    return path


def architecture(model: Path) -> str:
    return str(gguf.GGUFReader(model).fields["general.architecture"].contents())
