"""Finds the model that a user names, and refuses files that are damaged or that llama.cpp cannot
load.

A file that passes is a regular GGUF file with all its parts, and the data of its tensors does not
overlap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.model.header import ARRAY, Header, Scalar, TensorInfo, quoted, read_header
from llamacpp_instr.model.types import TYPES, type_of

DEMO = "demo"
"""the name of the demo model"""

_MAX_PARTS = 0xFFFF  # split.count has 16 bits
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


def checked_headers(name: str) -> tuple[Path, dict[Path, Header]]:
    """The model with this `name` and the headers of its parts, in order.

    Raises `UsageError` for files that llama.cpp would refuse, except those without weights.
    """
    path, headers = read_headers(name)
    for part, header in headers.items():
        if (kind := kind_of(header)) != "model":
            raise UsageError(
                f"{part} is not a complete model: its general.type is {quoted(kind)}; "
                "`instr inspect` shows what is in it"
            )
        for obstacle in find_obstacles(header):
            raise UsageError(f"{part}: {obstacle}")
    return path, headers


def kind_of(header: Header) -> Scalar:
    """A `model`, or for example an `adapter` or a projector (`mmproj`)."""
    return header.metadata.get("general.type", "model")


def read_headers(name: str) -> tuple[Path, dict[Path, Header]]:
    """Like `checked_headers`, but for every GGUF file that is not damaged."""
    if not name:
        raise UsageError("no model is named: the path is empty")
    path = demo_model() if name == DEMO else Path(name)
    _check_file(path)
    header = read_header(path)
    first, rest = _parts(path, header)
    if path != first:
        raise UsageError(f"{path} is a part of a split model; give the first part, {first}")
    headers = {path: header} | {part: read_header(part) for part in rest}
    owner: dict[str, Path] = {}
    for number, (part, part_header) in enumerate(headers.items()):
        if len(headers) > 1 and part_header.metadata.get("split.no") != number:
            raise UsageError(
                f"{part} is not part {number + 1} of this model: its split.no is "
                f"{quoted(part_header.metadata.get('split.no'))}; fetch it again"
            )
        _check_tensors(part, part_header)
        for tensor in part_header.tensors:
            if owner.setdefault(tensor.name, part) != part:
                raise UsageError(
                    f"{part} is damaged: tensor {tensor.name!r} is in {owner[tensor.name].name} "
                    "too; fetch both again"
                )
    return path, headers


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


def find_obstacles(header: Header) -> Iterator[str]:
    """Why llama.cpp cannot load a file, although it is not damaged."""
    if "general.architecture" not in header.metadata and "split.no" not in header.metadata:
        yield "it does not say its architecture (no general.architecture)"
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
        end = expected + _n_bytes(tensor)
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


def _check_tensors(path: Path, header: Header) -> None:
    """Check that every tensor has whole blocks, and its own bytes in the file."""
    end_before, before = 0, ""
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        what = f"{path} is damaged: tensor {tensor.name!r}"
        type_ = type_of(tensor.type)
        row = tensor.ne[0] if tensor.ne else 1
        if row % type_.block:
            raise UsageError(
                f"{what} has rows of {row} elements, which are not divisible into blocks of "
                f"{type_.block} ({type_}); fetch it again"
            )
        end = tensor.offset + _n_bytes(tensor)
        if header.data_start + end > header.file_size:
            raise UsageError(
                f"{path} is truncated: the data of tensor {tensor.name!r} ends at byte "
                f"{header.data_start + end:,}, the file has {header.file_size:,}; fetch it again"
            )
        if tensor.offset < end_before:
            raise UsageError(f"{what} overlaps {before!r}; fetch it again")
        if end > tensor.offset:
            end_before, before = end, tensor.name


def _n_bytes(tensor: TensorInfo) -> int:
    type_ = type_of(tensor.type)
    return math.prod(tensor.ne) // type_.block * type_.block_bytes
