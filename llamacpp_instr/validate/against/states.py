"""The states that two implementations of a model have in common, in the order of their compute.

A state is a matrix in float32 with a row for each token. Those of llama.cpp and of transformers
have the same names: `embeddings`, `layer 0`, ..., `final norm`, `logits`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

EMBEDDINGS = "embeddings"
FINAL_NORM = "final norm"
LOGITS = "logits"


def layer(number: int) -> str:
    """The state after a layer."""
    return f"layer {number}"
