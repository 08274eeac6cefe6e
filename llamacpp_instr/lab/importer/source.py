"""Recognizes a folder with a model that can be imported, and checks its files.

Invariant: a check that fails raises one line that says what is wrong, where, and what to do. No
check needs PyTorch, and none reads weights.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.base.output import begins_as_model, check_not_input
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.model.hyper_parameters import MAX_EXPERTS, MAX_LAYERS

INDEX = "model.safetensors.index.json"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)")
_MOST = {
    **dict.fromkeys(["layer", "layers"], MAX_LAYERS),
    "experts": MAX_EXPERTS,
    **dict.fromkeys(["size", "dim", "heads"], 1 << 24),
}
"""what a configuration can say, by the last word of a key. Real sizes are below 300,000"""
_CONSOLIDATED = re.compile(r"consolidated\.(\d+)\.pth")


class Kind(Enum):
    """Formats that can be imported."""

    HUGGING_FACE = "a Hugging Face model"
    META = "a model in Meta's own layout"
    LORA = "a LoRA adapter"


@dataclass(frozen=True)
class Source:
    """A folder whose files are complete, as far as their names and headers show."""

    path: Path
    kind: Kind
    weights: Sequence[Path]
    """the files with weights, in the order of their names"""
    base: Path | None = None
    """of an adapter: the folder with the configuration of its base model"""

    def check_output(self, output: Path) -> None:
        """Raises UsageError if `output` is a file of the source."""
        check_not_input(output, *self.path.iterdir())


def open_source(path: Path, base: Path | None = None) -> Source:
    """The model in the folder `path`; `base` is the folder of an adapter's base model.

    Raises UsageError if the folder has no model that can be imported, or if files are missing or
    damaged.
    """
    check_is_folder(path)
    kind = recognize(path)
    if base is not None and kind is not Kind.LORA:
        raise UsageError(f"{path} is {kind.value}; --base is for LoRA adapters")
    config = path / ("params.json" if kind is Kind.META else "config.json")
    if kind is Kind.LORA:
        weights, base = _adapter_weights(path), _base_of(path, base)
        config = base / "config.json"
    else:
        weights = _shards(path) if kind is Kind.META else _hugging_face_weights(path)
    for file in weights:
        _check_format(file)
    _check_counts(config)
    return Source(path, kind, weights, base)


def check_is_folder(path: Path) -> None:
    """Raises UsageError if `path` is not a folder."""
    if path.is_dir():
        return
    if begins_as_model(path):
        raise UsageError(f"{path} is a GGUF model already")
    if path.exists():
        raise UsageError(f"{path} is a file; name the folder of the model")
    raise UsageError(f"{path} does not exist")


def recognize(path: Path) -> Kind:
    """The format of a folder. Raises UsageError if it cannot be imported."""
    if (path / "adapter_config.json").is_file():
        return Kind.LORA
    is_meta = (path / "params.json").is_file() and any(path.glob("consolidated.*.pth"))
    if (path / "config.json").is_file() and not (is_meta and not _has_weights(path)):
        return Kind.HUGGING_FACE
    if is_meta:
        return Kind.META
    if (path / "params.json").is_file() and any(path.glob("consolidated*.safetensors")):
        raise UsageError(
            f"{path} has Mistral's own layout, which cannot be imported; "
            "import the Hugging Face folder of the model"
        )
    raise UsageError(
        f"{path} is not a model: it has no config.json (Hugging Face), no params.json with "
        "consolidated.*.pth (Meta) and no adapter_config.json (LoRA)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UsageError if it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged: it is not a JSON object")
    return found


def _has_weights(path: Path) -> bool:
    """Whether the folder has weights in a file that the converter reads."""
    return any((path / name).is_file() for name in (INDEX, _PICKLED_INDEX)) or any(
        any(path.glob(pattern)) for pattern in ("model*.safetensors", "pytorch_model*.bin")
    )


def _hugging_face_weights(path: Path) -> list[Path]:
    """The files with weights, complete according to the index or to their numbers."""
    for index, pattern in ((INDEX, "model*.safetensors"), (_PICKLED_INDEX, "pytorch_model*.bin")):
        indexed = _indexed(path / index) if (path / index).is_file() else {}
        names = indexed or {file.name: set() for file in path.glob(pattern)}
        if not names:
            continue
        _check_complete(path, names)
        files = [path / name for name in sorted(names)]
        for file in files:
            if file.suffix == ".safetensors":
                _check_safetensors(file, names[file.name])
        return files
    raise UsageError(
        f"{path} has no weights: no model.safetensors, no {INDEX} and no pytorch_model.bin"
    )


def _indexed(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file of an index. Raises UsageError if it is damaged."""
    weight_map = read_json(index).get("weight_map")
    files: dict[str, set[str]] = {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} is damaged: it has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(f"{index} is damaged: {name!r} is not the name of a file beside it")
        files.setdefault(name, set()).add(tensor)
    return files


