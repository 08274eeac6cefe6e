"""A GGUF model as a file: its weights with their sizes and offsets, and its metadata.

Invariant: everything comes from the headers, after `find` has checked that the data of every weight
is inside its file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.find import checked_headers, read_headers
from llamacpp_instr.model.header import ArrayInfo, Header, Scalar
from llamacpp_instr.model.types import FILE_TYPES, GgmlType, type_of

_LAYER = re.compile(r"\b(?:blk|posnet|convnext)\.(\d+)\.")
# llama.cpp adds this to a file type that it guessed (LLAMA_FTYPE_GUESSED)
_GUESSED = 1024


def role_of(weight: str) -> str:
    """The name without the number of the layer and `.weight`: `attn_q`, `attn_q.bias`."""
    return _LAYER.sub("", weight).removesuffix(".weight")


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
        match = _LAYER.search(self.name)
        return int(match[1]) if match else -1

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
    """the file that contains it; of a split model, a part"""
    offset: int
    """bytes from the start of that file"""

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

    def check_has_weights(self) -> None:
        """Raise `UsageError` for a file with only a vocabulary."""
        if not self.weights:
            raise UsageError(
                f"{self.path} contains only a vocabulary, no weights; nothing can be run with it"
            )

    def hyper_parameter(self, name: str) -> Scalar | None:
        """The value of `ARCHITECTURE.name`, such as `block_count`, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")


def load_model_file(name: str | Path) -> ModelFile:
    """The model with this `name`: a path or `demo`; of a split model, the path of its first part.

    Raises `UsageError` for any error in a header. Accepts files with only a vocabulary, which have
    no weights.
    """
    return _model_of(*checked_headers(str(name)))


def load_any_file(name: str | Path) -> ModelFile:
    """Like `load_model_file`, but for every GGUF file that is not damaged, also if llama.cpp cannot
    load it as a model: an adapter, a projector, a file with unknown types. Those have no size."""
    return _model_of(*read_headers(str(name)))


def _model_of(path: Path, headers: dict[Path, Header]) -> ModelFile:
    weights = [
        Weight(info.name, type_of(info.type), info.ne, part, header.data_start + info.offset)
        for part, header in headers.items()
        for info in header.tensors
    ]
    return ModelFile(path, headers, weights)
