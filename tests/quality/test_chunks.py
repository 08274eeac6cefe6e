"""Chunks that are cut from a text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality.logits import cut_chunks

# --- text ---


def vocabulary(bos: int = -1, eos: int = -1, n: int = 50, adds_bos: bool = True) -> Any:
    """A model that is a vocabulary."""
    api = SimpleNamespace(llama_vocab_bos=lambda _: bos, llama_vocab_eos=lambda _: eos)
    return SimpleNamespace(api=api, vocab=None, n_vocab=n, adds_bos=adds_bos)


def test_a_text_is_cut_into_complete_chunks() -> None:
    found = cut_chunks(vocabulary(adds_bos=False), range(11), 4)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_chunks(vocabulary(adds_bos=False), range(12), 4)[2:] == [[8, 9, 10, 11]]
    assert cut_chunks(vocabulary(adds_bos=False), range(12), 4, at_most=1) == found[:1]


def test_two_chunks_are_the_least() -> None:
    assert len(cut_chunks(vocabulary(adds_bos=False), range(8), 4)) == 2
    with pytest.raises(UsageError, match=r"the text has 7 tokens; at least 8 are needed .* of 4:"):
        cut_chunks(vocabulary(), range(7), 4)


@pytest.mark.parametrize(
    ("bos", "eos", "first"),
    [(7, 9, 7), (0, 9, 0), (-1, 9, 9), (-1, 0, 0), (50, 9, 9), (49, 9, 49), (-1, -1, 0)],
)
def test_a_chunk_begins_with_bos_or_else_with_what_separates_texts(
    bos: int, eos: int, first: int
) -> None:
    one, two = cut_chunks(vocabulary(bos, eos), range(20, 28), 4)
    assert (one, two) == ([first, 21, 22, 23], [first, 25, 26, 27])
