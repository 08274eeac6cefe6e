"""`instr quality` with types of the cache: its memory is that of the caches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.lab.quality import logits
from llamacpp_instr.lab.quality.caches import ROUNDS
from llamacpp_instr.lab.quality.divergence import CacheTypes, Outputs, Scores
from llamacpp_instr.lab.quality.logits import OutputOptions, compare_outputs
from llamacpp_instr.model.file import load_model_file
from tests.kit.native_kit import DEMO
from tests.kit.quality_kit import CHUNKS, text

__all__ = ["text"]  # a fixture

CACHES = tuple(
    CacheTypes(*of)
    for of in (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q5_1"), ("iq4_nl", "f16"))
)
CTX, N_SCORED = 512, 255


class Kept(Scores):
    """Scores that also keep the logits."""

    every: tuple[list[Any], ...]

    def add(self, logits: Any, next_tokens: Any) -> None:
        for kept, rows in zip(self.every, logits, strict=True):
            kept.append(rows.copy())
        super().add(logits, next_tokens)


@functools.cache
def measured(text: str) -> tuple[Outputs, list[Any]]:
    """The outputs, and for each cache the logits (tokens scored, vocabulary)."""
    Kept.every = tuple([] for _ in range(1 + len(CACHES)))
    files = [load_model_file(DEMO)] * (1 + len(CACHES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits, "Scores", Kept)
        options = OutputOptions(chunks=CHUNKS, threads=1)
        outputs = compare_outputs(files, text, options, caches=[CacheTypes(), *CACHES])
    # the halves of each chunk alternate; the last prediction of a chunk has no next token
    return outputs, [np.concatenate([rows[:N_SCORED] for rows in of[1::2]]) for of in Kept.every]


@pytest.mark.native
def test_the_memory_is_that_of_the_cache(text: Path) -> None:
    """Of 4 layers with 2 heads of 64 each; a block of 32 values has 34, 18, 24 and 18 bytes."""
    outputs, _ = measured(text.read_text().rstrip())
    values = CTX * 4 * 2 * 64
    bits = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5, "q5_1": 6, "iq4_nl": 4.5}
    assert [cache.n_bytes for cache in outputs.caches] == [
        values * (bits[of.k] + bits[of.v]) / 8 for of in (CacheTypes(), *CACHES)
    ]
    assert all(min(ns) > 0 for cache in outputs.caches for ns in cache.rounds)
    assert {len(cache.rounds) for cache in outputs.caches} == {ROUNDS}
