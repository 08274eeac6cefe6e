"""`instr quality` with types of the cache has llama-perplexity's figures in all digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.lab.quality.divergence import CacheTypes
from tests.kit.native_kit import DEMO
from tests.kit.quality_kit import CHUNKS, text
from tests.parts.recipes.test_cache_memory import CACHES, CTX, N_SCORED, measured
from tests.parts.unpatched.test_quality import base, divergence

__all__ = ["base", "text"]  # fixtures


def theirs(types: CacheTypes, stored: Path) -> dict[str, tuple[float, float]]:
    """llama-perplexity's figures with this cache."""
    return divergence(DEMO, stored, "-fa", "on", "-ctk", types.k, "-ctv", types.v)


def base_of(stored: Path, n_vocab: int) -> Any:
    """(tokens scored, vocabulary): ln p of the reference as llama-perplexity stores it, in 16 bits
    after a float32 each for their scale and the least (`log_softmax` of tools/perplexity)."""
    data = stored.read_bytes()
    begin = 8 + 3 * 4 + CHUNKS * CTX * 4  # "_logits_", three numbers, and the tokens
    rows = np.frombuffer(data, np.uint16, offset=begin).reshape(CHUNKS * N_SCORED, n_vocab + 4)
    scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T[..., None]
    return scale * rows[:, 4:].astype(np.float32) + least


@pytest.mark.native
@pytest.mark.parametrize("types", CACHES, ids=lambda of: of.name)
def test_figures_equal_those_of_llama_perplexity_in_all_digits(
    text: Path, base: tuple[Path, str], types: CacheTypes
) -> None:
    """Its KL divergence is that from the reference's rounded probabilities, without those below
    e^-16, so it is computed here once more from these."""
    outputs, every = measured(text.read_text().rstrip())
    number = 1 + CACHES.index(types)
    its, printed = outputs.divergences[number - 1], theirs(types, base[0])
    assert (round(its.perplexity.value, 4), round(its.perplexity.error, 4)) == tuple(
        round(value, 4) for value in printed["Mean PPL(Q)"]
    )
    percent = 100 * its.same_top.value, 100 * its.same_top.error
    assert tuple(round(value, 3) for value in percent) == printed["Same top p"]

    ln_q = every[number].astype(np.float64)
    ln_q -= np.log(np.exp(ln_q).sum(axis=1, keepdims=True))
    ln_p = base_of(base[0], ln_q.shape[1])
    kl = np.where(ln_p > -16, np.exp(ln_p) * (ln_p - ln_q), 0).sum(axis=1)
    error = kl.std() / math.sqrt(len(kl) - 1)
    assert (f"{kl.mean():.6f}", f"{error:.6f}") == tuple(
        f"{value:.6f}" for value in printed["Mean KLD"]
    )
    assert its.kl.value == pytest.approx(kl.mean(), rel=0.01, abs=1e-5)
