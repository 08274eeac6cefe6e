"""The types that llama.cpp's quantizer gives to tensors: the options of a quantization, the plan of
each tensor, and the weights of a file that have another type than its file type asks for.

Invariants: sizes are computed from types and shapes with the table of `model.types`; none is an
estimate. Only a dry run of the quantizer determines the types of tensors, and it only prints them:
`read_dry_run` returns one plan for each tensor of the model, or raises an error.

A type is replaced where its blocks do not divide the rows (`tensor_type_fallback`,
src/llama-quant.cpp). `find_fallbacks` only has the file: a weight counts as a fallback if it has a
type that replaces another one, its row length is the reason, and the mixture of the file type asks
for the original type. Types chosen by hand leave no trace in a file and cannot be recognized.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import BY_NAME, FILE_TYPES, NOT_COMPUTED, GgmlType

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""short names of file types, as in llama-quantize"""

READ_ONLY = {"NVFP4"}
"""file types that llama.cpp reads but cannot quantize to"""

WRITABLE: dict[str, int] = {
    name: number for number, name in FILE_TYPES.items() if name not in READ_ONLY
}
"""`enum llama_ftype` of the file types that can be written, by name"""

TENSOR_TYPES = {name: type_ for name, type_ in BY_NAME.items() if name not in NOT_COMPUTED}
"""storage types that `ggml_quantize_chunk` supports; it aborts the process on others"""

# ggml_quantize_requires_imatrix: ggml aborts the process without one
_ABORT_WITHOUT_IMATRIX = {"IQ2_XXS", "IQ2_XS", "IQ1_S"}
# tensor_requires_imatrix (src/llama-quant.cpp): llama.cpp refuses, because the result is unusable
_REFUSED_WITHOUT_IMATRIX = _ABORT_WITHOUT_IMATRIX | {"IQ3_XXS", "IQ2_S", "IQ1_M"}
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"

_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT, which the quantizer always writes
_KEY_BYTES = 8 + 4  # of a metadata entry: the length of its key, the type of its value
PROGRESS = re.compile(r"\[ *(\d+)/ *(\d+)\] ")
"""the beginning of a tensor's line: its number, and the number of tensors"""

_TENSOR = re.compile(
    r"\[ *\d+/ *\d+\] (?P<name>.+?) *- \[[ \d,]*\], type = *(?P<type>\w+), "
    r"size = *[\d.]+ MiB(?: -> *[\d.]+ MiB \((?P<new>\w+)\))?"
)
_FALLBACK = re.compile(
    r"warning: (?P<name>.+?) *- ncols *\d+ not divisible by *\d+ "
    r"\(required for type *(?P<wanted>\w+)\).*-> falling back to *\w+ *"
)


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of a quantization, except the file type; the defaults are llama-quantize's."""

    tensor_types: Sequence[tuple[str, GgmlType]] = ()
    """pairs of a pattern (`base.patterns`) and a type; the first pattern that matches a tensor's
    name counts"""
    output_type: GgmlType | None = None
    """of `output.weight`"""
    embedding_type: GgmlType | None = None
    """of `token_embd.weight`"""
    imatrix: Path | None = None
    """a file with an importance matrix"""
    pure: bool = False
    """all tensors in the file type's main type, without a mixture"""
    allow_requantize: bool = False
    """whether tensors that are already quantized may be quantized again, at a loss of quality"""
    threads: int = 0
    """0: one per core"""


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one tensor."""

    weight: Weight
    """the tensor in the source"""
    type: GgmlType
    fallback_from: GgmlType | None = None
    """the type that the tensor would have if that type's blocks divided its rows"""
    needs_imatrix: bool = False
    """whether llama.cpp refuses to write it without importances"""

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def n_bytes(self) -> int:
        return self.type.row_bytes(self.weight.row_length) * self.weight.n_rows

    @property
    def requantized(self) -> bool:
        return self.weight.type.is_quantized and self.type != self.weight.type


