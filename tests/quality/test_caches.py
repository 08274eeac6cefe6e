"""`instr quality` with types of the cache: figures of outputs, compared with llama-perplexity of
the same upstream, and what stands beside them."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality import logits
from llamacpp_instr.lab.quality.caches import ROUNDS, parse_cache_types
from llamacpp_instr.lab.quality.divergence import CacheTypes, Outputs, Scores, round_of
from llamacpp_instr.lab.quality.logits import OutputOptions, _doubling, compare_outputs
from llamacpp_instr.model.file import load_model_file
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import DEMO, random_model
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


def test_every_type_of_k_is_combined_with_every_type_of_v() -> None:
    assert parse_cache_types(None, None) == []
    assert parse_cache_types("q8_0,q4_0", None) == [("q8_0", "f16"), ("q4_0", "f16")]
    assert parse_cache_types("f16,q8_0,f16", "q8_0,q4_1") == [
        ("f16", "q8_0"), ("f16", "q4_1"), ("q8_0", "q8_0"), ("q8_0", "q4_1")
    ]  # fmt: skip
    names = [types.name for types in parse_cache_types("q8_0", "q8_0,f16")]
    assert names == ["q8_0", "K q8_0, V f16"]
    with pytest.raises(
        UsageError, match=r"--cache-type-v 'q4_k' is not one of f32, f16, .*, q5_1$"
    ):
        parse_cache_types(None, "q8_0,q4_k")


@pytest.mark.parametrize("ctx", [8, 9, 63, 64, 65, 512, 513, 2048])
def test_ranges_cover_a_chunk_and_the_last_is_its_scored_half(ctx: int) -> None:
    ranges = _doubling(ctx)
    positions = [i for of in ranges for i in range(ctx)[of]]
    assert positions == list(range(ctx - 1)), "nothing follows the last token"
    assert ranges[-1] == slice(ctx // 2, ctx - 1)
    assert sum(round_of(ctx)) == ctx
    assert len(ranges) == max(2, math.floor(math.log2(ctx // 2 / 32)) + 2)


def test_positions_of_all_chunks_are_chosen() -> None:
    """Whatever the pieces in which they were scored."""
    random = np.random.default_rng(1)
    one, other = random.normal(0, 2, (2, 3, 7, 5)).astype(np.float32)  # 3 chunks of 7 positions
    tokens = random.integers(0, 5, (3, 7))
    whole, part = Scores(["a", "b"]), Scores(["a", "b"])
    for i in range(3):
        for rows in (slice(0, 4), slice(4, 7)):
            whole.add([one[i, rows], other[i, rows]], tokens[i, rows])
        part.add([one[i, 2:5], other[i, 2:5]], tokens[i, 2:5])
    chosen = whole.within(7, slice(2, 5))
    assert (chosen.perplexity(), chosen.divergences()) == (part.perplexity(), part.divergences())
    assert chosen.n_tokens == 9


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


@pytest.mark.native
@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("demo", ("--cache-type-k", "q9"), "--cache-type-k 'q9' is not one of"),
        ("demo", ("--cache-type-k", "q8_0,"), "--cache-type-k '' is not one of"),
        ("demo", ("--cache-type-k", "f16"), "name a CANDIDATE, or a type of the cache other than"),
        ("mamba-dense", ("--cache-type-k", "q8_0"), "has no KV cache, so its types change nothing"),
        ("grok-moe", ("--cache-type-v", "q8_0"), "quantized V cache requires flash_attn"),
        ("deepseek2-moe", ("--cache-type-k", "q8_0"), "different K (q8_0) and V (f16) cache types"),
        ("tiny", ("--cache-type-k", "q8_0"), "needs heads of a multiple of 32 values"),
    ],
)
def test_wrong_types_are_one_clear_line(
    instr: Instr, models: Path, model: str, options: tuple[str, ...], words: str
) -> None:
    paths = {"demo": "demo", "tiny": models / "llama.gguf"}
    path = paths.get(model, random_model(model))
    assert_refused(instr("quality", path, "--ctx", 32, "--chunks", 1, *options), words)
    only = instr("quality", path, "--only", "weights", *options)
    assert_refused(only, f"{options[0]} has no effect with --only weights")
