"""`instr quality` with types of the cache: figures of outputs, compared with llama-perplexity of
the same upstream, and what stands beside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality.caches import parse_cache_types
from llamacpp_instr.lab.quality.divergence import Scores, round_of
from llamacpp_instr.lab.quality.logits import _doubling
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import random_model
from tests.kit.quality_kit import text

__all__ = ["text"]  # a fixture


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