@dataclass(frozen=True)
class QuantizationPlan:
    """The file that llama.cpp's quantizer will write."""

    source: Path
    source_bytes: int
    """of the source's weights"""
    file_type: str
    tensors: list[TensorPlan]
    """in the order of writing"""
    header_bytes: int
    """from the file's start to its first tensor"""

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights, without header and padding."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + sum(_padded(tensor.n_bytes) for tensor in self.tensors)

    @property
    def n_elements(self) -> int:
        return sum(tensor.weight.n_elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.n_elements

    @property
    def fallbacks(self) -> list[TensorPlan]:
        return [tensor for tensor in self.tensors if tensor.fallback_from]

    @property
    def needs_imatrix(self) -> bool:
        return any(tensor.needs_imatrix for tensor in self.tensors)


def parse_file_type(name: str) -> str:
    """llama-quantize's spelling of a file type; raises `UsageError` for an unknown one."""
    upper = name.strip().upper()
    file_type = ALIASES.get(upper, upper)
    if file_type in READ_ONLY:
        raise UsageError(f"llama.cpp has no recipe to quantize to {file_type}; it only reads it")
    if file_type not in WRITABLE:
        raise UsageError(f"unknown file type {name.strip()!r}; choose from {', '.join(WRITABLE)}")
    return file_type


def parse_tensor_type(name: str) -> GgmlType:
    """The storage type of that name; raises `UsageError` if llama.cpp cannot quantize to it."""
    upper = name.strip().upper()
    if upper in TENSOR_TYPES:
        return TENSOR_TYPES[upper]
    known = "llama.cpp cannot quantize to" if upper in BY_NAME else "unknown storage type"
    raise UsageError(f"{known} {name.strip()!r}; choose from {', '.join(TENSOR_TYPES)}")


def quantized_name(source: Path, file_type: str) -> str:
    """The name of the quantized file: `tiny-F16.gguf` becomes `tiny-Q4_K_M.gguf`."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", source.name.removesuffix(".gguf"))
    known = "|".join(sorted([*FILE_TYPES.values(), *ALIASES, "FP16", "FP32"], key=len)[::-1])
    stem = re.sub(rf"(?<=.)[-._](?:{known})$", "", stem, flags=re.IGNORECASE)
    return f"{stem}-{file_type}.gguf"


def needs_imatrix(weight: Weight, type_: GgmlType, file_type: str) -> bool:
    """Whether llama.cpp needs importances to write this tensor as `type_`."""
    if type_ == weight.type:
        return False
    if weight.name in (*EMBEDDINGS, OUTPUT):
        return type_.name in _ABORT_WITHOUT_IMATRIX
    return type_.name in _REFUSED_WITHOUT_IMATRIX or (type_.name, file_type) == ("Q2_K", "Q2_K_S")


def quantized_paths(source: Path, file_types: Iterable[str], output: str) -> dict[str, Path]:
    """The output file of each file type, without duplicates. `output` is a directory, or a file for
    a single type. Raises `UsageError` if it does not fit."""
    if output == "-":
        raise UsageError("models are written only to files; name a directory with -o")
    names = list(dict.fromkeys(parse_file_type(name) for name in file_types))
    place = Path(output)
    mode = file_mode(place)
    is_directory = mode is not None and stat.S_ISDIR(mode)
    if place.suffix == ".gguf" and not is_directory:
        if len(names) > 1:
            raise UsageError(f"{output} is one file, for {len(names)} types; name a directory")
        return {names[0]: place}
    if mode is not None and not is_directory:
        raise UsageError(f"{output} is not a directory; name one, or a file that ends in .gguf")
    return {name: place / quantized_name(source, name) for name in names}


def finds(pattern: str, name: str) -> bool:
    """Whether an override's pattern matches a tensor. True if Python cannot compile the pattern,
    so that llama.cpp decides."""
    expression = regular_expression("--tensor-type", pattern)
    try:
        return "[[:" in expression or re.search(expression, name) is not None
    except re.error:
        return True


def header_bytes(source: ModelFile, extra: dict[str, str | int]) -> int:
    """Bytes of the header that the quantizer writes: the source's metadata with the file type,
    without the keys of a split, and with `extra`. Every integer has 32 bits."""
    header = source.headers[source.path]
    size = header.infos_start
    for key, n_bytes in (("split.no", 2), ("split.count", 2), ("split.tensors.count", 4)):
        if key in source.metadata:
            size -= _KEY_BYTES + len(key) + n_bytes
    added: dict[str, str | int] = {"general.quantization_version": 2, "general.file_type": 0}
    for key, value in (added | extra).items():
        if key in source.metadata:
            size -= _entry_bytes(key, source.metadata[key])
        size += _entry_bytes(key, value)
    for weight in source.weights:
        # trailing dimensions of 1 are not written
        n_dims = max([i + 1 for i, n in enumerate(weight.ne) if n != 1], default=1)
        size += 8 + len(weight.name.encode()) + 4 + 8 * n_dims + 4 + 8
    return _padded(size)


def _entry_bytes(key: str, value: object) -> int:
    n_bytes = 8 + len(value.encode()) if isinstance(value, str) else 4
    return _KEY_BYTES + len(key) + n_bytes


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def read_dry_run(
    source: ModelFile, file_type: str, options: QuantizeOptions, lines: Iterable[str]
) -> list[TensorPlan]:
    """The plan of each tensor of `source`, in the order of writing; `lines` are the log of a dry
    run. Raises `InstrError` if they do not list every tensor."""
    wanted: dict[str, GgmlType] = {}
    plans: dict[str, TensorPlan] = {}
    for line in lines:
        if match := _FALLBACK.fullmatch(line):
            wanted[match["name"]] = _type(match["wanted"])
        elif match := _TENSOR.fullmatch(line):
            name, type_ = match["name"], _type(match["new"] or match["type"])
            weight = source.by_name.get(name)
            if weight is None or name in plans or weight.type != _type(match["type"]):
                raise InstrError(f"llama.cpp's dry run and the file differ in {name!r}")
            plans[name] = TensorPlan(
                weight,
                type_,
                wanted.get(name) or _silently_replaced(weight, type_, file_type, options),
                needs_imatrix(weight, type_, file_type),
            )
    missing = [name for name in source.by_name if name not in plans]
    if missing:
        raise InstrError(f"llama.cpp's dry run does not list {missing[0]!r}")
    return list(plans.values())


def _silently_replaced(
    weight: Weight, type_: GgmlType, file_type: str, options: QuantizeOptions
) -> GgmlType | None:
    """The type that the output tensor (or the embeddings used as output) would have if its blocks
    divided the rows; only here does llama.cpp use another one without a warning."""
    chosen = options.pure or options.output_type or options.embedding_type
    if (
        weight.name not in (OUTPUT, *EMBEDDINGS)
        or chosen
        or any(finds(pattern, weight.name) for pattern, _ in options.tensor_types)
        or type_ == weight.type
    ):
        return None
    return replaced_head(weight, type_, file_type)


def _type(name: str) -> GgmlType:
    try:
        return BY_NAME[name.upper()]
    except KeyError:
        raise InstrError(f"llama.cpp's dry run names the type {name!r}, which is unknown") from None


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
    head = OUTPUT if OUTPUT in model.by_name else EMBEDDINGS[0]
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
