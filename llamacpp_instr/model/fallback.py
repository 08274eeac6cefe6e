"""Finds weights that have another type than their file type asks for, because its blocks do not
divide their rows.

Invariant: the result follows from the file alone. llama-quantize chooses a type for a tensor, and
replaces it if a row is not a whole number of blocks (`tensor_type_fallback`, src/llama-quant.cpp).
A weight counts as fallback if it has such a replacement type, its row length is the reason, and the
mixture of the file type asks for the original type. Types chosen by hand leave no trace in a file
and cannot be recognized.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import BY_NAME, GgmlType

_SECOND: dict[str, str] = {
    **dict.fromkeys(
        ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"], "IQ4_NL"
    ),
    **dict.fromkeys(["Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"], "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""The replacement of each type: a type with blocks of 32, and F16 if these do not fit either."""

_MIXTURES: dict[str, tuple[str, ...]] = {
    "Q1_0": ("Q1_0", "Q6_K"),
    "Q2_0": ("Q2_0", "Q4_K", "Q6_K"),
    "Q4_0": ("Q4_0", "Q4_1", "Q6_K"),
    "Q4_1": ("Q4_1", "Q6_K"),
    "Q5_0": ("Q5_0", "Q5_1", "Q6_K"),
    "Q5_1": ("Q5_1", "Q6_K"),
    "Q8_0": ("Q8_0",),
    "MXFP4_MOE": ("MXFP4", "Q8_0"),
    "Q2_K": ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "Q2_K_S": ("Q2_K", "Q4_K", "Q6_K"),
    "Q3_K_S": ("Q3_K", "Q5_K", "Q6_K"),
    "Q3_K_M": ("Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "Q3_K_L": ("Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "Q4_K_S": ("Q4_K", "Q5_K", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q5_K", "Q6_K"),
    "Q5_K_S": ("Q5_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K",),
    "TQ1_0": ("TQ1_0", "Q4_K", "Q6_K"),
    "TQ2_0": ("TQ2_0", "Q4_K", "Q6_K"),
    "IQ1_S": ("IQ1_S", "IQ2_XXS", "Q2_K", "Q4_K", "Q5_K"),
    "IQ1_M": ("IQ1_M", "IQ2_XXS", "Q2_K", "Q4_K", "Q5_K"),
    "IQ2_XXS": ("IQ2_XXS", "Q2_K", "Q4_K", "Q5_K"),
    "IQ2_XS": ("IQ2_XS", "Q2_K", "Q4_K", "Q5_K"),
    "IQ2_S": ("IQ2_XS", "IQ3_S", "Q4_K", "Q5_K"),
    "IQ2_M": ("IQ2_S", "IQ3_S", "Q4_K", "Q5_K"),
    "IQ3_XXS": ("IQ3_XXS", "IQ2_S", "IQ3_S", "Q3_K", "Q4_K", "Q5_K"),
    "IQ3_XS": ("IQ3_S", "IQ3_XXS", "Q4_K", "Q5_K", "Q6_K"),
    "IQ3_S": ("IQ3_S", "Q4_K", "Q5_K", "Q6_K"),
    "IQ3_M": ("IQ3_S", "Q4_K", "Q5_K", "Q6_K"),
    "IQ4_NL": ("IQ4_NL", "Q5_K", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K", "Q6_K"),
}
"""The types in the mixture of a file type, its default first (`llama_tensor_get_type_impl`). Other
file types have no mixture."""

# parts of the names of tensors that llama-quantize leaves alone (`tensor_allows_quantization`)
_LEFT_AS_IT_IS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel",
    "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight",
    "indexer.q_proj.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight",
    "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight",
    "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd",
    "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook",
    "mm.a.code_embd",
)  # fmt: skip
_NEVER = ("position_embd.weight", "token_types.weight")
# tensors with Q8_0 in every mixture: of models with eight experts, and of one architecture
_ATTENTION = ("attn_v.weight", "attn_k.weight", "attn_qkv.weight", "attn_kv_b.weight")

_GLM5_NEXT = ("attn_q_a", "attn_q_b", "nextn.eh_proj")


@dataclass(frozen=True)
class Fallback:
    """A weight whose type replaces another one."""

    weight: Weight
    wanted: tuple[GgmlType, ...]
    """the type that its rows did not allow; several if the file does not show which"""

    @property
    def more_bytes(self) -> int:
        """Additional bytes compared with the smallest type that may have been wanted."""
        bits = min(type_.bits_per_weight for type_ in self.wanted)
        return round(self.weight.n_bytes - self.weight.n_elements * bits / 8)


def has_mixture(model: ModelFile) -> bool:
    """Whether the file type defines a mixture, which `find_fallbacks` needs."""
    return model.file_type in _MIXTURES


def find_fallbacks(model: ModelFile) -> list[Fallback]:
    """The weights that fell back to another type, in the order of the file. Empty if the file type
    is unknown or has no mixture."""
    mixture = [BY_NAME[name] for name in _MIXTURES.get(model.file_type or "", ())]
    if not mixture:
        return []
    head = "output.weight" if "output.weight" in model.by_name else "token_embd.weight"
    found = []
    for weight in model.weights:
        if not _is_quantized(weight) or _is_chosen(model, weight, head):
            continue
        wanted = [t for t in mixture if _second(t, weight.row_length) == weight.type.name]
        if weight.name == head and (meant := replaced_head(weight, weight.type, model.file_type)):
            wanted = [meant]
        if wanted:
            found.append(Fallback(weight, tuple(wanted)))
    return found


def _second(wanted: GgmlType, row: int) -> str | None:
    """The type that replaces `wanted` for a row of this length; None if `wanted` fits."""
    if row % wanted.block == 0:
        return None
    second = _SECOND.get(wanted.name)
    fits = second is not None and row % BY_NAME[second].block == 0
    return second if fits else "F16"


def replaced_head(weight: Weight, type_: GgmlType, file_type: str | None) -> GgmlType | None:
    """The type meant for the output matrix, or for the embeddings in its place, which has `type_`
    instead: it silently becomes Q8_0 if the blocks of the default type do not divide its rows."""
    mixture, row = _MIXTURES.get(file_type or "", ("Q8_0",)), weight.row_length
    if mixture[0] in ("Q8_0", "MXFP4") or row % BY_NAME[mixture[0]].block == 0:
        return None
    if type_.name != (_second(BY_NAME["Q8_0"], row) or "Q8_0"):
        return None
    return BY_NAME["Q6_K" if "Q6_K" in mixture else "Q5_K"]


def _is_quantized(weight: Weight) -> bool:
    """Whether llama-quantize would change it."""
    return (
        sum(n > 1 for n in weight.ne[1:]) > 0
        and weight.name.endswith("weight")
        and weight.name not in _NEVER
        and not any(part in weight.name for part in _LEFT_AS_IT_IS)
    )


def _is_chosen(model: ModelFile, weight: Weight, head: str) -> bool:
    """Whether the mixture gives it Q8_0 regardless of its rows."""
    if weight.type.name != "Q8_0":
        return False
    if model.hyper_parameter("expert_count") == 8 and weight.name.endswith(_ATTENTION):
        return True
    if model.architecture == "falcon":
        return weight.name == head
    return model.architecture == "glm5-next" and any(part in weight.name for part in _GLM5_NEXT)
