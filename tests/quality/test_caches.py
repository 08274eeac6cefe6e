"""`instr quality` with types of the cache: figures of outputs, compared with llama-perplexity of
the same upstream, and what stands beside them."""

from __future__ import annotations

import functools
import json
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
from tests.kit.in_process import titled
from tests.kit.native_kit import DEMO, random_model
from tests.quality import test_quality
from tests.quality.test_quality import CHUNKS, base, text

__all__ = ["base", "text"]  # fixtures

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


def theirs(types: CacheTypes, stored: Path) -> dict[str, tuple[float, float]]:
    """llama-perplexity's figures with this cache."""
    return test_quality.divergence(DEMO, stored, "-fa", "on", "-ctk", types.k, "-ctv", types.v)


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


# --- what stands beside them ---


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
def test_the_last_range_is_what_the_other_figures_are_about(text: Path) -> None:
    outputs, _ = measured(text.read_text().rstrip())
    *before, last = outputs.by_position
    assert (last.perplexity, last.divergences) == (outputs.perplexity, outputs.divergences)
    assert [(at.first, at.last) for at in before] == [(1, 32), (33, 64), (65, 128), (129, 256)]
    assert [at.n_scored for at in outputs.by_position] == [
        CHUNKS * n for n in (32, 32, 64, 128, 255)
    ]


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
def test_reports_of_caches_and_of_models_with_them(instr: Instr, tmp_path: Path) -> None:
    """Two names of the demo model are two models."""
    (tmp_path / "other.gguf").write_bytes(DEMO.read_bytes())
    small = ("--ctx", 64, "--chunks", 1, "--threads", 1, "--cache-type-v", "f16,q8_0")
    done = instr("quality", "demo", *small, "--json")
    assert done.returncode == 0, done.stderr
    reports = {report["id"]: report for report in titled(json.loads(done.stdout))}
    plain, q8_0 = reports["caches"]["rows"]
    assert (plain["cache"], q8_0["cache"]) == ("f16", "K f16, V q8_0")
    assert q8_0["of f16"] == q8_0["memory"] / plain["memory"] == (16 + 8.5) / 32
    assert q8_0["mean KL"] == reports["outputs"]["rows"][1]["mean KL"] > 0
    assert [row["test"] for row in reports["bench"]["rows"]] == ["pp48", "tg16 @ d48"] * 2
    assert plain["decode t/s"] == pytest.approx(reports["bench"]["rows"][1]["t/s"])

    named = ("quality", "demo", "other.gguf", *small)
    page = instr(*named, "-o", "it.html")
    assert page.returncode == 0, page.stderr
    html = (tmp_path / "it.html").read_text()
    for words in ("demo.gguf, f16", "other.gguf, f16", "other.gguf, K f16, V q8_0"):
        assert words in html
    assert html.count("<svg") >= 3
    only = instr(*named, "--only", "outputs").stdout
    assert max(map(len, only.splitlines())) <= 80


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
