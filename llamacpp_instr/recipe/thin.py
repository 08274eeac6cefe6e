"""A model with some of the rows of its large matrices: quantizing it shows the errors of the whole
model in a fraction of the time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import ModelFile, Weight, load_model_file
from llamacpp_instr.prediction.steps import start_of_model

ENOUGH = 1 << 18
"""elements of a matrix: the error of a thousand blocks of 256 is near that of all"""


def kept_rows(weight: Weight) -> int:
    """The rows kept of each matrix: all if it has fewer than twice ENOUGH elements."""
    rows = weight.ne[1] if len(weight.ne) > 1 else 1
    return -(-rows // max(weight.row_length * rows // ENOUGH, 1))


def write_thinned(source: ModelFile, folder: Path) -> ModelFile:
    """The model with `kept_rows` random rows of each matrix, the same for each expert. Its files,
    named like the source's, are in `folder`, which is created."""
    folder.mkdir()
    reader = WeightReader(source)
    for path, header in source.headers.items():
        own = [weight for weight in source.weights if weight.path == path]
        shapes = [(*of.ne[:1], *([kept_rows(of)] if of.ne[1:] else []), *of.ne[2:]) for of in own]
        sizes = [
            of.type.row_bytes(of.row_length) * int(np.prod(ne[1:]))
            for of, ne in zip(own, shapes, strict=True)
        ]
        infos = zip([of.name for of in own], shapes, [of.type for of in own], sizes, strict=True)
        start, _ = start_of_model(path, header, infos)
        with (folder / path.name).open("wb") as file:
            file.write(start)
            for weight, size in zip(own, sizes, strict=True):
                file.write(_rows(reader, weight))
                file.write(bytes(-size % header.alignment))
    return load_model_file(folder / source.path.name)


def _rows(reader: WeightReader, weight: Weight) -> bytes:
    stored = reader.raw(weight)
    rows, kept = weight.ne[1] if weight.ne[1:] else 1, kept_rows(weight)
    if kept == rows:
        return stored.tobytes()
    # not every n-th row, which could be at the same place in each head
    chosen = np.sort(np.random.default_rng(0).choice(rows, kept, replace=False))
    return stored.reshape(-1, rows, stored.shape[1])[:, chosen].tobytes()
