"""Hyper-parameters that make llama.cpp abort or take unlimited memory or time, and those that
contradict the tensors of their file."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.header import Header, read_array

MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS"""
MAX_EXPERTS = 1024
"""LLAMA_MAX_EXPERTS"""
MOST = {
    # a context is padded to whole blocks of positions; real blocks have a few hundred
    "attention.indexer.block_size": 1 << 16,
    # the values of an output for each token of a batch; real models have a few thousand
    "embedding_length_out": 1 << 16,
    # the iterations of a kernel; real models have about twenty
    "hyper_connection.sinkhorn_iterations": 1 << 10,
    # vectors in the state of each layer; no RWKV has more than two
    "token_shift_count": 2,
}
"""numbers that cost llama.cpp memory or time, and that no tensor's shape limits"""

_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# architectures with multi-head latent attention: src/models/*.cpp with
# LLM_KV_ATTENTION_KEY_LENGTH_MLA
_LATENT = {
    "bailingmoe3", "deepseek2", "deepseek2-ocr", "deepseek32", "dots3note", "glm-dsa", "glm5-next",
    "hy_v4", "kimi-k3", "kimi-linear", "mistral4",
}  # fmt: skip
# architectures that treat one expert as none
_DENSE_WITH_ONE = ("hunyuan_vl", "hunyuan-dense")


def check_hyper_parameters(path: Path, header: Header) -> None:
    """Raise `UsageError`, with key and value, for values in the first part of a model that violate
    an assertion of `llama_model_base::load_hparams` (src/llama-model.cpp), which apply to every
    architecture, or a bound of `MOST`. llama.cpp itself reports missing keys. Architectures have
    further assertions: for these, `memory.plan` loads the model in a separate process."""
    arch = str(header.metadata.get("general.architecture", ""))

    def number(key: str) -> int:
        value = header.metadata.get(f"{arch}.{key}", 0)
        return value if isinstance(value, int) else 0

    def check(key: str, right: bool, rule: str) -> None:
        if not right:
            raise UsageError(
                f"{path} is damaged: {arch}.{key} is {number(key)}, {rule}; fetch it again"
            )

    layers = number("block_count")
    if f"{arch}.block_count" in header.metadata:
        check("block_count", 0 < layers <= MAX_LAYERS, f"not from 1 to {MAX_LAYERS}")
    for key in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count"):
        check(key, number(key) <= layers, f"more than the {layers} layers")

    experts, groups = number("expert_count"), number("expert_group_count")
    used, in_groups = number("expert_used_count"), number("expert_group_used_count")
    if of_layers := header.arrays.get(f"{arch}.expert_used_count"):
        counts = read_array(path, of_layers, MAX_LAYERS)
        used = max((n for n in counts if isinstance(n, int)), default=0)
    if arch in _DENSE_WITH_ONE and experts <= 1:
        experts = used = 0
    check("expert_count", experts <= MAX_EXPERTS, f"more than {MAX_EXPERTS}")
    if not (0 < used <= experts or used == experts == 0):
        raise UsageError(
            f"{path} is damaged: {arch}.expert_used_count is {used} of {experts} experts; "
            "fetch it again"
        )
    if experts:
        check("expert_group_count", groups < experts, f"not less than the {experts} experts")
    else:
        check("expert_group_count", groups == 0, "but the model has no experts")
    if groups > 1:
        check("expert_group_count", experts % groups == 0, f"which does not divide {experts}")
        check("expert_group_used_count", 0 < in_groups < groups, f"of {groups} groups")

    # with multi-head latent attention only a part of a head is rotated, possibly none
    if arch not in _LATENT or not number("attention.key_length_mla"):
        for key in ("rope.dimension_count", "rope.dimension_count_swa"):
            # some architectures assert this; in others the kernel never ends
            if f"{arch}.{key}" in header.metadata:
                check(key, number(key) > 0, "not more than 0")

    for key, most in MOST.items():
        check(key, number(key) <= most, f"more than {most}")

    scaling = header.metadata.get(f"{arch}.rope.scaling.type", "linear")
    if scaling not in _ROPE_SCALINGS:
        raise UsageError(
            f"{path}: {arch}.rope.scaling.type is {scaling!r}, which llama.cpp does not know"
        )


def find_contradictions(model: ModelFile) -> list[str]:
    """A sentence, with both values, for each contradiction between a header and the tensors of its
    file, or within the header. Skips a key that is missing, or to which an architecture may give
    another meaning: the random models of all architectures have no contradiction."""

    def number(key: str) -> int:
        value = model.hyper_parameter(key)
        return value if isinstance(value, int) else 0

    def length(tensor: str, dimension: int) -> int:
        weight = model.by_name.get(f"{tensor}.weight")
        return weight.ne[dimension] if weight and len(weight.ne) > dimension else 0

    layers = [weight.layer for weight in model.weights if weight.name.startswith("blk.")]
    vocabulary = model.arrays.get("tokenizer.ggml.tokens")
    tokens = vocabulary.count if vocabulary else 0
    width, heads = number("embedding_length"), number("attention.head_count")
    groups = number("attention.head_count_kv")
    head = number("attention.key_length") or (width // heads if heads else 0)
    alike = head and not number("attention.key_length_swa")  # the heads of all layers
    keys = length("blk.0.attn_k", 1) / head if alike else 0
    claims = [
        ("block_count", number("block_count"), "layers", max(layers, default=-1) + 1),
        ("embedding_length", width, "columns in token_embd", length("token_embd", 0)),
        ("vocab_size", number("vocab_size"), "tokens", tokens),
        ("the number of tokens", tokens, "embeddings in token_embd", length("token_embd", 1)),
        ("attention.head_count_kv", groups, "heads in blk.0.attn_k", keys),
    ]
    found = [
        f"{one} is {a:,}, but the file has {b:,g} {many}"
        for one, a, many, b in claims
        if a and b and a != b
    ]
    if heads and groups and heads % groups:
        found.append(f"attention.head_count_kv is {groups:,} and does not divide {heads:,} heads")
    return found
