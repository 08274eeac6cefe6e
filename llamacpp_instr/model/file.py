"""A GGUF model as a file: finds the one that a user names, with its weights, their sizes and
offsets, and its metadata.

Invariant: everything comes from the headers. A file that is loaded is a regular GGUF file with all
its parts, and the data of its tensors is inside it and does not overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import begins_as_model, file_mode
from llamacpp_instr.model.header import ARRAY, ArrayInfo, Header, Scalar, quoted, read_header
from llamacpp_instr.model.types import FILE_TYPES, TYPES, GgmlType, type_of

DEMO = "demo"
"""the name of the demo model"""

_MAX_PARTS = 0xFFFF  # split.count has 16 bits
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
_LAYER = re.compile(r"\b(?:blk|posnet|convnext)\.(\d+)\.")
# llama.cpp adds this to a file type that it guessed (LLAMA_FTYPE_GUESSED)
_GUESSED = 1024


def role_of(weight: str) -> str:
    """The name without the number of the layer and `.weight`: `attn_q`, `attn_q.bias`,
    `attn_q.lora_a`."""
    return without_kind(_LAYER.sub("", weight))


def layer_of(weight: str) -> int:
    """The number of the layer in the name; -1 if it belongs to none."""
    match = _LAYER.search(weight)
    return int(match[1]) if match else -1


def without_kind(weight: str) -> str:
    """The name without `.weight`, which most weights have."""
    return weight.removesuffix(".weight").replace(".weight.lora_", ".lora_")


class NamedTensor:
    """What follows from the name and the shape of a tensor of a model."""

    name: str
    ne: tuple[int, ...]
    """in ggml's order: the length of a row first"""

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)

    @property
    def layer(self) -> int:
        """The number in its name; -1 if it belongs to no layer."""
        return layer_of(self.name)

    @property
    def role(self) -> str:
        """Its name without the number of the layer and `.weight`: `attn_q`, `attn_q.bias`."""
        return role_of(self.name)


@dataclass(frozen=True)
class Weight(NamedTensor):
    """A tensor of a model file."""

    name: str
    type: GgmlType
    ne: tuple[int, ...]
    path: Path
    """the file that contains it; a part if the model is split"""
    offset: int
    """bytes from the start of that file"""

    @property
    def row_length(self) -> int:
        """Elements of a row; 1 for a tensor without dimensions."""
        return self.ne[0] if self.ne else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.ne[1:])

    @property
    def n_bytes(self) -> int:
        return self.n_elements // self.type.block * self.type.block_bytes


@dataclass(frozen=True)
class ModelFile:
    """A model in one file or in several parts."""

    path: Path
    """the first part"""
    headers: Mapping[Path, Header]
    """by part, in order"""
    weights: list[Weight]
    """in the order of the file"""

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        """Scalars and strings of the first part, which has the metadata of the model."""
        return self.headers[self.path].metadata

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Offsets and lengths of the arrays in the metadata of the first part."""
        return self.headers[self.path].arrays

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def file_type(self) -> str | None:
        """llama-quantize's name of `general.file_type`; None if it is missing or unknown."""
        number = self.metadata.get("general.file_type")
        return FILE_TYPES.get(number & ~_GUESSED) if isinstance(number, int) else None

    @property
    def trained_tokens(self) -> int | None:
        """The context length that it was trained with, None if the file does not state it."""
        trained = self.hyper_parameter("context_length")
        return trained if isinstance(trained, int) and trained > 0 else None

    @cached_property
    def by_name(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.weights}

    @property
    def n_elements(self) -> int:
        return sum(weight.n_elements for weight in self.weights)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights, without headers and padding."""
        return sum(weight.n_bytes for weight in self.weights)

    @property
    def file_size(self) -> int:
        """Bytes of all parts."""
        return sum(header.file_size for header in self.headers.values())

    def check_has_weights(self, why: str = "; nothing can be run with it") -> None:
        """Raise `UsageError`, which ends with `why`, for a file with only a vocabulary."""
        if not self.weights:
            raise UsageError(f"{self.path} contains only a vocabulary, no weights{why}")

    def hyper_parameter(self, name: str) -> Scalar | None:
        """The value of `ARCHITECTURE.name`, such as `block_count`, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")


def load_model_file(name: str | Path) -> ModelFile:
    """The model with this `name`: a path or `demo`; for a split model, the path of its first part.

    Raises `UsageError` for any error in a header, and for files that llama.cpp would refuse, except
    those with only a vocabulary, which have no weights.
    """
    model = load_any_file(name)
    for part, header in model.headers.items():
        if (kind := kind_of(header)) != "model":
            what, use = _OTHER_KINDS.get(str(kind), ("not a complete model", ""))
            raise UsageError(
                f"{part} is {what}: its general.type is {quoted(kind)}; {use}"
                "`instr inspect` shows what is in it"
            )
        for obstacle in find_obstacles(header):
            raise UsageError(f"{part}: {obstacle}")
    return model


