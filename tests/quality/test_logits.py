"""Which positions of a text are scored, and which models can be compared."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality.logits import (
    OutputOptions,
    _choose_batch,
    _default_ctx,
    _slices,
    check_comparison,
)
from llamacpp_instr.model.file import ModelFile, load_model_file
from tests.kit.gguf_files import save

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


# --- what cannot be compared ---


def model_file(path: Path, tokens: list[str] | None, weights: bool = True) -> ModelFile:
    writer = gguf.GGUFWriter(path, "llama")
    if tokens is not None:
        writer.add_token_list(tokens)
    if weights:
        writer.add_tensor("output.weight", np.zeros((2, 4), np.float32))
    save(writer)
    return load_model_file(path)


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
