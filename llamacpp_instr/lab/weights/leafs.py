"""The weights of a model file, as the leafs of a graph name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.log.schema import Leaf
from llamacpp_instr.model.file import ModelFile


class LeafWeights:
    """The weights of a model file."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._reader = WeightReader(model)

    def check(self, leaf: Leaf) -> None:
        """Raises `UsageError` for a weight that the file does not have in this shape."""
        weight = self._model.by_name.get(leaf.name)
        if weight is None or [n for n in weight.ne if n > 1] != [n for n in leaf.ne if n > 1]:
            raise UsageError(f"{self._model.path} has no tensor {leaf.name!r} of this shape")
        self._reader.check(weight)

    def pieces(self, leaf: Leaf) -> Iterator[NDArray[Any]]:
        """The weight in stored order: float16 if it is of type F16, else float32."""
        weight = self._model.by_name[leaf.name]
        if leaf.type == "f16":
            return (piece.view("<f2") for piece in self._reader.bytes(weight))
        return self._reader.pieces(weight)