def _check_complete(path: Path, names: dict[str, set[str]]) -> None:
    """Raises UsageError if a file is missing, by the index or by the numbers in the names."""
    wanted = set(names)
    for name in names:
        if part := _PART.fullmatch(name):
            digits, count = len(part["number"]), int(part["count"])
            if count > 10_000:
                raise UsageError(f"{path / name}: so many parts cannot be")
            wanted |= {
                f"{part['stem']}-{number:0{digits}}-of-{part['count']}{part['suffix']}"
                for number in range(1, count + 1)
            }
    missing = sorted(name for name in wanted if not (path / name).is_file())
    if missing:
        raise UsageError(
            f"{path}: {len(missing)} of {len(wanted)} files with weights "
            f"{'is' if len(missing) == 1 else 'are'} missing: {first_names(missing)}"
        )


def _check_safetensors(file: Path, wanted: set[str]) -> None:
    """Raises UsageError if the header is damaged, does not fit the file's size, or lacks one of
    the tensors `wanted`."""
    need("hf", "safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is damaged: {reason(error)}") from None
    lacking = sorted(wanted - found)
    if lacking:
        raise UsageError(f"{file} lacks tensors that the index has there: {first_names(lacking)}")


def _shards(path: Path) -> list[Path]:
    """The model-parallel shards of Meta's layout; a gap in their numbers is an error."""
    numbers = {
        int(match[1]): file
        for file in path.glob("consolidated.*.pth")
        if (match := _CONSOLIDATED.fullmatch(file.name))
    }
    gap = next(n for n in itertools.count() if n not in numbers)
    if gap < len(numbers):
        raise UsageError(f"{path}: shards are missing, the first is consolidated.{gap:02}.pth")
    if not (path / "tokenizer.model").is_file():
        raise UsageError(
            f"{path} has no tokenizer.model; copy it there: Meta keeps it in the folder or above it"
        )
    return [numbers[number] for number in sorted(numbers)]


def _adapter_weights(path: Path) -> list[Path]:
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        file = path / name
        if file.is_file():
            if file.suffix == ".safetensors":
                _check_safetensors(file, set())
            return [file]
    raise UsageError(f"{path} has no weights: no adapter_model.safetensors, no adapter_model.bin")


def _check_format(file: Path) -> None:
    """Raises UsageError for a pickle that is no zip archive, whose tensors cannot be mapped."""
    if file.suffix == ".safetensors":
        return
    with file.open("rb") as opened:
        if opened.read(1) == b"\x80":  # the start of a pickle
            raise UsageError(
                f"{file} has the format of PyTorch before 1.6, which cannot be mapped; save it "
                f"again: torch.save(torch.load({file.name!r}, weights_only=True), {file.name!r})"
            )


def _check_counts(config: Path) -> None:
    """Raises UsageError for a number up to which the converter would count without end."""
    parts = [read_json(config)]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            most = _MOST.get(key.rpartition("_")[2])
            if most is not None and isinstance(value, int) and value > most:
                raise UsageError(f"{config}: {key} is {value:,}; it can be at most {most:,}")


def _base_of(path: Path, base: Path | None) -> Path:
    """The folder of the base model's configuration: `base`, or the one that the adapter names."""
    named = read_json(path / "adapter_config.json").get("base_model_name_or_path")
    if base is None:
        if not isinstance(named, str) or not Path(named).is_dir():
            reason = f"its base model is {named}" if named else "it does not name its base model"
            cure = "name the folder with its config.json: --base FOLDER"
            raise UsageError(f"{path}: {reason}; {cure}")
        base = Path(named)
    if not (base / "config.json").is_file():
        raise UsageError(f"{base} has no config.json, which the adapter's base model must have")
    return base
