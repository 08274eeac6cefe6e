"""Writes tensors of a model as arrays: NumPy's .npz or safetensors.

Invariant: memory is bounded: tensors are written piece by piece, or mapped from a file beside the
output. Arrays have the row last, as in gguf-py: the shape of ggml, reversed.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.weights.measure import WeightReader, raw_shape
from llamacpp_instr.model.file import Weight

SUFFIXES = (".npz", ".safetensors")
METADATA = "__metadata__"
"""the array of an .npz that has, as JSON, what safetensors has in its header"""


def is_export(path: str) -> bool:
    """Whether the suffix of an output is that of a file of arrays."""
    return PurePath(path).suffix.lower() in SUFFIXES


def check_export(path: str, reader: WeightReader, weights: Sequence[Weight], raw: bool) -> None:
    """Raises `UsageError` if safetensors is needed and not installed, if a tensor has a name that
    the file cannot have, or, unless `raw`, a type that cannot be converted to numbers."""
    if not path.lower().endswith(".npz"):
        need("tensors")
    for weight in weights:
        if weight.name == METADATA:
            raise UsageError(f"{weight.path}: no array can have the name {METADATA!r}")
        if not raw:
            reader.check(weight)


def write_npz(
    file: BinaryIO,
    reader: WeightReader,
    weights: Sequence[Weight],
    raw: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> None:
    """Writes tensors as float32 or, if `raw`, their stored bytes as uint8 (rows, bytes of a row).
    `__metadata__` has each one's type and shape. Progress is in bytes of the model."""
    done, total = 0, sum(weight.n_bytes for weight in weights)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for weight in weights:
            shape = raw_shape(weight) if raw else weight.ne[::-1]
            # a fixed date: equal models give equal files
            with archive.open(zipfile.ZipInfo(f"{weight.name}.npy"), "w", force_zip64=True) as out:
                np.lib.format.write_array_header_1_0(
                    out, {"descr": "|u1" if raw else "<f4", "fortran_order": False, "shape": shape}
                )
                for part in reader.bytes(weight) if raw else reader.pieces(weight):
                    out.write(part.data)
                    done += weight.type.row_bytes(part.size) if not raw else part.size
                    on_progress(done, total)
        with archive.open(zipfile.ZipInfo(f"{METADATA}.npy"), "w") as out:
            np.lib.format.write_array(out, np.array(_metadata(weights)))


def write_safetensors(
    path: Path,
    reader: WeightReader,
    weights: Sequence[Weight],
    raw: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> None:
    """Writes to the existing file `path` what `write_npz` writes; the header has the metadata as
    `tensors`. As float32, tensors need the same room again in a temporary file beside it. Raises
    `InstrError` if safetensors raises an error."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays: dict[str, npt.NDArray[Any]] = {}
    with tempfile.TemporaryFile(dir=path.parent) as scratch:
        done, total = 0, sum(weight.n_bytes for weight in weights)
        for weight in weights:
            if raw:
                arrays[weight.name] = reader.raw(weight)
                continue
            begin = scratch.tell()
            for part in reader.pieces(weight):
                scratch.write(part.data)
                done += weight.type.row_bytes(part.size)
                on_progress(done, total)
            shape = weight.ne[::-1]
            if not weight.n_elements:
                arrays[weight.name] = np.empty(shape, np.float32)
                continue
            scratch.flush()
            arrays[weight.name] = np.memmap(scratch, np.float32, "r", begin, shape)
        mode = path.stat().st_mode
        try:
            # one key: the order of several would be random
            save_file(arrays, path, {"tensors": _metadata(weights)})
        except SafetensorError as error:
            raise InstrError(f"safetensors cannot write these tensors: {error}") from None
        path.chmod(mode)  # it puts another file there, which only its owner can read


def _metadata(weights: Sequence[Weight]) -> str:
    """JSON, by name: the stored type and the shape, in ggml's order."""
    return json.dumps({of.name: {"type": of.type.name, "ne": list(of.ne)} for of in weights})
