"""What llama.cpp and transformers compute of the same tokens, and how far they are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp import LLAMA_POOLING_TYPE_NONE, Llama
from numpy.typing import NDArray

F32 = 0  # GGML_TYPE_F32: the cache keeps what was computed

Values = NDArray[np.float32]


def opened(path: Path, **options: Any) -> Any:
    return Llama(
        str(path), n_ctx=256, n_threads=2, type_k=F32, type_v=F32, verbose=False, **options
    )


def logits(path: Path, tokens: list[int], **options: Any) -> Values:
    """llama.cpp's logits after each token: (tokens, vocabulary)."""
    with_logits = opened(path, logits_all=True, **options)
    with_logits.eval(tokens)
    found: Values = np.array(with_logits.scores[: len(tokens)], np.float32)
    with_logits.close()
    return found


def hidden(path: Path, tokens: list[int]) -> Values:
    """llama.cpp's output of an encoder for each token: (tokens, width)."""
    encoder = opened(path, embedding=True, pooling_type=LLAMA_POOLING_TYPE_NONE)
    context, width = encoder._ctx.ctx, encoder.n_embd()
    encoder._batch.reset()
    encoder._batch.add_sequence(tokens, 0, True)
    encoder._ctx.decode(encoder._batch)
    from llama_cpp import llama_cpp

    rows = [llama_cpp.llama_get_embeddings_ith(context, n) for n in range(len(tokens))]
    found = np.array([np.ctypeslib.as_array(row, (width,)) for row in rows], np.float32)
    encoder.close()
    return found


def transformers_logits(model: Any, tokens: list[int]) -> Values:
    with torch.no_grad():
        found: Values = model(torch.tensor([tokens])).logits[0].float().numpy()
    return found


def relative_error(found: Values, expected: Values) -> float:
    """The norm of the difference, relative to that of the expected values."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def largest_error(found: Values, expected: Values) -> float:
    """The largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
