"""A model file with a strange vocabulary runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Instr
from tests.kit.mutants import (
    F32,
    I32,
    Entries,
    N,
    array,
    number,
    text,
    texts,
    write_mutant,
)
from tests.llama.test_mutants import NAMELESS, run

pytestmark = pytest.mark.native
MERGES = {"merges": texts(["a b", "nonsense", "", " "])}
# llama.cpp repairs these, or tolerates them
RUN: dict[str, Entries] = {
    "no scores": {"scores": b""},
    "scores that are NaN": {"scores": array([float("nan")] * N, F32)},
    "no types": {"token_type": b""},
    "unknown types": {"token_type": array([99, -1] * (N // 2), I32)},
    "tokens that all control": {"token_type": array([3] * N, I32)},
    "BPE without letters": {"model": text("gpt2"), "tokens": texts(NAMELESS), **MERGES},
    "UGM without a map": {"model": text("t5")},
    "UGM without letters": {"model": text("t5"), "tokens": texts(NAMELESS)},
    "RWKV without letters": {"model": text("rwkv"), "tokens": texts(NAMELESS)},
    "special tokens just beyond the vocabulary": {
        f"{name}_token_id": number(N)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask", "fim_pre")
    },
    "special tokens that are negative to C": {
        f"{name}_token_id": number(2**32 - 1) for name in ("bos", "eos", "unknown", "padding")
    },
    "suppressed tokens beyond the vocabulary": {"suppress_tokens": array([5000, -1], I32)},
}


@pytest.mark.parametrize("name", RUN)
def test_a_strange_vocabulary_runs(instr: Instr, tmp_path: Path, name: str) -> None:
    assert run(instr, write_mutant(tmp_path / "mutant.gguf", RUN[name]))[0] == 0
