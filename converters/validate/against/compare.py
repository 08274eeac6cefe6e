"""The states that two implementations of a model have in common, beside each other.

A state is a matrix in float32 with a row for each token. Those of llama.cpp and of transformers
have the same names, in the order of the compute: `embeddings`, `layer 0`, ..., `final norm`,
`logits`. Invariant: pure functions of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import GgmlType

Array = npt.NDArray[np.float32]

EMBEDDINGS = "embeddings"
FINAL_NORM = "final norm"
LOGITS = "logits"

OF_F32 = 1e-3
"""the largest relative error with weights in F32, where only the order of sums differs"""
_STEPS, _LARGEST = 16, 0.5
_SIGNIFICANT_BITS = {"F16": 11, "BF16": 8}


def layer(number: int) -> str:
    """The state after a layer."""
    return f"layer {number}"


@dataclass(frozen=True)
class Compared:
    """One state of both implementations."""

    state: str
    node: str
    """of llama.cpp's graph"""
    error: float
    """relative: the norm of the difference, divided by that of transformers' values"""
    cosine: float
    """the lowest of a token"""
    token: int
    """the place of the token with the largest relative error, from 0"""


@dataclass(frozen=True)
class Comparison:
    """All states, in the order of the compute."""

    states: list[Compared]
    n_tokens: int
    same_top: int
    """tokens after which both find the same next token most probable"""


def compare(
    ours: Mapping[str, Array], theirs: Mapping[str, Array], nodes: Mapping[str, str]
) -> Comparison:
    """The states that both have; `nodes` names llama.cpp's node of each."""
    states = [
        _compared(name, nodes[name], values, theirs[name])
        for name, values in ours.items()
        if name in theirs
    ]
    tops = [np.nan_to_num(logits).argmax(axis=1) for logits in (ours[LOGITS], theirs[LOGITS])]
    return Comparison(states, len(tops[0]), int((tops[0] == tops[1]).sum()))


def _compared(state: str, node: str, ours: Array, theirs: Array) -> Compared:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_tokens = _finite(np.linalg.norm(a - b, axis=1) / norms)
        cosines = np.nan_to_num((a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * norms))
        error = _finite(np.linalg.norm(a - b) / np.linalg.norm(b))
    return Compared(state, node, float(error), float(cosines.min()), int(of_tokens.argmax()))


def _finite(errors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Errors with infinity where a value is not a number."""
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf)


def default_bound(file: ModelFile) -> tuple[float, GgmlType]:
    """The largest relative error that the weights' own rounding explains, and the coarsest type
    among those of matrices, which decides it.

    OF_F32 for F32. Else 16 times the distance of two neighboring numbers of the type, 2^-bits, but
    at most 0.5: F16 has 11 significant bits, BF16 has 8, a quantized type as many as a weight
    takes. 16, because the errors of layers add up: random models of two to six layers reach 1.5 to
    15 times that distance.
    """
    types = [weight.type for weight in file.weights if len(weight.ne) > 1]
    coarsest = min(types, key=_bits)
    if coarsest.name == "F32":
        return OF_F32, coarsest
    return min(_LARGEST, _STEPS * 2.0 ** -_bits(coarsest)), coarsest


def _bits(type_: GgmlType) -> int:
    return _SIGNIFICANT_BITS.get(type_.name, int(type_.bits_per_weight))
