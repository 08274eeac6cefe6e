"""Which positions of a text are scored, with models that are made by hand."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr.errors import InstrError, UsageError
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.quality import logits
from llamacpp_instr.quality.divergence import Outputs
from llamacpp_instr.quality.logits import (
    OutputOptions,
    _choose_batch,
    _default_ctx,
    _slices,
    check_comparison,
    check_contexts,
    compare_outputs,
    open_model,
)
from tests.kit.gguf_files import save
from tests.quality.test_chunks import vocabulary

# --- positions ---


@pytest.mark.parametrize(
    ("ctx", "batch", "slices"),
    [
        (8, 64, [(0, 4), (4, 8)]),
        (8, 4, [(0, 4), (4, 8)]),
        (8, 3, [(0, 3), (3, 4), (4, 7), (7, 8)]),
        (9, 64, [(0, 4), (4, 9)]),
    ],
)
def test_no_slice_of_a_chunk_crosses_its_middle(
    ctx: int, batch: int, slices: list[tuple[int, int]]
) -> None:
    assert list(_slices(ctx, batch)) == slices


@pytest.mark.parametrize(
    ("n_vocab", "batch"),
    [(100, 512), (32768, 512), (32769, 448), (131072, 128), (262144, 64), (10**6, 64)],
)
def test_the_logits_of_a_batch_take_64_mib_but_it_has_64_rows(n_vocab: int, batch: int) -> None:
    assert _choose_batch(n_vocab) == batch


@pytest.mark.parametrize(
    ("positions", "trained", "ctx"),
    [(None, 4096, 512), (None, 256, 256), (128, 4096, 128), (None, 0, 512), (4, 4096, 8)],
)
def test_a_chunk_has_512_tokens_or_as_many_as_the_model_knows(
    positions: int | None, trained: int, ctx: int
) -> None:
    model: Any = SimpleNamespace(n_positions=positions, n_ctx_train=trained)
    assert _default_ctx(model) == ctx


def test_a_chunk_has_at_least_eight_tokens() -> None:
    OutputOptions(ctx=8).check()
    with pytest.raises(UsageError, match="--ctx is 7; it must be at least 8"):
        OutputOptions(ctx=7).check()


# --- a comparison ---

N_VOCAB = 5
TABLES = [np.random.default_rng(seed).normal(0, 2, (N_VOCAB, N_VOCAB)) for seed in (1, 2)]
"""logits of the next token after each, of two models"""


class FakeContext:
    """Computes the table of its model, and keeps logits where it is asked for them."""

    memory, handle = 1, 1

    def __init__(self, model: Any, options: ContextOptions) -> None:
        self.model, self.options = model, options
        self.rows = np.zeros((0, N_VOCAB), np.float32)
        self.n_cached = self.n_cleared = 0
        self.api = SimpleNamespace(llama_get_logits=lambda _: self.rows.ctypes.data)

    def __enter__(self) -> FakeContext:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def clear(self) -> None:
        self.n_cached = 0
        self.n_cleared += 1

    def decode(self, tokens: list[int], all_logits: bool) -> None:
        assert all_logits is (self.n_cached >= 4)
        self.n_cached += len(tokens)
        self.rows = np.array([self.model.table[token] for token in tokens], np.float32)


def model_file(path: Path, tokens: list[str] | None, weights: bool = True) -> ModelFile:
    writer = gguf.GGUFWriter(path, "llama")
    if tokens is not None:
        writer.add_token_list(tokens)
    if weights:
        writer.add_tensor("output.weight", np.zeros((2, 4), np.float32))
    save(writer)
    return load_model_file(path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the library; has the contexts, and what else was asked for."""
    found: list[Any] = []

    def opened(_: object, file: ModelFile, __: object) -> Any:
        table = TABLES["b.gguf" in file.path.name]
        of = vocabulary(3, n=N_VOCAB)
        of.path, of.table, of.n_positions, of.n_ctx_train = file.path, table, None, 8
        return of

    def context(model: Any, options: ContextOptions) -> FakeContext:
        found.append(FakeContext(model, options))
        return found[-1]

    def written(_: object, n: int, seed: int, advance: Any) -> Any:
        for i in range(n):
            for _ in range(7):
                advance(1)
            yield [3, *np.random.default_rng(seed + i).integers(0, N_VOCAB, 7).tolist()]

    def tokenized(path: Path, texts: list[str], parse_special: bool) -> list[list[int]]:
        assert (path.name, parse_special) == ("a.gguf", False)
        return [[int(word) for word in text.split()] for text in texts]

    @contextlib.contextmanager
    def captured(_: object) -> Any:
        yield SimpleNamespace(release=lambda: found.append("released"))

    monkeypatch.setattr(logits, "check_memory", lambda file, of: found.append((file, of)))
    monkeypatch.setattr(logits, "tokenize", tokenized)
    monkeypatch.setattr(logits, "captured", captured)
    monkeypatch.setattr(logits, "last_words", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(logits, "open_model", opened)
    monkeypatch.setattr(logits, "Context", context)
    monkeypatch.setattr(logits, "WritingContext", context)
    monkeypatch.setattr(logits, "write_chunks", written)
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[ModelFile]:
    return [model_file(tmp_path / f"{name}.gguf", ["x"] * N_VOCAB) for name in "ab"]


def perplexity(table: np.ndarray, texts: list[list[int]]) -> float:
    """Of the tokens at 5 to 7 of each chunk, by the definition."""
    p = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
    nll = [-math.log(p[text[i - 1], text[i]]) for text in texts for i in (5, 6, 7)]
    return math.exp(sum(nll) / len(nll))


@pytest.mark.parametrize("batch", [None, 3])
def test_the_second_half_of_each_chunk_of_a_text_is_scored(
    made: list[Any], files: list[ModelFile], batch: int | None
) -> None:
    words = np.random.default_rng(9).integers(0, N_VOCAB, 27).tolist()
    told: list[tuple[int, int]] = []
    found = compare_outputs(
        files, " ".join(map(str, words)), OutputOptions(batch=batch, threads=2),
        lambda *of: told.append(of),
    )  # fmt: skip
    texts = [[3, *words[at + 1 : at + 8]] for at in (0, 8, 16)]
    assert found.perplexity.value == pytest.approx(perplexity(TABLES[0], texts), rel=1e-5)
    (other,) = found.divergences
    assert other.perplexity.value == pytest.approx(perplexity(TABLES[1], texts), rel=1e-5)
    assert (found.n_scored, found.n_chunks, found.ctx, found.seed) == (9, 3, 8, None)
    assert told[-1] == (3 * 8 * 2, 3 * 8 * 2)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    contexts = [of for of in made if isinstance(of, FakeContext)]
    assert [of.n_cleared for of in contexts] == [3, 3]
    options = ContextOptions(ctx=8, batch=batch or 512, ubatch=batch or 512, threads=2)
    assert [of.options for of in contexts] == [options] * 2
    asked = [of for of in made if isinstance(of, tuple)]
    assert asked == [(file, ContextOptions(threads=2)) for file in files]
    assert made[-1] == "released"


@pytest.mark.parametrize(("n", "n_chunks"), [(None, 16), (2, 2)])
def test_without_a_text_the_reference_writes_one(
    made: list[Any], files: list[ModelFile], n: int | None, n_chunks: int
) -> None:
    told: list[tuple[int, int]] = []
    options = OutputOptions(ctx=8, chunks=n, seed=4)
    found = compare_outputs(files, None, options, lambda *of: told.append(of))
    texts = [
        [3, *np.random.default_rng(4 + i).integers(0, N_VOCAB, 7).tolist()] for i in range(n_chunks)
    ]
    assert found.perplexity.value == pytest.approx(perplexity(TABLES[0], texts), rel=1e-5)
    assert (found.n_scored, found.n_chunks, found.seed) == (3 * n_chunks, n_chunks, 4)
    whole = n_chunks * (8 * 2 + 7)
    assert told[-1] == (whole, whole)
    assert [of.options for of in made if isinstance(of, FakeContext)][2] == ContextOptions(ctx=8)


def test_a_text_may_have_more_chunks_than_are_asked_for(
    made: list[Any], files: list[ModelFile]
) -> None:
    found: Outputs = compare_outputs(files, "1 2 3 4 " * 10, OutputOptions(ctx=8, chunks=2))
    assert found.n_chunks == 2
    assert made


# --- what cannot be compared ---


def test_a_vocabulary_alone_computes_nothing(tmp_path: Path) -> None:
    file = model_file(tmp_path / "v.gguf", ["a"], weights=False)
    with pytest.raises(UsageError, match="contains only a vocabulary"):
        check_comparison([file], OutputOptions())


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (["a", "b", "c"], None),
        (["a", "b"], "2 and 3 tokens"),
        (["a", "b", "d"], "token 2 is 'd' and 'c'"),
        (["x", "y", "c"], "token 0 is 'x' and 'a'"),
        (None, None),
    ],
)
def test_vocabularies_must_have_the_same_tokens(
    theirs: list[str] | None, problem: str | None, tmp_path: Path
) -> None:
    pair = [
        model_file(tmp_path / "a.gguf", ["a", "b", "c"]),
        model_file(tmp_path / "b.gguf", theirs),
    ]
    expected = pytest.raises(UsageError, match=problem) if problem else contextlib.nullcontext()
    with expected:
        check_comparison(pair, OutputOptions())
    if theirs is None:
        check_comparison(pair[::-1], OutputOptions())


