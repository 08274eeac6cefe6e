"""Recognizes a folder with a model that can be imported, checks its files, and imports it with
llama.cpp's own converter in a child process.

Invariants: what is visibly wrong is refused before the child starts, in one line that says what is
wrong, where, and what to do; no check needs PyTorch or reads weights. The file gets its
name once it is complete. Nothing that happens to the child ends this process.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.base.output import (
    begins_as_model,
    check_model_output,
    check_not_input,
    new_model,
)
from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import OnProgress, first_names, progress_bar
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import (
    VENDORED,
    fetch_sdist,
    patches_dir,
    read_upstream,
    unpack_pinned,
)
from llamacpp_instr.llama.build.wheel import own_cache
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.hyper_parameters import MAX_EXPERTS, MAX_LAYERS

INDEX = "model.safetensors.index.json"
_LAYOUTS = (
    (INDEX, "model*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
)
"""the indexes of weights in a Hugging Face folder, and the files themselves"""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)")
_MOST = {
    **dict.fromkeys(["layer", "layers"], MAX_LAYERS),
    "experts": MAX_EXPERTS,
    **dict.fromkeys(["size", "dim", "heads"], 1 << 24),
}
"""the maximum in a configuration, by the last word of a key. Real sizes are below 300,000"""
_CONSOLIDATED = re.compile(r"consolidated\.(\d+)\.pth")
LORA_SCRIPT = "convert_lora_to_gguf.py"
_PARTS = ("conversion", "gguf-py", LORA_SCRIPT)
"""what is kept: the converter's classes, the gguf that they need, the script for adapters"""


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
    if not path.is_dir():
        problem = "is a file; name the folder of the model" if path.exists() else "does not exist"
        if begins_as_model(path):
            problem = "is a GGUF model already"
        raise UsageError(f"{path} {problem}")
    kind = _recognize(path)
    if base is not None and kind is not Kind.LORA:
        raise UsageError(f"{path} is {kind.value}; --base is for LoRA adapters")
    find = {Kind.META: _shards, Kind.LORA: _adapter_weights}.get(kind, _hugging_face_weights)
    weights = find(path)
    for file, tensors in weights.items():
        _check_file(file, tensors)
    config = path / ("params.json" if kind is Kind.META else "config.json")
    if kind is Kind.LORA:
        base = _base_of(path, base)
        config = base / "config.json"
    _check_counts(config)
    return Source(path, kind, list(weights), base)


def _recognize(path: Path) -> Kind:
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
    return any((path / index).is_file() or any(path.glob(of)) for index, of in _LAYOUTS)


def _hugging_face_weights(path: Path) -> dict[Path, set[str]]:
    """The files with weights, complete according to the index or to their numbers, and the tensors
    that the index places in them."""
    for index, pattern in _LAYOUTS:
        indexed = _indexed(path / index) if (path / index).is_file() else {}
        names = indexed or {file.name: set() for file in path.glob(pattern)}
        if names:
            _check_complete(path, names)
            return {path / name: names[name] for name in sorted(names)}
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
                raise UsageError(f"{path / name}: {count:,} parts are too many")
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