def load_any_file(name: str | Path) -> ModelFile:
    """Like `load_model_file`, but for every GGUF file that is not damaged, even if llama.cpp cannot
    load it as a model: an adapter, a projector, a file with unknown types, which have no size."""
    if not str(name):
        raise UsageError("no model is named: the path is empty")
    path = demo_model() if str(name) == DEMO else Path(name)
    _check_file(path)
    header = read_header(path)
    first, rest = _parts(path, header)
    if path != first:
        raise UsageError(f"{path} is a part of a split model; give the first part, {first}")
    model = ModelFile(path, {path: header} | {part: read_header(part) for part in rest}, [])
    owner: dict[str, Path] = {}
    for number, (part, header) in enumerate(model.headers.items()):
        if rest and header.metadata.get("split.no") != number:
            raise UsageError(
                f"{part} is not part {number + 1} of this model: its split.no is "
                f"{quoted(header.metadata.get('split.no'))}; fetch it again"
            )
        weights = [
            Weight(info.name, type_of(info.type), info.ne, part, header.data_start + info.offset)
            for info in header.tensors
        ]
        _check_places(weights, header.file_size)
        for weight in weights:
            if owner.setdefault(weight.name, part) != part:
                raise UsageError(
                    f"{part} is damaged: tensor {weight.name!r} is in {owner[weight.name].name} "
                    "too; fetch both again"
                )
        model.weights.extend(weights)
    return model


def is_imatrix(path: Path) -> bool:
    """Whether a file is an importance matrix: a GGUF file that says so, or another file named
    `.dat`. False if it cannot be read."""
    if not begins_as_model(path):
        return path.suffix == ".dat"
    return "imatrix.chunk_count" in read_header(path).metadata


def kind_of(header: Header) -> Scalar:
    """A `model`, or for example an `adapter` or a projector (`mmproj`)."""
    return header.metadata.get("general.type", "model")


def demo_model() -> Path:
    """The GGUF file of the demo model that ships with this package."""
    path = Path(str(resources.files("llamacpp_instr") / "data" / "demo.gguf"))
    if not path.is_file():
        raise UsageError(
            f"the demo model is missing from this installation ({path}); install the package again"
        )
    return path


def _check_file(path: Path) -> None:
    if file_mode(path) is None:
        raise UsageError(f"{path} does not exist; give a GGUF file, or `{DEMO}` for the demo model")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give the GGUF file in it")
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file; llama.cpp loads models from files only")


_OTHER_KINDS = {
    "adapter": ("a LoRA adapter, not a model", "`instr run MODEL --lora FILE` uses it, "),
    "mmproj": (
        "a multimodal projector, not a model",
        "`instr exec -- llama-server -m MODEL --mmproj FILE` uses it, ",
    ),
}


def find_obstacles(header: Header) -> Iterator[str]:
    """Why llama.cpp cannot load a file, although it is not damaged."""
    if "general.architecture" not in header.metadata and "split.no" not in header.metadata:
        yield "it does not name its architecture (no general.architecture)"
    for key, array in header.arrays.items():
        if array.type == ARRAY:
            yield f"{quoted(key)} is an array of arrays, which llama.cpp does not read"
    unknown = [tensor for tensor in header.tensors if tensor.type not in TYPES]
    if unknown:
        yield (
            f"tensor {unknown[0].name!r} has the storage type {unknown[0].type}, which this "
            "llama.cpp does not know or no longer has; convert the model for it"
        )
        return
    expected = 0
    for tensor in header.tensors:
        if tensor.offset != expected:
            yield (
                f"tensor {tensor.name!r} begins {tensor.offset:,} bytes into the data, where "
                f"llama.cpp expects {expected:,}; it loads no file with gaps between tensors or "
                "with their data in another order: convert the model again"
            )
            return
        type_ = TYPES[tensor.type]
        end = expected + math.prod(tensor.ne) // type_.block * type_.block_bytes
        expected = -(-end // header.alignment) * header.alignment


def _parts(path: Path, header: Header) -> tuple[Path, list[Path]]:
    """The first part and the others, which must exist; named as in `llama_split_path`."""
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise UsageError(f"{path} is damaged: its split.count is {quoted(count)}; fetch it again")
    if count < 2:
        return path, []
    match = _SPLIT_NAME.match(path.name)
    if not match or int(match["count"]) != count:
        raise UsageError(
            f"{path} is part of a model split into {count} files, which llama.cpp finds by their "
            f"names only; name it NAME-00001-of-{count:05d}.gguf"
        )
    parts = [
        path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)
    ]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise UsageError(
            f"{path}: {len(missing)} of the model's {count} parts missing, first {missing[0].name}"
        )
    return parts[0], parts[1:]


def _check_places(weights: list[Weight], file_size: int) -> None:
    """Check that every tensor of a file has whole blocks, inside the file and without overlaps."""
    end_before, before = 0, ""
    for weight in sorted(weights, key=lambda weight: weight.offset):
        what = f"{weight.path} is damaged: tensor {weight.name!r}"
        if weight.row_length % weight.type.block:
            raise UsageError(
                f"{what} has rows of {weight.row_length} elements, which are not divisible "
                f"into blocks of {weight.type.block} ({weight.type}); fetch it again"
            )
        end = weight.offset + weight.n_bytes
        if end > file_size:
            raise UsageError(
                f"{weight.path} is truncated: the data of tensor {weight.name!r} ends at byte "
                f"{end:,}, the file has {file_size:,}; fetch it again"
            )
        if weight.offset < end_before:
            raise UsageError(f"{what} overlaps {before!r}; fetch it again")
        if end > weight.offset:
            end_before, before = end, weight.name
