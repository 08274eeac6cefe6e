"""Finds the model that a user names and refuses, with the reason, what llama.cpp could not load.

What passes is a regular GGUF file, all its parts there, with every tensor's bytes inside its file.
"""

from __future__ import annotations

import math
import re
from importlib import resources
from pathlib import Path

from .errors import UsageError
from .gguf_header import Header, TensorInfo, read_header

DEMO = "demo"
"""The name that stands for the demo model."""

_MAX_PARTS = 0xFFFF  # split.count has 16 bits
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


def resolve_model(name: str) -> Path:
    """The GGUF file that `name` stands for: a path, or `demo`; of a split model the first part.

    Raises `UsageError` in one line for everything that can be told without loading the model.
    """
    path = demo_model() if name == DEMO else Path(name)
    _check_file(path)
    header = read_header(path)
    _check_is_model(path, header)
    first, rest = _parts(path, header)
    if path != first:
        raise UsageError(f"{path} is a part of a split model; give the first part, {first}")
    headers = {path: header} | {part: read_header(part) for part in rest}
    if not any(part.tensors for part in headers.values()):
        raise UsageError(f"{path} holds only a vocabulary, no weights; nothing can be run with it")
    for part, part_header in headers.items():
        _check_extents(part, part_header)
    return path


def demo_model() -> Path:
    """The GGUF file of the demo model that ships with this package."""
    path = Path(str(resources.files(__package__) / "data" / "demo.gguf"))
    if not path.is_file():
        raise UsageError(
            f"the demo model is missing from this installation ({path}); install the package again"
        )
    return path


def _check_file(path: Path) -> None:
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    if not exists:
        raise UsageError(f"{path} does not exist; give a GGUF file, or `{DEMO}` for the demo model")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give the GGUF file in it")
    if not path.is_file():
        raise UsageError(f"{path} is no regular file; llama.cpp loads models from files only")


def _check_is_model(path: Path, header: Header) -> None:
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UsageError(f"{path} is no model of its own: its general.type is {kind!r}")
    if "general.architecture" not in header.metadata and "split.no" not in header.metadata:
        raise UsageError(f"{path} does not say its architecture (no general.architecture)")


def _parts(path: Path, header: Header) -> tuple[Path, list[Path]]:
    """The first part and the others, all there; the names are those of `llama_split_path`."""
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise UsageError(f"{path} is damaged: its split.count is {count!r}; fetch it again")
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


def _check_extents(path: Path, header: Header) -> None:
    for tensor in header.tensors:
        end = header.data_start + tensor.offset + tensor_bytes(tensor)
        if end > header.file_size:
            raise UsageError(
                f"{path} is truncated: the data of tensor {tensor.name!r} ends at byte {end:,}, "
                f"the file has {header.file_size:,}; fetch it again"
            )


def tensor_bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor's data; 0 for a type that gguf-py does not know."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError):
        return 0
    return math.prod(tensor.ne) // block * block_bytes