def _check_file(file: Path, wanted: set[str]) -> None:
    """Raises UsageError if the header of a safetensors is damaged, does not fit the file's size, or
    lacks one of the tensors `wanted`; for a pickle that is not a zip archive, because its tensors
    cannot be mapped."""
    if file.suffix != ".safetensors":
        with file.open("rb") as opened:
            if opened.read(1) == b"\x80":  # the start of a pickle
                raise UsageError(
                    f"{file} has the format of PyTorch before 1.6, which cannot be mapped; save it "
                    f"again: torch.save(torch.load({file.name!r}, weights_only=True), "
                    f"{file.name!r})"
                )
        return
    need("hf", "safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as tensors:
            found = set(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is damaged: {reason(error)}") from None
    if lacking := sorted(wanted - found):
        raise UsageError(f"{file} lacks tensors that the index lists: {first_names(lacking)}")


def _shards(path: Path) -> dict[Path, set[str]]:
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
    return {numbers[number]: set() for number in sorted(numbers)}


def _adapter_weights(path: Path) -> dict[Path, set[str]]:
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (file := path / name).is_file():
            return {file: set()}
    raise UsageError(f"{path} has no weights: no adapter_model.safetensors, no adapter_model.bin")


def _check_counts(config: Path) -> None:
    """Raises UsageError for a number so large that the converter would count endlessly."""
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


def find_converter() -> Path:
    """The folder with llama.cpp's own converter, from the pinned sdist, which is fetched, checked
    and unpacked if the cache does not have it.

    Raises BuildError if the sdist cannot be fetched, is not the pinned one, or has no converter.
    """
    patches, cache = patches_dir(), own_cache()
    kept = cache / "converters" / read_upstream(patches).sha256[:12]
    if kept.is_dir():
        return kept
    log = BuildLog(cache / "logs" / "converter.log")
    sdist = fetch_sdist(patches, cache, log)
    with temporary_directory("converter-", kept.parent) as directory:
        tree = unpack_pinned(sdist, directory, patches, only=_is_of_converter) / VENDORED
        try:
            tree.replace(kept)
        except OSError:
            if not kept.is_dir():  # otherwise another process was faster
                raise
    return kept


def _is_of_converter(path: PurePosixPath) -> bool:
    """Whether a member of the sdist belongs to the converter."""
    inside = path.parts[1 + len(VENDORED.parts) :]
    return path.parts[1:3] == VENDORED.parts and bool(inside) and inside[0] in _PARTS


def import_model(
    source: Source,
    output: Path,
    type_: str | None = None,
    *,
    force: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> ModelFile | None:
    """Write the model or adapter of `source` to `output`; returns the model, None for an adapter.

    `type_` is F16, BF16, F32 or Q8_0; None means BF16 if the weights are BF16, else F16, and for
    an adapter F32. `on_progress` gets bytes. Raises UsageError for what cannot be imported,
    BuildError if the converter cannot be fetched, InstrError if it fails.
    """
    need("hf")
    check_model_output(output, force)
    converter = find_converter()
    with new_model(output, force) as temporary, temporary_directory("instr-import-") as staging:
        request = {
            "kind": source.kind.name,
            "source": str(source.path),
            "weights": [str(file) for file in source.weights],
            "base": str(source.base),
            "type": type_,
            "output": str(temporary),
            "staging": str(staging),
            "converter": str(converter),
        }
        log = own_cache() / "logs" / f"import-{source.path.resolve().name}.log"
        try:
            with Child(f"{__package__}.worker", log) as child:
                child.ask(request, on_progress)
        except ChildFailed as failed:
            raise _failure(source, log, failed) from None
        except ChildDied as died:
            raise InstrError(
                f"{source.path}: llama.cpp's converter died {died}; its log is {log}"
            ) from None
        if source.kind is Kind.LORA:
            return None
        try:
            return load_model_file(temporary)
        except UsageError as error:
            raise InstrError(f"llama.cpp's converter wrote an incomplete model: {error}") from None


def _failure(source: Source, log: Path, failed: ChildFailed) -> InstrError:
    """The error for an exception of the converter: nearly always the folder is the cause."""
    if failed.number == errno.ENOSPC:
        return InstrError(f"{source.path}: the disk is full")
    if "pre-tokenizer was not recognized" in failed.text:
        return UsageError(
            f"{source.path}: llama.cpp's converter does not know this tokenizer (its BPE "
            "pre-tokenizer has an unknown hash)"
        )
    return UsageError(f"{source.path} cannot be imported: {failed}; the converter's log is {log}")


def imported(folder: Path, notice: Callable[[str], None]) -> Path:
    """The GGUF file of the model in `folder`, imported unless the cache has it, so that a folder
    can be run; `notice` gets one line about it.

    A file of the cache belongs to one state of its folder: the names, sizes and times of the files
    there, and the converter. When the folder changes it is imported again, which replaces the file.
    Raises the errors of `open_source` and `import_model`, and UsageError for an adapter.
    """
    source = open_source(folder)
    if source.kind is Kind.LORA:
        raise UsageError(f"{folder} is a LoRA adapter; name the folder of a model")
    place = own_cache() / "imports" / _digest(str(folder.resolve()))
    kept = place / f"{_state(folder)}.gguf"
    if kept.is_file():
        notice(f"model: {kept}, imported earlier from {folder}")
        return kept
    need("hf")
    place.mkdir(exist_ok=True)
    notice(f"importing {folder} into the cache: {kept}")
    with progress_bar(f"Importing {folder.name}") as on_progress:
        import_model(source, kept, force=True, on_progress=on_progress)
    for other in place.glob("*.gguf"):
        if other != kept:
            other.unlink(missing_ok=True)
    return kept


def _state(folder: Path) -> str:
    """A digest of what the imported file depends on; weights are not read."""
    lines = [read_upstream(patches_dir()).sha256]
    for file in sorted(folder.iterdir()):
        if file.is_file():
            found = file.stat()
            lines.append(f"{file.name}\0{found.st_size}\0{found.st_mtime_ns}")
    return _digest("\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
