"""The options of a quantization, and the plan of each tensor.

Invariants: sizes are computed from types and shapes with the table of `model.types`; none is an
estimate. Only a dry run of the quantizer determines the types of tensors, and it only prints them:
`read_dry_run` returns one plan for each tensor of the model, or raises an error.
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
from llamacpp_instr.model.fallback import replaced_head
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


@dataclass(frozen=True)
class QuantizeResult:
    """A file that was written."""

    path: Path
    file_bytes: int
    plan: QuantizationPlan
    """the written file has these types"""


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
    divided the rows; only here llama.cpp uses another one without a warning."""
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
