"""Learning the tokenizer's pieces from text by byte-pair merging."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from tools.demo_model.tokenizer import SPACE

Word = tuple[str, ...]
Pair = tuple[str, str]

_WORD = re.compile(f"{SPACE}?(?:[A-Za-z]+|[^A-Za-z{SPACE}])")


def learn_pieces(texts: Iterable[str], count: int) -> list[str]:
    """Return ``count`` pieces, the most useful merges first and the single characters last.

    The order is the score: a merge that was learned earlier is done earlier.
    """
    words = Counter(word for text in texts for word in _split(text))
    letters = sorted({letter for word in words for letter in word})
    merges: list[str] = []
    while len(merges) + len(letters) < count:
        pairs = _count_pairs(words)
        if not pairs:
            raise ValueError(f"the text has only {len(merges) + len(letters)} pieces to learn")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = _merge_everywhere(words, best)
        # Two different pairs may make the same piece, which is then already known.
        if best[0] + best[1] not in merges:
            merges.append(best[0] + best[1])
    return [*merges, *letters]


def _split(text: str) -> list[Word]:
    """Return the text's words and punctuation marks apart, so that no piece holds both."""
    return [tuple(word) for word in _WORD.findall(SPACE + text.replace(" ", SPACE))]


def _count_pairs(words: Counter[Word]) -> Counter[Pair]:
    pairs: Counter[Pair] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            pairs[pair] += times
    return pairs


def _merge_everywhere(words: Counter[Word], pair: Pair) -> Counter[Word]:
    merged: Counter[Word] = Counter()
    for word, times in words.items():
        merged[_merge(word, pair)] += times
    return merged


def _merge(word: Word, pair: Pair) -> Word:
    """Return the word with the pair merged at every occurrence, from left to right."""
    parts: list[str] = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            parts.append(word[at] + word[at + 1])
            at += 2
        else:
            parts.append(word[at])
            at += 1
    return tuple(parts)