def test_contexts_need_a_cache_and_vocabularies_of_one_size() -> None:
    def context(n_vocab: int, memory: int = 1) -> Any:
        model = SimpleNamespace(path=Path(f"m{n_vocab}"), n_vocab=n_vocab)
        return SimpleNamespace(model=model, memory=memory)

    check_contexts([context(5), context(5)])
    with pytest.raises(UsageError, match="m6 and m5 have different vocabularies: 6 and 5 tokens"):
        check_contexts([context(5), context(5), context(6)])
    with pytest.raises(UsageError, match="m5 is an encoder"):
        check_contexts([context(5), context(5, 0)])


@pytest.mark.parametrize(
    ("diffusion", "encoder", "decoder", "problem"),
    [
        (False, False, True, None),
        (True, False, True, "is a diffusion model"),
        (False, True, True, "has an encoder"),
        (False, False, False, "has an encoder"),
    ],
)
def test_a_model_must_predict_the_next_token(
    diffusion: bool, encoder: bool, decoder: bool, problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = SimpleNamespace(is_diffusion=diffusion, has_encoder=encoder, has_decoder=decoder)
    monkeypatch.setattr(logits, "LoadedModel", lambda *_: contextlib.nullcontext(model))
    file: Any = SimpleNamespace(path=Path("m"))
    with contextlib.ExitStack() as stack:
        if problem is None:
            assert open_model(stack, file, None) is model  # type: ignore[arg-type]
        else:
            with pytest.raises(UsageError, match=problem):
                open_model(stack, file, None)  # type: ignore[arg-type]


def test_a_model_without_logits_is_an_error() -> None:
    context: Any = SimpleNamespace(
        api=SimpleNamespace(llama_get_logits=lambda _: None), handle=1,
        model=SimpleNamespace(path=Path("m")),
    )  # fmt: skip
    with pytest.raises(InstrError, match="m: the model returns no logits"):
        logits.logits_of(context, 1)
